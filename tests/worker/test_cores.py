"""How many threads a pass gets: by the weights it reads, the cores, and what the user has set."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_spec.config import OVERLAP_MODES, EngineConfig
from overlap_spec.models.packing import has_bfloat16
from overlap_spec.models.tensors import parameter_count
from overlap_spec.worker import cores
from overlap_spec.worker.build import build_streams
from overlap_spec.worker.cores import (
    BFLOAT16_BYTES,
    THREAD_BYTES,
    cpu_quota,
    physical_cores,
    pick_float,
    pick_threads,
)
from overlap_spec.worker.site import overlap_mode, pick_dtype
from tests.support.checkpoints import rewrite

LARGE = 1 << 40


@pytest.mark.parametrize(
    ("physical", "told", "weights", "want"),
    [
        (2, 2, 8 << 20, 1),
        (2, 2, 2 * THREAD_BYTES, 2),
        (2, 1, LARGE, 1),
        (8, 8, LARGE, 7),
        (8, 8, 3 * THREAD_BYTES, 3),
        (8, 4, LARGE, 4),
        (1, 2, LARGE, 1),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, physical: int, told: int, weights: int, want: int
) -> None:
    monkeypatch.setattr(cores, "physical_cores", lambda: physical)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told)
    assert pick_threads(None, weights) == want
    assert pick_threads(5, weights) == 5


@pytest.mark.parametrize(
    ("lines", "files", "want"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        # In a container the path is the host's.
        ("0::/host/x\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "4:cpu,cpuacct:/a\n5:memory:/b\n",
            {"cpu/a/cpu.cfs_quota_us": "400000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_the_quota_of_control_groups(
    tmp_path: Path, lines: str, files: dict[str, str], want: float | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpu_quota(tmp_path) == want


@pytest.mark.parametrize(("quota", "left"), [(None, 4), (0.5, 1), (1.0, 1), (2.9, 2), (64, 4)])
def test_a_quota_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, left: int
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert physical_cores(Path("/nowhere")) == left
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert pick_threads(None, LARGE) == max(1, left - (left > 2))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_hyperthreads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    # The last says nothing, and is taken for a core.
    assert physical_cores(tmp_path) == 3


@pytest.mark.parametrize(("amx", "avx"), [(True, False), (False, True), (False, False)])
def test_bfloat16_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    enough = BFLOAT16_BYTES // 2
    fast = torch.bfloat16 if amx or avx else torch.float32
    assert has_bfloat16() is (amx or avx)
    assert pick_float(torch.bfloat16, enough) is fast
    assert pick_float(torch.bfloat16, enough - 1) is torch.float32
    for stored in (torch.float32, torch.float16):
        assert pick_float(stored, enough) is torch.float32


def test_auto_reads_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any], tmp_path: Path
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(cores, "has_bfloat16", lambda: True)
    monkeypatch.setattr(cores, "BFLOAT16_BYTES", 0)
    shutil.copytree(tiny["model"], tmp_path / "target")
    for stored in ("float32", "bfloat16"):
        rewrite(tmp_path / "target" / "config.json", dtype=stored)
        config = EngineConfig.build(model=str(tmp_path / "target"))
        assert pick_dtype(config, cpu) is getattr(torch, stored)
        assert pick_dtype(config, gpu) is getattr(torch, stored)
    monkeypatch.setattr(cores, "BFLOAT16_BYTES", 1 << 30)
    assert pick_dtype(config, cpu) is torch.float32
    assert pick_dtype(config, gpu) is torch.bfloat16


def test_prefill_has_a_stream_of_its_own_where_a_core_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 4e6 < parameter_count(EngineConfig().target_path) < 5e6
    for module in ("build", "cores", "site"):
        monkeypatch.setattr(f"overlap_spec.worker.{module}.physical_cores", lambda: 2)
    for threads, apart in ((None, True), (1, True), (2, False)):
        config = EngineConfig.build(threads=threads, device="cpu")
        streams = build_streams(config, lambda *_: None)
        try:
            assert (streams.prefill is not streams.compute) is apart
        finally:
            streams.close()


@pytest.mark.parametrize(
    ("physical", "threads", "want"), [(1, 1, "none"), (2, 1, "once-sync"), (2, 2, "none")]
)
def test_the_mode_is_serial_where_a_pass_takes_all_cores(
    monkeypatch: pytest.MonkeyPatch, physical: int, threads: int, want: str
) -> None:
    for module in ("build", "cores", "site"):
        monkeypatch.setattr(f"overlap_spec.worker.{module}.physical_cores", lambda: physical)
    settings = {"threads": threads, "device": "cpu"}
    assert overlap_mode(EngineConfig.build(**settings)) == want
    for mode in OVERLAP_MODES:
        assert overlap_mode(EngineConfig.build(**settings, overlap=mode)) == mode
