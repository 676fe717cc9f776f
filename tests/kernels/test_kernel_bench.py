"""The kernels' benchmark and tuner, as far as they go without a GPU."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench import kernel_tuning, kernels
from bench.common import Run
from bench.kernel_tuning import candidates, grids, source, tune, tuning_works
from bench.kernel_work import Draw, Work, attention, works
from overlap_spec.kernels import tuning

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_cuda
def test_kernel_bench_without_a_gpu_shows_the_plan_or_ends_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments in ([], ["--tune"], ["--quick", "--tune"]):
        with pytest.raises(SystemExit) as ended:
            kernels.main(arguments)
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


def _work(name: str, config: str) -> Work:
    return Work(name, torch.add, tuple, 1, config=config)


def test_kernel_tuner_keeps_what_wins_and_skips_what_does_not_fit(tmp_path: Path) -> None:
    now = {
        "rope": {"elements": 2048, "num_warps": 4},
        "silu_and_mul": {"block": 1024, "num_warps": 4},
    }

    def measure(work: Work) -> float:
        blocks = tuning.config(work.config or "", torch.device("cpu"))
        if blocks["num_warps"] == 8:
            raise RuntimeError("out of resource: shared memory")
        if work.config == "silu_and_mul":
            # Noise alone: nothing wins by 2 in 100.
            return 99.0 if blocks["block"] == 4096 else 100.0
        return {1024: 90.0, 4096: 50.0}.get(blocks["elements"], 100.0)

    entries = {name: [_work(f"{name}/1", name), _work(f"{name}/2", name)] for name in now}
    told: list[str] = []
    found = tune(entries, now, measure, told.append)
    assert found == {
        "rope": {"elements": 4096, "num_warps": 1},
        "silu_and_mul": now["silu_and_mul"],
    }
    assert len(told) == 2
    path = kernel_tuning.write("sm_00", found, "a test", tmp_path)
    assert runpy.run_path(str(path))["TABLE"] == found
    assert path.read_text() == source(found, "a test")

    def broken(work: Work) -> float:
        raise RuntimeError(f"{work.name}: out of resource")

    with pytest.raises(RuntimeError, match="rope/1"):
        tune({"rope": entries["rope"]}, now, broken, told.append)


def test_kernel_tuner_covers_every_entry() -> None:
    default = tuning.table("default")
    entries = tuning_works(torch.device("cpu"), 0)
    # Head sizes below 32 are no model's; they serve the tests' small ones.
    assert {name for name in default if not name.endswith("/16")} <= set(entries)
    for name in default:
        for grid in grids(name):
            tried = list(candidates(default[name], grid))
            assert tried[0] == default[name]
            assert len(tried) > 8
            assert all(set(each) == set(default[name]) for each in tried)


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
