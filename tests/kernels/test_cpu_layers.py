"""The layers' parts in C++ against their references, and each row by itself."""

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
@pytest.mark.parametrize("shape", [(3, 33), (1, 5), (2, 4000), (0, 20)])
@pytest.mark.parametrize("moved", [False, True])
def test_best_next_tokens(shape: tuple[int, int], dtype: torch.dtype, moved: bool) -> None:
    torch.manual_seed(0)
    # No two are equal: which of those comes first is open.
    order = torch.stack([torch.randperm(shape[1]) for _ in range(shape[0])] or [torch.empty(0)])
    logits = (order.view(shape) - shape[1] + 9).clamp(min=0).to(dtype)
    offsets = torch.arange(shape[1]) * 2 if moved else None
    got, want = both(lambda: kernels.top_candidates(logits, 5, offsets))
    torch.testing.assert_close(got, want)


def test_best_next_tokens_of_what_is_no_number() -> None:
    logits = torch.full((3, 20), torch.nan)
    logits[1], logits[2] = torch.arange(20.0), -torch.inf
    scores, ids = kernels.top_candidates(logits, 4)
    assert scores[0].isnan().all()
    assert ids[1].tolist() == [19, 18, 17, 16]
    assert ids.min() >= 0
    assert ids.max() < 20


def test_states_behind_tokens() -> None:
    torch.manual_seed(0)
    moves = (torch.randint(0, 9, (9 * 4,)) * 4).int()
    states, texts = (torch.randint(0, 9, (50,)) * 4).int(), torch.randint(0, 4, (30, 6)).int()
    tokens = torch.randint(0, 30, (50,))
    got, want = both(lambda: kernels.after_tokens(moves, states, texts, tokens))
    assert torch.equal(got, want)
    for wrong in (tokens + 30, tokens - 30):
        with pytest.raises(RuntimeError, match="outside of the vocabulary"):
            kernels.after_tokens(moves, states, texts, wrong)
    with pytest.raises(RuntimeError, match="outside of the table"):
        kernels.after_tokens(moves, states + 36, texts, tokens)


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
