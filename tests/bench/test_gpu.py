"""The benchmark for a GPU, as far as it goes without one: a rehearsal, and what it does about
parts that fail, hang, or come too late."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.dom import minidom

import pytest
import torch
from safetensors.torch import load_file

from bench import common, gpu, gpu_build, gpu_device, kernels
from bench.common import Run, samples_path
from bench.gpu_child import PartFailed
from bench.gpu_compare import divergences
from bench.gpu_decode import waits_timed, weight_bytes
from bench.gpu_device import counted
from bench.gpu_setup import Context, Result, Setup, figure
from bench.kernel_work import Draw, attention
from bench.kernel_work import works as every_work
from bench.workloads import Ask
from overlap_spec.types import TokenLogprobs
from overlap_spec.worker.streams import InlineStreams

# Of hangs alone: a rehearsal takes minutes beside other work.
pytestmark = pytest.mark.timeout(3000)

TARGETS = {
    "verify_roofline_share": 0.85,
    "constrained_tpot_ratio": 1.02,
    "host_ms_per_step": 0.5,
    "eagle3_speedup": 2.36,
    "exposed_share": 0.02,
    "union_tpot_saving": 0.2,
    "transformers_speedup": 5.0,
    "transformers_static_speedup": None,
    "verify_share_64_nodes_32k": 0.75,
}
PARTS = """
import os, time
from bench.gpu_setup import Result, figure

def well(context):
    return Result({"one": figure(1.0, least=0.5, unit="s", by={"": 1.0})}, {"pid": os.getpid()})

def differing(context):
    return Result(differences=["request 3"])

def alike(context):
    return Result(differences=[])

def infinite(context):
    return Result(details={"share": float("inf")})

def raising(context):
    raise ValueError("no such kernel")

def lacking(context):
    import nonesuch

def exiting(context):
    raise SystemExit(1)

def dying(context):
    os._exit(3)

def hanging(context):
    time.sleep(60)

def telling(context):
    for number in range(60):
        context.keep(Result(details={"numbers": list(range(number + 1))}, faults=["one is odd"]))
        time.sleep(0.01 if number < 3 else 60)

def cells(context):
    # Three cells; the process is killed in the second of them, the first time.
    found = dict(context.before.get("cells", {}))
    samples = []
    for name in ("a", "b", "c"):
        if name in found:
            continue
        if name == "b" and not context.before:
            os._exit(3)
        found[name] = os.getpid()
        samples.append({"cell": name})
        figures = {"cells": figure(float(len(found)), least=3, unit="cells", by={"": 1.0})}
        context.keep(Result(figures, {"cells": found}, list(samples)))
    return Result(figures, {"cells": found}, samples)

def waiting(context):
    context.keep(Result({"half": figure(0.5, unit="s", by={"": 0.5})}, {"found": 1}, [{"n": 1}]))
    open(os.environ["PART_IS_WAITING"], "w").write(str(os.getpid()))
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The record of a rehearsal: its last line, and its file."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    told = io.StringIO()
    with redirect_stdout(told):
        gpu.main(["--rehearse", "--budget-s", "3000", "--json", str(path)])
    record: dict[str, Any] = json.loads(told.getvalue().splitlines()[-1])
    return record, path


def test_a_rehearsal_runs_every_part(rehearsal: tuple[dict[str, Any], Path]) -> None:
    record, path = rehearsal
    assert json.loads(path.read_text()) == record
    status = {name: part["status"] for name, part in record["parts"].items()}
    device = [part.name for part in gpu.PARTS if part.device]
    assert list(status) == [part.name for part in gpu.PARTS]
    assert {name: "skipped: no device" if name in device else "ok" for name in status} == status
    assert record["complete"]
    assert record["rehearsal"]
    assert record["equal"] is True
    assert record["seconds"] < record["budget_s"]
    parts = {json.loads(line)["part"] for line in samples_path(path).read_text().splitlines()}
    assert parts == {part.name for part in gpu.PARTS if part.weights and not part.device}
    assert len(record["parts"]["roofline"]["cells"]) == 3
    assert record["parts"]["checkpoint"]["target"]["parameters"] > 10**6


def test_every_figure_has_its_target(rehearsal: tuple[dict[str, Any], Path]) -> None:
    record, _ = rehearsal
    assert {name: figure["target"] for name, figure in record["figures"].items()} == TARGETS
    for name, found in record["figures"].items():
        assert found["rehearsal"] is True
        assert found["value"] in found["by"].values(), name
        if found["target"] is not None:
            reached = found["value"] >= found["target"]
            assert found["met"] is (reached if found["goal"] == "at least" else not reached), name
    eagle3 = record["figures"]["eagle3_speedup"]
    # By measured times, which a busy machine may turn round: whether drafts pay is a figure.
    assert 0 < eagle3["bound"] < eagle3["accept_length"]
    assert record["parts"]["verify"]["nodes"] == 16
    for side in record["parts"]["transformers"]["workloads"].values():
        assert all(system["same_text"] == 1 for system in side.values())


def test_a_rehearsal_is_plotted_with_its_targets(rehearsal: tuple[dict[str, Any], Path]) -> None:
    pytest.importorskip("matplotlib")
    record, path = rehearsal
    drawn = path.with_name(record["plot"]).read_text()
    texts = [t.firstChild.data for t in minidom.parseString(drawn).getElementsByTagName("text")]
    assert any(text.startswith("Rehearsal, not a measurement") for text in texts)
    assert "eagle3 speedup (at least 2.36)" in texts
    for name in TARGETS:
        assert any(text.startswith(name.replace("_", " ")) for text in texts), name
    assert 'href="http' not in drawn


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., gpu.Report]:
    """Runs parts of ``PARTS`` by name; ``most_s`` is the first one's limit."""
    (tmp_path / "parts_of_a_test.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    state = gpu.State(tmp_path / "state")

    def run(
        *names: str, most_s: float = 60, budget_s: float = 200, go_on: bool = False
    ) -> gpu.Report:
        options = Namespace(quick=True, seed=0, json=None, go_on=go_on)
        report = gpu.Report(state.open(options, ["--seed", "0"]), rehearsal=False)
        if go_on:
            report.take_up(state.read())
        # The first one's limit; the others need the time to start a process.
        parts = [gpu.Part(names[0], f"parts_of_a_test:{names[0]}", 1, most_s)]
        parts += [gpu.Part(name, f"parts_of_a_test:{name}", 1, 100) for name in names[1:]]
        setup = Setup(False, True, 0, "none", state.checkpoint)
        gpu.run_all(report, setup, gpu.Clock(budget_s), (), parts)
        return report

    return run


@pytest.mark.parametrize(
    ("name", "most_s", "error"),
    [
        ("raising", 60, "ValueError: no such kernel"),
        ("lacking", 60, "not installed: No module named 'nonesuch'"),
        ("exiting", 60, "ended with exit status 1"),
        ("dying", 60, "its process ended with exit status 3"),
        ("hanging", 1, "not done within 1 s"),
        ("infinite", 60, "ValueError: Out of range float"),
        ("nonesuch", 60, "AttributeError"),
    ],
)
def test_a_part_that_fails_leaves_the_others(
    start: Callable[..., gpu.Report], name: str, most_s: float, error: str
) -> None:
    record = start(name, "well", most_s=most_s).record
    assert record["parts"][name]["status"] == "failed"
    assert record["parts"][name]["error"].startswith(error)
    assert record["parts"]["well"]["status"] == "ok"
    assert record["figures"]["one"]["met"] is True
    (fault,) = gpu.faults(record)
    assert fault.startswith(f"{name}: {error}")


def test_a_part_that_is_ended_keeps_what_it_told(start: Callable[..., gpu.Report]) -> None:
    row = start("telling", most_s=8).record["parts"]["telling"]
    assert row["status"] == "failed"
    assert row["numbers"] == [0, 1, 2, 3]
    assert row["error"] == "not done within 8 s; one is odd"


def test_a_call_goes_on_where_one_was_ended(
    start: Callable[..., gpu.Report], tmp_path: Path
) -> None:
    """What was told before is kept, and not measured again; what is done is left alone."""
    first = start("well", "cells", "raising", "alike").record
    assert [row["status"] for row in first["parts"].values()] == ["ok", "failed", "failed", "ok"]
    assert list(first["parts"]["cells"]["cells"]) == ["a"]
    assert first["figures"]["cells"]["value"] == 1
    assert first["complete"]
    second = start("well", "cells", "raising", "alike", go_on=True).record
    cells = second["parts"]["cells"]
    assert cells["status"] == "ok"
    assert "error" not in cells
    assert cells["cells"]["a"] == first["parts"]["cells"]["cells"]["a"] != cells["cells"]["b"]
    assert second["figures"]["cells"]["value"] == 3
    assert second["figures"]["one"] == first["figures"]["one"]
    assert {name: row["calls"] for name, row in second["parts"].items()} == {
        "well": 1, "cells": 2, "raising": 2, "alike": 1
    }  # fmt: skip
    assert second["calls"] == 2
    lines = samples_path(tmp_path / "state" / "record.json").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [(t["part"], t["call"], t["cell"]) for t in told] == [
        ("cells", 1, "a"), ("cells", 2, "b"), ("cells", 2, "c")
    ]  # fmt: skip


def test_what_failed_comes_after_what_was_never_begun(start: Callable[..., gpu.Report]) -> None:
    report = start("raising", "well", "alike")
    report.record["parts"]["well"]["status"] = "running"
    del report.record["parts"]["alike"]
    parts = [gpu.Part(name, name, 1, 1) for name in ("raising", "well", "alike")]
    assert [part.name for part in gpu.in_order(parts, report, ())] == ["well", "alike", "raising"]
    assert [part.name for part in gpu.in_order(parts, report, ["raising"])] == ["raising"]


def test_a_call_that_is_killed_keeps_its_figures(
    start: Callable[..., gpu.Report], tmp_path: Path
) -> None:
    """And nothing that it started outlives it."""
    sign = tmp_path / "sign"
    code = f"""
from argparse import Namespace
from bench import gpu
state = gpu.State(gpu.Path({str(tmp_path / "state")!r}))
options = Namespace(quick=True, seed=0, json=None, go_on=False)
report = gpu.Report(state.open(options, ["--seed", "0"]), rehearsal=False)
setup = gpu.Setup(False, True, 0, "none", state.checkpoint)
parts = [gpu.Part(n, f"parts_of_a_test:{{n}}", 1, 200) for n in ("well", "waiting", "alike")]
if __name__ == "__main__":
    gpu.run_all(report, setup, gpu.Clock(300), (), parts)
"""
    (tmp_path / "killed.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(gpu.ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PART_IS_WAITING": str(sign)}
    caller = subprocess.Popen([sys.executable, str(tmp_path / "killed.py")], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (sign.exists() and sign.read_text()):
            assert caller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        part = int(sign.read_text())
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + 60
    while is_running(part):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record = json.loads((tmp_path / "state" / "record.json").read_text())
    assert record["parts"]["waiting"]["status"] == "running"
    assert record["parts"]["waiting"]["found"] == 1
    assert record["figures"].keys() == {"one", "half"}
    report = start("well", "alike", go_on=True)
    assert report.status("alike") == "ok"
    assert report.record["figures"].keys() == {"one", "half"}
    assert report.record["parts"]["well"]["calls"] == 1


def is_running(process: int) -> bool:
    """Whether a process is there, and not one that only waits to be reaped."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_run_that_is_not_there_or_another_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(tmp_path / "state")
    asked = ["--rehearse", "--state", state, "--only", "kernels"]
    for more, error in (
        (["--continue"], "holds no run"),
        ([], None),
        (["--continue"], None),
        (["--continue", "--seed", "3"], "holds another run: --like llama-3.1-8b --seed 0"),
    ):
        if error is None:
            gpu.main([*asked, *more])
            record = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert record["calls"] == 1 + bool(more)
            continue
        with pytest.raises(SystemExit) as ended:
            gpu.main([*asked, *more])
        assert ended.value.code == 2
        assert error in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse", "--continue"])
    assert "needs the --state" in capsys.readouterr().err


def test_the_checkpoint_is_made_for_parts_that_need_it() -> None:
    report = gpu.Report(Run("gpu", Namespace(quick=True, seed=0, json=None), []), rehearsal=True)
    names = [part.name for part in gpu.in_order(gpu.PARTS, report, ["kernels"])]
    assert names == ["kernels"]
    names = [part.name for part in gpu.in_order(gpu.PARTS, report, ["attention", "host"])]
    assert names == ["attention", "checkpoint", "host"]
    assert gpu.in_order(gpu.PARTS, report, ()) == list(gpu.PARTS)


def test_parts_share_a_process_until_one_fails(
    start: Callable[..., gpu.Report], tmp_path: Path
) -> None:
    record = start("alike", "well", "differing", "alike").record
    assert record["equal"] is False
    assert record["parts"]["differing"]["error"] == "request 3"
    kept = json.loads((tmp_path / "state" / "record.json").read_text())
    assert kept["parts"].keys() == record["parts"].keys()
    assert kept["complete"] is False
    assert start("well", "alike").record["equal"] is True
    assert start("well").record["equal"] is None


def test_parts_that_come_too_late_are_skipped(start: Callable[..., gpu.Report]) -> None:
    closing = gpu.CLOSING_S
    record = start("well", "hanging", budget_s=closing + 0.5).record
    assert {part["status"] for part in record["parts"].values()} == {"skipped: time"}
    assert record["figures"] == {}
    # A part may take what is left, and no more.
    record = start("hanging", "well", budget_s=closing + 6).record
    assert re.fullmatch("not done within [2-6] s", record["parts"]["hanging"]["error"])
    assert record["parts"]["well"] == {"status": "skipped: time"}


def test_without_the_checkpoint_its_parts_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_build, "words", lambda _: ["--vocab", "7"])
    options = Namespace(quick=True, seed=0, json=None)
    report = gpu.Report(Run("gpu", options, []), rehearsal=True)
    gpu.run_all(report, Setup(True, True, 0, "", tmp_path / "checkpoint"), gpu.Clock(200))
    parts = report.record["parts"]
    assert "vocab_size 7 is below" in parts["checkpoint"]["error"]
    needing = {part.name for part in gpu.PARTS if part.weights and not part.device}
    assert {parts[name]["status"] for name in needing} == {"skipped: no checkpoint"}
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other sizes is built anew; one that was ended before its end is no checkpoint."""
    setup = Setup(True, True, 0, "", tmp_path / "checkpoint")
    (tmp_path / "unfinished-of-another-call").mkdir()
    first = gpu_build.Build(setup)
    made = first.wait(120)
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    before = (setup.target / "config.json").stat().st_mtime_ns
    again = gpu_build.Build(setup)
    assert again.wait(0) == made
    again.close()
    assert (setup.target / "config.json").stat().st_mtime_ns == before
    monkeypatch.setattr(gpu_build, "REHEARSAL_VOCABULARY", 4100)
    other = gpu_build.Build(setup)
    with pytest.raises(PartFailed, match="not written within 0 s"):
        other.wait(0)
    other.close()
    assert not setup.folder.exists()


def test_a_failed_part_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(report: gpu.Report, *_: Any) -> None:
        report.attempt("kernels", lambda _: Result(faults=["rope: disagree"]))

    monkeypatch.setattr(gpu, "run_all", run_all)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--rehearse"])
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert "error: kernels: rope: disagree" in told.err
    assert json.loads(told.out.splitlines()[-1])["parts"]["kernels"]["status"] == "failed"


def test_a_rehearsal_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, error in (
        (["--rehearse", "--json", str(gpu.RESULTS / "a.json")], "measures nothing"),
        (["--budget-s", "0"], "--budget-s must be over 0"),
        (["--like", "nonesuch"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as ended:
            gpu.main(arguments)
        assert ended.value.code == 2
        assert error in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_records_are_named_by_device_and_day() -> None:
    path = gpu.default_path("NVIDIA H100 80GB HBM3", "2026-11-21T19:31:39+00:00")
    assert path == gpu.RESULTS / "nvidia-h100-80gb-hbm3-2026-11-21.json"


def test_a_figure_is_held_against_its_target() -> None:
    assert figure(0.85, least=0.85)["met"] is True
    assert figure(0.84, least=0.85)["met"] is False
    assert figure(1.02, most=1.02) == {
        "value": 1.02, "target": 1.02, "goal": "at most", "met": True
    }  # fmt: skip
    assert figure(1.03, most=1.02)["met"] is False
    assert figure(7.0, unit="ms") == {
        "value": 7.0, "target": None, "goal": None, "met": None, "unit": "ms"
    }  # fmt: skip


def test_tests_are_counted() -> None:
    report = """<testsuites><testsuite errors="1" failures="1" skipped="1" tests="5">
    <testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"/>
    <testcase classname="tests.a" name="three"><failure message="1 is not 2">…</failure></testcase>
    <testcase classname="tests.b" name="four"><skipped message="no"/></testcase>
    <testcase classname="" name="tests.c"><error message="no module"/></testcase>
    </testsuite></testsuites>"""
    assert counted(report) == {
        "passed": 2, "tests": 5, "failures": 1, "errors": 1, "skipped": 1,
        "faults": ["tests.a.three: 1 is not 2", ".tests.c: no module"],
    }  # fmt: skip


def test_tests_are_run_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was run to its end is not run again."""
    monkeypatch.setattr(gpu_device, "ROOT", tmp_path)
    # Where Ctrl-C is ignored, as in a shell's background, the one that hangs is killed after 3 s.
    monkeypatch.setattr(gpu_device, "REPORT_S", 8.0)
    (tmp_path / "tests" / "worker").mkdir(parents=True)
    mark = "import pytest\npytestmark = pytest.mark.gpu\n"
    folder = tmp_path / "tests" / "worker"
    (folder / "test_gpu.py").write_text(f"{mark}def test_waits(): pass\ndef test_no(): assert 0\n")
    (folder / "test_replay.py").write_text(f"{mark}def test_one(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    kept: list[Result] = []
    context = Context(Setup(False, True, 0, "", tmp_path), kept.append)
    found = gpu_device.first_tests(context)
    assert found.faults == []
    assert found.details["passed"] == 2
    found = gpu_device.tests(context)
    assert [row["whole"] for row in found.details["files"].values()] == [True, True]
    assert found.details["passed"] == 2
    (fault,) = found.faults
    assert fault.startswith("tests/worker/test_gpu.py: ")
    assert "test_no" in fault
    assert len(kept) == 4
    (folder / "test_kernel.py").write_text(f"{mark}def test_hangs(): __import__('time').sleep(999)")
    context.before, context.ends_s = found.details, time.monotonic() + gpu_device.REPORT_S + 2
    found = gpu_device.tests(context)
    assert [row["whole"] for row in found.details["files"].values()] == [True, True, False]
    assert found.faults[1].startswith("tests/worker/test_kernel.py: not done within")
    assert len(kept) == 5


def test_rounding_excuses_only_close_calls() -> None:
    """Answers that leave the reference at its second token, where 5 leads 6 by 0.3."""
    best = TokenLogprobs(-0.1, ((4, -0.1), (9, -3.0)))
    close = TokenLogprobs(-0.7, ((5, -0.7), (6, -1.0)))
    answer = SimpleNamespace(token_ids=(4, 5, 7), logprobs=(best, close, best))
    asked: list[Any] = []

    def generate(*given: Any) -> Any:
        asked.append(given)
        return answer

    engine: Any = SimpleNamespace(generate=generate)
    asks = [Ask("Who?", None, 8)]

    def apart(*said: tuple[int, ...], bound: float) -> int:
        return len(list(divergences(engine, asks, [said], bound)))

    assert apart((4, 6), (4, 6), bound=0.0) == 0
    assert not asked
    assert apart((4, 5, 7), (4, 6), bound=0.5) == 0
    assert apart((4, 5, 7), (4, 6), bound=0.2) == 1
    assert apart((9, 5), (4, 6), bound=0.5) == 1
    # The end of one in the middle of the other is no matter of rounding.
    assert apart((4, 5), (4, 5, 7), bound=0.5) == 1
    assert asked[0] == ("Who?", None, {"temperature": 0.0, "max_tokens": 8, "logprobs": 2})


def test_weights_are_counted_without_embeddings(tiny: dict[str, Any]) -> None:
    folder = Path(tiny["model"])
    tensors = load_file(folder / "model.safetensors")
    read = sum(tensor.numel() for name, tensor in tensors.items() if "embed" not in name)
    assert weight_bytes(folder, 4) == 4 * read
    assert read < sum(tensor.numel() for tensor in tensors.values())


def test_waits_for_events_are_timed_and_then_left_alone() -> None:
    streams = InlineStreams()
    event = streams.event()
    streams.compute.record(event)
    own = type(event).synchronize
    with waits_timed() as waited_ns:
        assert waited_ns() == 0
        event.synchronize()
        assert waited_ns() > 0
    assert type(event).synchronize is own


def test_a_run_without_a_path_ends_under_the_devices_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake() -> dict[str, Any]:
        return {"device": "Some GPU"}

    def one_sample(report: gpu.Report, *_: Any) -> None:
        report.run.sample(part="tests", passed=1)
        report.record["complete"] = True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "STATE", tmp_path / "state")
    monkeypatch.setattr(gpu, "machine", fake)
    monkeypatch.setattr(common, "machine", fake)
    monkeypatch.setattr(gpu, "run_all", one_sample)
    gpu.main([])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (path,) = tmp_path.glob("some-gpu-*-??.json")
    assert json.loads(path.read_text()) == record
    assert path.with_suffix(".samples.jsonl").read_text().count("\n") == 1
    assert not path.with_suffix(".started.json").exists()


def test_kernels_are_held_to_flash_attention_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone, whose results are compared too; times are made up."""
    times = {"triton": 30.0, "reference": 90.0, "flash": 15.0}
    compared: list[str] = []

    def disagreement(_: Any, __: Any, choice: str) -> float:
        compared.append(choice)
        return 0.0

    monkeypatch.setattr(kernels, "ceilings", lambda _: (1e12, 1e15))
    monkeypatch.setattr(kernels, "flash_installed", lambda: True)
    monkeypatch.setattr(kernels, "input_sets", lambda work: [work.draw()])
    monkeypatch.setattr(kernels, "disagreement", disagreement)
    monkeypatch.setattr(kernels, "graph_us", lambda _, choice, __: lambda: times[choice])
    draw = Draw(torch.device("cpu"), torch.bfloat16, 0)
    works = [
        attention(draw, 1, 4, 64, tree=True, head_dim=32),
        *[w for w in every_work(draw, (1,)) if w.name.startswith("rms_norm")][:1],
    ]
    run = Run("kernels", Namespace(quick=True, seed=0, json=None), [])
    found = kernels.measure_all(run, works, 2)["kernels"]
    tree, norm = found.values()
    assert tree["us"]["median"] == 30.0
    assert tree["flash_us"]["median"] == 15.0
    assert tree["flash_speedup"]["median"] == 2.0
    assert tree["speedup"]["median"] == 3.0
    assert "flash_us" not in norm
    assert compared == ["triton", "flash", "triton"]
