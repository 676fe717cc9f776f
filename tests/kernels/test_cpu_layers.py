"""The layers' parts in C++ against their references, and each row by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec import kernels
from overlap_spec.kernels import KeySpan, Scoring, cpu
from overlap_spec.kernels.dispatch import use

pytestmark = pytest.mark.skipif(not cpu.native(), reason="no C++ compiler on this machine")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = [(7, 256), (3, 5, 6), (1, 900), (0, 32), (2, 40)]


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernels give, and the references."""
    with torch.inference_mode():
        got = work()
        with use("reference"):
            return got, work()


@FLOATS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wide", [False, True])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, wide: bool) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(torch.float32 if wide else dtype)
    torch.testing.assert_close(*both(lambda: kernels.rms_norm(x, weight, 1e-5)))
    torch.testing.assert_close(*both(lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)))
    # Rows of a weight, one a head, and a part of each row alone.
    rows = torch.randn(3, shape[-1]).to(dtype)
    heads = torch.randn(4, 5, shape[-1]).to(dtype)[:, 1:4]
    torch.testing.assert_close(*both(lambda: kernels.rms_norm(heads, rows, 1e-5)))


@FLOATS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activate", [kernels.silu_and_mul, kernels.gelu_and_mul])
def test_activations(
    shape: tuple[int, ...], dtype: torch.dtype, activate: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(*shape) * 20).to(dtype)
    torch.testing.assert_close(*both(lambda: activate(x)))


@FLOATS
@pytest.mark.parametrize("dim", [6, 20, 64, 96])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store(dim: int, dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    qkv, rotary = torch.randn(5, 8, dim).to(dtype), torch.randn(5, 2, dim).to(dtype)
    norm = (torch.rand(6, dim).to(dtype), 1e-6) if normed else None
    slots = torch.tensor([9, 0, 4, 11, 2])

    def work() -> tuple[Tensor, ...]:
        caches = torch.zeros(2, 3, 4, 2, dim).to(dtype)
        q = kernels.rotate_and_store(qkv, rotary, caches[0], caches[1], slots, norm)
        return q, caches

    # Half precision rounds twice, and a unit of the last place before is one after.
    near = {} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1.6e-2}
    torch.testing.assert_close(*both(work), **near)
    slots += 1
    with pytest.raises(RuntimeError, match="slots: outside of the cache"):
        work()


@FLOATS
@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_attention(dtype: torch.dtype, bent: bool, window: int | None) -> None:
    torch.manual_seed(0)
    scoring = Scoring(0.3, 4.0, torch.linspace(-1, 3, 4)) if bent else Scoring()
    prefix, queries, size = torch.tensor([0, 70, 33]), 5, 16
    pages = 1 + torch.randperm(18).view(3, 6)
    k, v = torch.randn(2, 19, size, 2, 40).to(dtype)
    q = torch.randn(3 * queries, 4, 40).to(dtype)
    positions = (prefix[:, None] + torch.arange(queries)).flatten()
    mask = (torch.rand(3 * queries, 7) < 0.5) | torch.eye(5, 7).bool().repeat(3, 1)
    for seen in (mask, None):
        span = KeySpan(pages, prefix, positions, seen)
        got = kernels.tree_attention(q, k, v, span, window, scoring)
        with use("reference"):
            wide = q.float(), k.float(), v.float()
            want = kernels.tree_attention(*wide, span, window, scoring)
        # It rounds the result alone.
        torch.testing.assert_close(got, want.to(dtype))
    with pytest.raises(RuntimeError, match="more keys than pages have"):
        kernels.tree_attention(q, k, v, KeySpan(pages, prefix + 30, positions, mask))


@FLOATS
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.rand(64).to(dtype)
    x = torch.randn(4, 64).to(dtype)
    spoilt = x.clone()
    spoilt[2, 5], spoilt[3, 0] = torch.nan, torch.inf
    for work in (
        lambda x: kernels.rms_norm(x, weight, 1e-5),
        kernels.silu_and_mul,
        kernels.gelu_and_mul,
    ):
        got = work(spoilt)
        assert torch.equal(got[:2], work(x)[:2])
        assert not got[2].isfinite().all()
        assert not got[3].isfinite().all()
