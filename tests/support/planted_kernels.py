"""Kernels with faults, for a process whose Triton interprets."""

# ruff: noqa: N803
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(x, out, count, step, back, SIZE: tl.constexpr):
    """Program p copies ``SIZE`` numbers from ``p * SIZE`` on to ``p * step``, and reads one of the
    outputs ``back`` before."""
    index = tl.arange(0, SIZE)
    start = tl.program_id(0) * SIZE
    value = tl.load(x + start + index, mask=start + index < count, other=0.0)
    place = tl.program_id(0) * step + index
    value += 0.0 * tl.load(out + place - back, mask=(index == 0) & (place >= back), other=0.0)
    tl.store(out + place, value, mask=place < count)


def copy(size: int, step: int, back: int, past: int, slack: bool) -> None:
    """Run it over ``size`` numbers, of which ``past`` do not exist.

    Args:
        slack: Whether there is other memory of the same storage in their place.
    """
    x, out = torch.ones(size), torch.zeros(size + 8)
    given = x[: size - past] if slack else x[: size - past].clone()
    _copy[(size // 8,)](given, out, size, step, back, SIZE=8)
    if step == 8:
        assert torch.equal(out[:size], x)
