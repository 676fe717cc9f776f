"""Products of a few rows with a weight in C++: a pass's time is that of reading its weights.

``products.cpp`` is compiled once a machine, for its processor, when weights that it can multiply
are first loaded (some 10 s), and kept in the user's cache (``$XDG_CACHE_HOME/overlap-spec``). Where
there is no compiler, or the processor lacks what it needs, oneDNN's products run instead; so they
do on processors with AMX, whose tiles multiply the many rows of a prompt faster than this can.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from overlap_spec.caches import cache_folder
from overlap_spec.kernels.dispatch import wants_references

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("products.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp")
NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"))
HEADERS = ("include", "include/torch/csrc/api/include")
BUILD_S = 300


def native() -> bool:
    """Whether this process multiplies by the native products; the first call may compile them."""
    return not wants_references() and _loaded()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight ``(N, K)`` in the native products' order; bfloat16 or int8, K a multiple of 4."""
    packed: torch.Tensor = torch.ops.overlap_spec.pack(weight)
    return packed


@cache
def _loaded() -> bool:
    flags = _processor()
    if not flags >= NEEDED or "amx_tile" in flags:
        return False
    try:
        torch.ops.load_library(str(build(flags)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("oneDNN's products are used, native ones cannot be: %s", error)
        return False
    return True


def _processor() -> frozenset[str]:
    """The processor's features, by Linux's names; none where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((x for x in lines if x.startswith("flags")), "").split())


def build(flags: frozenset[str]) -> Path:
    """The compiled library's file, which is made if it is not there.

    Args:
        flags: The processor's features: another one has another file, and so have other sources or
            another torch.

    Raises:
        RuntimeError: there is no compiler, or it failed.
        OSError: the cache cannot be written.
    """
    about = SOURCE.read_text(encoding="utf-8"), FLAGS, torch.__version__, sorted(flags)
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    path = cache_folder() / f"products-{name}.so"
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++"))), None)
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++, or set CXX")
    log.info("compiling the products for this processor, once: some 10 s")
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, part = Path(folder) / path.name, Path(folder) / "products.o"
        headers = (f"-I{root / folder}" for folder in HEADERS)
        _run(compiler, *FLAGS, *headers, "-c", SOURCE, "-o", part)
        # By itself, as what links OpenMP links another one than torch's: two teams of threads.
        _run(compiler, "-shared", part, "-o", made, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
        # Whole, or not at all: others may look for it meanwhile.
        made.replace(path)
    return path


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-1000:]}")
