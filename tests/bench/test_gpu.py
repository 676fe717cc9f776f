"""The benchmark for a GPU, as far as it goes without one."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import gpu
from bench.common import Run, samples_path
from bench.kernel_work import Draw, attention, works


@pytest.mark.ci
def test_a_rehearsal_runs_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    gpu.main(["--rehearse", "--json", str(path)])
    record = json.loads(path.read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["rehearsal"] is True
    assert list(record["cells"]) == list(map(str, gpu.REHEARSAL_CELLS))
    assert [cell["aim"] for cell in record["cells"].values()] == [*gpu.AIMS, None]
    for cell, line in zip(
        record["cells"].values(), samples_path(path).read_text().splitlines(), strict=True
    ):
        taken = sorted(json.loads(line)["verify_ms"])
        assert cell["verify_ms"]["median"] == pytest.approx(taken[1], rel=1e-4)
        assert cell["share"] == pytest.approx(cell["least_ms"] / taken[1], rel=1e-3)


def test_weights_are_counted_without_embeddings(tiny: dict[str, Any]) -> None:
    folder = Path(tiny["model"])
    tensors = load_file(folder / "model.safetensors")
    read = sum(tensor.numel() for name, tensor in tensors.items() if "embed" not in name)
    assert gpu.weight_bytes(folder, 4) == 4 * read
    assert read < sum(tensor.numel() for tensor in tensors.values())


def test_kernels_are_held_to_flash_attention_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone, whose results are compared too; times are made up."""
    times = {"triton": 30.0, "reference": 90.0, "flash": 15.0}
    compared: list[str] = []

    def disagreement(_: Any, __: Any, choice: str) -> float:
        compared.append(choice)
        return 0.0

    monkeypatch.setattr(gpu, "flash_installed", lambda: True)
    monkeypatch.setattr(gpu, "input_sets", lambda work: [work.draw()])
    monkeypatch.setattr(gpu, "disagreement", disagreement)
    monkeypatch.setattr(gpu, "graph_us", lambda _, choice, __: lambda: times[choice])
    draw = Draw(torch.device("cpu"), torch.bfloat16, 0)
    chosen = [
        attention(draw, 1, 4, 64, tree=True, head_dim=32),
        *[w for w in works(draw, (1,)) if w.name.startswith("rms_norm")][:1],
    ]
    run = Run("kernels", Namespace(quick=True, seed=0, json=None), [])
    found = gpu.measure_kernels(run, chosen, 2, 1e12, 1e15)
    tree, norm = found.values()
    assert tree["us"]["median"] == 30.0
    assert tree["flash_us"]["median"] == 15.0
    assert tree["flash_speedup"]["median"] == 2.0
    assert tree["speedup"]["median"] == 3.0
    assert "flash_us" not in norm
    assert compared == ["triton", "flash", "triton"]
