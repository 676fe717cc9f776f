"""The one place where kernels are launched, or noted down instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

SINGLE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Launch(NamedTuple):
    """A launch: Triton's function, its grid, run-time arguments, constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


_notes: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run ``kernel``; nothing where the grid is empty. Constants include ``num_warps`` etc."""
    if _notes is not None:
        _notes.append(Launch(kernel, grid, args, constants))
    elif all(grid):
        # Said aloud, because Triton's own default is about to change.
        kernel[grid](*args, **constants, enable_fp_fusion=True)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them: outputs stay unwritten."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before


def require_float(name: str, *tensors: torch.Tensor) -> None:
    """TypeError where a tensor is neither float32, float16 nor bfloat16."""
    for tensor in tensors:
        if tensor.dtype not in SINGLE_TYPES:
            raise TypeError(f"{name}: {tensor.dtype} is not float32, float16 or bfloat16")


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
