"""The benchmark for a GPU, as far as it goes without one: a rehearsal, and what it does about
parts that fail, hang, or come too late."""

from __future__ import annotations

import io
import json
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

from bench import common, gpu
from bench.common import Run, samples_path
from bench.gpu_child import Child
from bench.gpu_compare import divergences
from bench.gpu_decode import waits_timed, weight_bytes
from bench.gpu_device import counted
from bench.gpu_setup import Result, Setup, figure
from bench.workloads import Ask
from overlap_spec.types import TokenLogprobs
from overlap_spec.worker.streams import InlineStreams

TARGETS = {
    "verify_roofline_share": 0.85,
    "constrained_tpot_ratio": 1.02,
    "host_ms_per_step": 0.5,
    "eagle3_speedup": 2.36,
    "exposed_share": 0.02,
    "overlap_tpot_saving": None,
    "transformers_speedup": 5.0,
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
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The record of a rehearsal: its last line, and its file."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    told = io.StringIO()
    with redirect_stdout(told):
        gpu.main(["--rehearse", "--json", str(path)])
    record: dict[str, Any] = json.loads(told.getvalue().splitlines()[-1])
    return record, path


def test_a_rehearsal_runs_every_part(rehearsal: tuple[dict[str, Any], Path]) -> None:
    record, path = rehearsal
    assert json.loads(path.read_text()) == record
    status = {name: part["status"] for name, part in record["parts"].items()}
    device = [part.name for part in gpu.BEFORE]
    assert list(status) == [*device, "checkpoint", *(part.name for part in gpu.AFTER)]
    assert {name: "skipped: no device" if name in device else "ok" for name in status} == status
    assert record["complete"]
    assert record["rehearsal"]
    assert record["equal"] is True
    assert record["seconds"] < record["budget_s"]
    parts = {json.loads(line)["part"] for line in samples_path(path).read_text().splitlines()}
    assert parts == {part.name for part in gpu.AFTER}


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
    assert 1 < eagle3["bound"] < eagle3["accept_length"]
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
    """Runs parts of ``PARTS`` by name; a time after the name is its limit."""
    (tmp_path / "parts_of_a_test.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    options = Namespace(quick=True, seed=0, json=tmp_path / "out.json")

    def run(*names: str, most_s: float = 30, budget_s: float = 100) -> gpu.Report:
        report = gpu.Report(Run("gpu", options, []), rehearsal=False)
        parts = [gpu.Part(name, f"parts_of_a_test:{name}", 1, most_s) for name in names]
        child = Child(Setup(False, True, 0, "none", tmp_path))
        try:
            gpu.run_parts(parts, report, child, gpu.Clock(budget_s), lambda: None)
        finally:
            child.close()
        return report

    return run


@pytest.mark.parametrize(
    ("name", "most_s", "error"),
    [
        ("raising", 30, "ValueError: no such kernel"),
        ("lacking", 30, "not installed: No module named 'nonesuch'"),
        ("exiting", 30, "ended with exit status 1"),
        ("dying", 30, "its process ended with exit status 3"),
        ("hanging", 1, "not done within 1 s"),
        ("infinite", 30, "ValueError: Out of range float"),
        ("nonesuch", 30, "AttributeError"),
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
    row = start("telling", most_s=20).record["parts"]["telling"]
    assert row["status"] == "failed"
    assert row["numbers"] == [0, 1, 2, 3]
    assert row["error"] == "not done within 20 s; one is odd"


def test_parts_can_be_run_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_parts(parts: Any, *_: Any) -> None:
        ran.extend(part.name for part in parts)

    monkeypatch.setattr(gpu, "run_parts", run_parts)
    (tmp_path / "checkpoint").mkdir()
    report = gpu.Report(Run("gpu", Namespace(quick=True, seed=0, json=None), []), rehearsal=True)
    setup = Setup(True, True, 0, "", tmp_path / "checkpoint")
    gpu.run_all(report, setup, gpu.Clock(100), ["kernels"])
    assert ran == ["kernels"]
    # No one waited for the checkpoint.
    assert report.record["parts"] == {}


def test_parts_share_a_process_until_one_fails(
    start: Callable[..., gpu.Report], tmp_path: Path
) -> None:
    record = start("alike", "well", "differing", "alike").record
    assert record["equal"] is False
    assert record["parts"]["differing"]["error"] == "request 3"
    kept = json.loads((tmp_path / "out.json").read_text())
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
    record = start("hanging", "well", budget_s=closing + 1.5).record
    assert record["parts"]["hanging"]["error"] in ("not done within 1 s", "not done within 2 s")
    assert record["parts"]["well"] == {"status": "skipped: time"}


def test_without_the_checkpoint_its_parts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "target").mkdir(parents=True)
    (tmp_path / "checkpoint" / "target" / "config.json").write_text("{}")
    options = Namespace(quick=True, seed=0, json=None)
    report = gpu.Report(Run("gpu", options, []), rehearsal=True)
    gpu.run_all(report, Setup(True, True, 0, "", tmp_path / "checkpoint"), gpu.Clock(100))
    parts = report.record["parts"]
    assert "holds a checkpoint already" in parts["checkpoint"]["error"]
    assert {parts[part.name]["status"] for part in gpu.AFTER} == {"skipped: no checkpoint"}


def test_a_failed_part_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(report: gpu.Report, *_: Any) -> None:
        report.attempt("kernels", lambda: Result(faults=["rope: disagree"]))

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
    result = counted(report)
    assert result.details["passed"] == 2
    assert result.details["failed"] == ["tests.a.three: 1 is not 2", ".tests.c: no module"]
    assert result.faults == ["2 tests failed"]
    none = '<testsuites><testsuite errors="0" failures="0" skipped="0" tests="0"/></testsuites>'
    assert counted(none).faults == ["no test passed"]


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
    monkeypatch.setattr(gpu, "machine", fake)
    monkeypatch.setattr(common, "machine", fake)
    monkeypatch.setattr(gpu, "run_all", one_sample)
    gpu.main([])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (path,) = tmp_path.glob("some-gpu-*-??.json")
    assert json.loads(path.read_text()) == record
    assert path.with_suffix(".samples.jsonl").read_text().count("\n") == 1
    assert not path.with_suffix(".started.json").exists()
