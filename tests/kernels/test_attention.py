"""Attention over paged keys, by torch and natively, against a loop over queries and keys."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlap_spec.kernels import KeySpan, Scoring, attention, tree_attention
from overlap_spec.kernels.dispatch import use
from tests.support.tiers import few

PAGE, DIM = 4, 6


@pytest.fixture(scope="module", params=["reference", "auto"], autouse=True)
def in_torch_and_native(request: pytest.FixtureRequest) -> Iterator[None]:
    """What other machines compute is held to the same."""
    with use(request.param):
        yield


def drawn(
    counts: list[int], heads: int, kv_heads: int, masked: bool, first: int, seed: int, rest: int = 0
) -> tuple[Tensor, Tensor, Tensor, KeySpan]:
    """Random queries, caches and their span with offsets; masks are wider than the queries.

    ``rest``: what the keys of latents have behind these; 0: keys are no latents.
    """
    g = torch.Generator().manual_seed(seed)
    batch, total, longest = len(counts), sum(counts), max(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    request = torch.arange(batch).repeat_interleave(torch.tensor(counts))
    number = torch.arange(total) - offsets[request]
    prefix = torch.randint(first, 11, (batch,), generator=g)
    width = longest + 3 if masked else longest
    pages = -(-(10 + width) // PAGE)
    places = torch.randperm(batch * pages, generator=g).view(batch, pages)
    mask = None
    if masked:
        mask = torch.rand(total, width, generator=g) < 0.4
        mask[torch.arange(total), number] = True
    sizes = rest or DIM, DIM
    k, v = (torch.randn(batch * pages, PAGE, kv_heads, size, generator=g) for size in sizes)
    q = torch.randn(total, heads, DIM + rest, generator=g)
    position = prefix[request] + (number // 2 if masked else number)
    return q, k, v, KeySpan(places, prefix, position, mask, first, offsets, longest)


def attended(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, window: int | None, scoring: Scoring
) -> Tensor:
    """:func:`tree_attention`, one key after the other: the definition."""
    assert span.offsets is not None
    total, heads, dim = q.shape
    kv_heads, out = k.shape[2], torch.zeros(total, heads, DIM, dtype=torch.float64)
    for b, prefix in enumerate(span.prefix.tolist()):
        start, end = span.offsets[b : b + 2].tolist()
        width = end - start if span.mask is None else span.mask.shape[1]
        for t in range(start, end):
            seen = []
            for key in range(span.first, prefix + width):
                column = key - prefix
                if span.mask is not None:
                    sees = column < 0 or bool(span.mask[t, column])
                else:
                    sees = column <= t - start
                if window is not None and key <= int(span.positions[t]) - window:
                    sees = sees and span.mask is not None and column >= 0
                if sees:
                    seen.append((int(span.pages[b, key // PAGE]), key % PAGE))
            for head in range(heads):
                kv = head // (heads // kv_heads)
                keys = torch.stack([k[page, slot, kv] for page, slot in seen]).double()
                values = torch.stack([v[page, slot, kv] for page, slot in seen]).double()
                if dim > keys.shape[1]:
                    keys = torch.cat([values, keys], 1)
                scores = keys @ q[t, head].double() * (scoring.scale or 1 / math.sqrt(dim))
                if scoring.soft_cap is not None:
                    scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks[head : head + 1].double()])
                out[t, head] = scores.softmax(0)[: len(values)] @ values
    return out.flatten(1)


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@given(
    COUNTS,
    st.sampled_from([(1, 1), (4, 2), (3, 1), (11, 1)]),
    st.sampled_from([0, 0, 4, DIM]),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([None, 3, 8]),
    st.sampled_from(
        [(None, None, False), (0.3, None, False), (None, 1.5, False), (2.0, 9.0, True)]
    ),
    st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_attention_of_ragged_queries_is_the_loops(
    counts: list[int],
    heads: tuple[int, int],
    rest: int,
    masked: bool,
    first: int,
    window: int | None,
    rule: tuple[float | None, float | None, bool],
    seed: int,
) -> None:
    q, k, v, span = drawn(counts, *heads, masked, first, seed, rest)
    scale, soft_cap, sunk = rule
    scoring = Scoring(scale, soft_cap, torch.linspace(-1, 3, heads[0]) if sunk else None)
    want = attended(q, k, v, span, window, scoring)
    got = tree_attention(q, k, v, span, window, scoring)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_attention_of_equal_counts_needs_no_offsets(
    batch: int, queries: int, masked: bool, seed: int
) -> None:
    q, k, v, span = drawn([queries] * batch, 4, 2, masked, 0, seed)
    got = tree_attention(q, k, v, replace(span, offsets=None, longest=0))
    torch.testing.assert_close(got, tree_attention(q, k, v, span))


def test_attention_of_chunks_reads_only_their_own_pages() -> None:
    q, k, v, span = drawn([5, 1, 0], 2, 1, False, 0, 0)
    span = replace(span, prefix=torch.tensor([6, 2, 0]))
    want = tree_attention(q, k, v, span)
    for cache in (k, v):
        cache[span.pages[0, 3:]] = cache[span.pages[1, 1:]] = cache[span.pages[2]] = torch.nan
    assert torch.equal(tree_attention(q, k, v, span), want)


# Head size, heads, heads of keys, and what keys of latents have more: small, the embedded model's,
# larger groups, and latents.
SHAPES = [(6, 4, 2, 0), (64, 4, 2, 0), (128, 8, 1, 0), (48, 16, 1, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("queries", few([1, 6, 16], 6))
@pytest.mark.parametrize("shape", few([(shape,) for shape in SHAPES], (SHAPES[1],)))
def test_a_request_has_the_same_bits_beside_any_other(
    shape: tuple[int, int, int, int],
    queries: int,
    bent: bool,
    at_once: bool,
    masked: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the others' lengths; nothing but its own pages is read."""
    monkeypatch.setattr(attention, "TOGETHER_BYTES", 1 << 30 if at_once else 0)
    torch.manual_seed(0)
    dim, heads, kv_heads, rest = shape
    scoring = Scoring(0.3, 4.0, torch.linspace(-1, 3, heads)) if bent else Scoring()
    size, prefixes = 16, [700, 3, 1400, 37, 200, 515, 1023, 130, 201]
    batch = len(prefixes)
    columns = -(-(max(prefixes) + queries) // size)
    pages = 1 + torch.randperm(batch * columns).view(batch, columns)
    k, v = (
        torch.randn(batch * columns + 1, size, kv_heads, each).to(dtype)
        for each in (rest or dim, dim)
    )
    mask = torch.ones(queries, queries, dtype=torch.bool).tril().repeat(batch, 1)
    prefix = torch.tensor(prefixes)
    positions = (prefix[:, None] + torch.arange(queries)).flatten()
    q = torch.randn(batch * queries, heads, dim + rest).to(dtype)

    def answers(who: list[int], keys: Tensor, values: Tensor, columns: int) -> Tensor:
        rows = torch.cat([torch.arange(queries) + each * queries for each in who])
        seen = mask[rows] if masked else None
        span = KeySpan(pages[who, :columns], prefix[who], positions[rows], seen)
        return tree_attention(q[rows], keys, values, span, None, scoring)

    together = answers(list(range(batch)), k, v, columns)
    for b, length in enumerate(prefixes):
        want, own = together[b * queries : (b + 1) * queries], -(-(length + queries) // size)
        assert torch.equal(answers([b], k, v, own)[:queries], want), length
        # Beside requests of other lengths, which it does not read either.
        rest = torch.ones(len(k), dtype=torch.bool)
        rest[pages[b, :own]] = False
        keys, values = (cache.masked_fill(rest[:, None, None, None], torch.nan) for cache in (k, v))
        for other in range(1, 4):
            pair = [b, (b + other) % batch]
            assert torch.equal(answers(pair, keys, values, columns)[:queries], want), length


@pytest.mark.parametrize("at_once", [True, False])
def test_attention_of_trees_is_traced_without_its_numbers(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of one batch is right for another one, of other sizes and other counts."""
    monkeypatch.setattr(attention, "TOGETHER_BYTES", 1 << 30 if at_once else 0)

    def work(
        q: Tensor, k: Tensor, v: Tensor, pages: Tensor, prefix: Tensor, positions: Tensor,
        mask: Tensor, offsets: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ragged = KeySpan(pages, prefix, positions, mask, 0, offsets, 4)
        equal = KeySpan(pages, prefix, positions, mask)
        causal = KeySpan(pages, prefix, positions)
        bent = Scoring(0.3, 4.0, torch.linspace(-1, 3, 4))
        usual = tuple(tree_attention(q, k, v, span, 9) for span in (ragged, equal, causal))
        return *usual, tree_attention(q, k, v, ragged, 9, bent)

    def inputs(counts: list[int], seed: int) -> tuple[Tensor, ...]:
        q, k, v, span = drawn(counts, 4, 2, True, 0, seed)
        assert span.mask is not None
        assert span.offsets is not None
        return q, k, v, span.pages, span.prefix, span.positions, span.mask, span.offsets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(work, inputs([4, 2], 0), check_trace=False)
    for given_inputs in (inputs([1, 3], 1), inputs([0, 4, 2], 2)):
        for got, want in zip(traced(*given_inputs), work(*given_inputs), strict=True):
            torch.testing.assert_close(got, want)
