"""What a pass is made of on the CPU, in C++: a layer's parts and a draft step's, each in one call,
and products of a few rows, whose time is that of reading the weight.

The files beside this one are compiled once a machine, for its processor, when they are first wanted
(20 to 50 s), and kept in the user's cache (``$XDG_CACHE_HOME/overlap-spec``). Where there is no
compiler torch's own operations run instead.
"""

from __future__ import annotations

import ctypes
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

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = "kernels.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-ffp-contract=off")
# Of the processor.
NEEDED = frozenset(("avx2", "fma"))
# Intel's cores begin a product of bfloat16 in every second cycle and two of float32 in each, which
# are 1.5 times as fast with weights in bfloat16; AMD's begin one of either in each.
INTEL = ("-mno-avx512bf16",)
HEADERS = ("include", "include/torch/csrc/api/include")
BUILD_S = 300
# Of the first tensor that an operation gets; of other types the references compute.
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)


def lanes() -> int:
    """Outputs that a native product has side by side; :func:`native` has to be true."""
    found: int = torch.ops.overlap_spec.lanes()
    return found


def team() -> int:
    """Threads that this thread's native operations run on; 0: as many as torch's."""
    found: int = library().overlap_spec_team()  # type: ignore[union-attr]
    return found


def set_team(members: int) -> int:
    """Let this thread's native operations run on ``members`` threads (0: on as many as torch's),
    and tell what :func:`team` was."""
    before: int = library().overlap_spec_set_team(members)  # type: ignore[union-attr]
    return before


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight ``(N, K)`` in the native products' order ``(N / lanes, K / P, lanes, P)``, P numbers
    in 4 bytes; float32, bfloat16 or int8, K a multiple of 4."""
    packed: torch.Tensor = torch.ops.overlap_spec.pack(weight)
    return packed


def kept(weight: torch.Tensor) -> torch.Tensor:
    """A copy that is a run of memory, in the largest pages that the system gives, as :func:`pack`
    has them: a pass that reads all weights is some 5 to 10% faster."""
    copy: torch.Tensor = torch.ops.overlap_spec.kept(weight)
    return copy


def native() -> bool:
    """Whether this machine computes layers natively; the first call may compile what does."""
    return library() is not None


@cache
def library() -> ctypes.PyDLL | None:
    """The native operations, which torch has then too; None where there are none."""
    flags = _processor()
    if not flags >= NEEDED:
        return None
    try:
        file = str(build(flags))
        torch.ops.load_library(file)
        return ctypes.PyDLL(file)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("torch's own operations are used, native ones cannot be: %s", error)
        return None


@cache
def _processor() -> frozenset[str]:
    """The processor's vendor and features, by Linux's names; none where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    told = (next((x for x in lines if x.startswith(name)), "") for name in ("vendor_id", "flags"))
    return frozenset(" ".join(told).split())


def build(flags: frozenset[str]) -> Path:
    """The compiled library's file, which is made if it is not there.

    Args:
        flags: The processor's vendor and features: another one has another file, and so have other
            sources or another torch.

    Raises:
        RuntimeError: there is no compiler, or it failed.
        OSError: the cache cannot be written.
    """
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.[ch]*"))]
    chosen = FLAGS + (INTEL if "GenuineIntel" in flags else ())
    about = sources, chosen, torch.__version__, sorted(flags)
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    path = cache_folder() / f"kernels-{name}.so"
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++"))), None)
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++, or set CXX")
    log.info("compiling kernels for this processor, once: 20 to 50 s")
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, headers = Path(folder) / path.name, [f"-I{root / folder}" for folder in HEADERS]
        part = Path(folder) / "kernels.o"
        _run(compiler, *chosen, *headers, "-c", FOLDER / SOURCE, "-o", part)
        # By itself, as what links OpenMP links another one than torch's: two teams of threads.
        _run(compiler, "-shared", part, "-o", made, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
        # Whole, or not at all: others may look for it meanwhile.
        made.replace(path)
    return path


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-1000:]}")
