"""The benchmark for a GPU, as far as it goes without one: a rehearsal, and what it does about a
part that fails."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import gpu
from bench.common import samples_path
from bench.gpu_roofline import Result, Setup, figure, weight_bytes
from overlap_spec.worker.streams import InlineStreams

TARGETS = {
    "verify_roofline_share": 0.85,
    "verify_share_64_nodes_32k": 0.75,
    "host_ms_per_step": 0.5,
    "constrained_tpot_ratio": 1.02,
}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The record of a rehearsal: its last line, and its file."""
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    told = io.StringIO()
    with redirect_stdout(told):
        gpu.main(["--rehearse", "--json", str(path)])
    record: dict[str, Any] = json.loads(told.getvalue().splitlines()[-1])
    return record, path


@pytest.mark.ci
def test_a_rehearsal_runs_every_part(rehearsal: tuple[dict[str, Any], Path]) -> None:
    record, path = rehearsal
    assert json.loads(path.read_text()) == record
    assert list(record["parts"]) == list(gpu.PARTS)
    assert [part["error"] for part in record["parts"].values()] == [None] * len(gpu.PARTS)
    assert record["rehearsal"] is True
    parts = {json.loads(line)["part"] for line in samples_path(path).read_text().splitlines()}
    assert parts == set(gpu.PARTS)
    assert len(record["parts"]["roofline"]["cells"]) == 3


@pytest.mark.ci
def test_every_figure_has_its_target(rehearsal: tuple[dict[str, Any], Path]) -> None:
    record, _ = rehearsal
    assert {name: figure["target"] for name, figure in record["figures"].items()} == TARGETS
    for name, found in record["figures"].items():
        assert found["value"] in found["by"].values(), name
        reached = found["value"] >= found["target"]
        assert found["met"] is (reached if found["goal"] == "at least" else not reached), name


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    written: list[Any] = []

    def failing(_: Setup) -> Result:
        raise ValueError("no such kernel")

    def well(_: Setup) -> Result:
        written.append(json.loads(path.read_text()))
        return Result({"one": figure(1.0, least=0.5, unit="s", by={"": 1.0})}, samples=[{"n": 1}])

    monkeypatch.setattr(gpu, "PARTS", {"first": failing, "second": well})
    monkeypatch.setattr(gpu, "weights_of", lambda *_: (tmp_path, tmp_path))
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--rehearse", "--json", str(path)])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "error: first: ValueError: no such kernel" in told.err
    record = json.loads(told.out.splitlines()[-1])
    assert record["figures"]["one"]["met"] is True
    assert record["parts"]["second"]["error"] is None
    # What the first part came to was in the file before the second began.
    assert written[0]["parts"].keys() == {"first"}


def test_a_rehearsal_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, error in (
        (["--rehearse", "--json", str(gpu.RESULTS / "a.json")], "measures nothing"),
        (["--only", "nonesuch"], "invalid choice"),
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
    with gpu.waits_timed() as waited_ns:
        assert waited_ns() == 0
        event.synchronize()
        assert waited_ns() > 0
    assert type(event).synchronize is own
