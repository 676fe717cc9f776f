"""Compiled kernels serve from a copy of their folder, and those for another GPU do not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.runtime.cache import FileCacheManager

from bench.kernel_work import Draw, works
from overlap_spec.kernels import tuning
from overlap_spec.kernels.triton.carried import VARIABLE, CarriedCache
from overlap_spec.kernels.triton.launch import Launch
from tests.support.kernel_ir import compile_for, noted


def is_found(one: Launch, capability: int, folder: Path, manager: Any) -> bool:
    """Whether a kernel is taken from a folder; it is compiled, and put there, where not."""
    told: list[bool] = []
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.cache.manager_class = str(folder), manager
        knobs.compilation.listener = lambda *_, cache_hit, **__: told.append(cache_hit)
        compiled = compile_for(one, capability)
    assert compiled.asm["cubin"]
    return told == [True]


@pytest.fixture
def launched() -> Launch:
    """A small kernel's."""
    draw = Draw(torch.device("cpu"), torch.bfloat16, 0)
    work = next(work for work in works(draw, (1,)) if work.name.startswith("move_kv"))
    return noted(work, tuning.table("sm_90"))[-1]


def test_a_folder_of_kernels_can_be_carried(launched: Launch, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert not is_found(launched, 90, one, CarriedCache)
    assert is_found(launched, 90, one, CarriedCache)
    one.rename(other)
    # Triton's own would compile it again; nothing is left where it was.
    assert is_found(launched, 90, other, CarriedCache)
    assert not is_found(launched, 80, other, CarriedCache)
    (cubin,) = (path for path in other.rglob("*.cubin") if b"sm_90" in path.read_bytes())
    cubin.unlink()
    assert not is_found(launched, 90, other, CarriedCache)


def test_tritons_own_folder_cannot(launched: Launch, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert not is_found(launched, 90, one, FileCacheManager)
    one.rename(other)
    assert not is_found(launched, 90, other, FileCacheManager)


@pytest.mark.ci
@pytest.mark.parametrize("folder", ["", "/some/folder"])
def test_the_environment_names_the_folder(folder: str) -> None:
    code = (
        "import overlap_spec.kernels.triton\n"
        "from triton import knobs\n"
        "print(getattr(knobs.cache.manager_class, '__name__', None), knobs.cache.dir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, VARIABLE: folder},
    )
    name, told = done.stdout.split()
    assert (name == "CarriedCache") is bool(folder)
    assert (told == folder) is bool(folder)
