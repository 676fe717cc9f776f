"""The kernels' benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench import kernels
from bench.common import Run
from bench.kernel_work import Draw, attention, works

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_cuda
def test_kernel_bench_without_a_gpu_shows_the_plan_or_ends_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        kernels.main([])
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    kernels.main(["--quick", "--only", "rms_norm", "--json", str(tmp_path / "out.json")])
    told = capsys.readouterr()
    record = json.loads(told.out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == record
    assert record["measured"] is False
    assert record["repetitions"] == 0
    assert set(record["kernels"]) == {"rms_norm/16", "add_rms_norm/16"}
    assert record["kernels"]["rms_norm/16"] == {
        "bytes": 2 * 16 * 4096 * 2,
        "flops": 0,
        "launches": ["rms_norm (16,)"],
    }
    assert "nothing is measured" in told.err


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
    chosen = [
        attention(draw, 1, 4, 64, tree=True, head_dim=32),
        *[w for w in works(draw, (1,)) if w.name.startswith("rms_norm")][:1],
    ]
    run = Run("kernels", Namespace(quick=True, seed=0, json=None), [])
    found = kernels.measure_all(run, chosen, 2)["kernels"]
    tree, norm = found.values()
    assert tree["us"]["median"] == 30.0
    assert tree["flash_us"]["median"] == 15.0
    assert tree["flash_speedup"]["median"] == 2.0
    assert tree["speedup"]["median"] == 3.0
    assert "flash_us" not in norm
    assert compared == ["triton", "flash", "triton"]
