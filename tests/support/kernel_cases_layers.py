"""Norms, rotation, activation, the paged cache and attention over it."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from overlap_spec import kernels
from overlap_spec.kernels import KeySpan, Scoring
from overlap_spec.kernels.tuning import trial
from tests.support import kernel_harness
from tests.support.kernel_harness import Draw, Inputs, case, close, equal, reference, triton


@case
def rms_norm(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    tokens, size = i.size(1, 9), i.size(1, 300)
    if draw(st.booleans()):
        heads, extra = i.size(1, 5), i.size(0, 2)
        x, weight = i.normal(tokens, heads + extra, size)[:, :heads], i.normal(heads, size)
    else:
        x, weight = i.normal(tokens, size), i.normal(size)
    if draw(st.booleans()):
        weight = weight.float()
    close(triton(kernels.rms_norm, x, weight, 1e-5), reference(kernels.rms_norm, x, weight, 1e-5))


@case
def add_rms_norm(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    shape = (i.size(1, 9), i.size(1, 300))
    args = i.normal(*shape), i.normal(*shape), i.normal(shape[1]), 1e-6
    got, want = triton(kernels.add_rms_norm, *args), reference(kernels.add_rms_norm, *args)
    close(got[0], want[0])
    close(got[1], want[1])


@case
def silu_and_mul(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    x = i.normal(i.size(1, 5), 2 * i.size(1, 1500))
    close(triton(kernels.silu_and_mul, x), reference(kernels.silu_and_mul, x))


@case
def gelu_and_mul(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    x = i.normal(i.size(1, 5), 2 * i.size(1, 1500)) * i.one_of(1, 8)
    close(triton(kernels.gelu_and_mul, x), reference(kernels.gelu_and_mul, x))


@case
def mix_experts(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    tokens, experts, hidden, inner = i.size(0, 40), i.size(1, 9), i.size(1, 70), i.size(1, 70)
    ids = torch.rand(tokens, experts, generator=i.generator).argsort(1)[:, : i.size(1, 3)]
    shares, limit = i.normal(*ids.shape).sigmoid(), None
    up, down = i.normal(experts, 2 * inner, hidden), i.normal(experts, hidden, inner)
    biases: tuple[Tensor | None, ...] = (None, None)
    if draw(st.booleans()):
        # GPT-OSS's: transposed, with biases.
        limit, biases = 7.0, (i.normal(experts, 2 * inner), i.normal(experts, hidden))
        up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
    args = i.normal(tokens, hidden), ids.to(device), shares, up, down, *biases, limit
    small = {"rows": 16, "columns": 16, "depth": 16, "num_warps": 1, "num_stages": 1}
    with trial(experts=small, experts__many=small | {"rows": 32}):
        got, want = triton(kernels.mix_experts, *args), reference(kernels.mix_experts, *args)
    # Of gates and ups, of what is made of them, and of what comes out.
    close(got, want, roundings=3)


@case
def apply_rope(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    tokens, heads, dim = i.size(1, 7), i.size(1, 7), 2 * i.size(8, 128)
    x, rotary = i.normal(tokens, heads + 2, dim)[:, 1:-1], i.normal(tokens, 2, dim)
    close(triton(kernels.apply_rope, x, rotary), reference(kernels.apply_rope, x, rotary))


@case
def rotate_and_store(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    tokens, kv_heads, group, dim = i.size(1, 6), i.size(1, 3), i.size(1, 5), 2 * i.size(8, 128)
    heads, page = kv_heads * group, i.size(1, 9)
    caches = [i.normal(tokens + 2, page, kv_heads, dim) for _ in range(2)]
    qkv, rotary = i.normal(tokens, heads + 2 * kv_heads, dim), i.normal(tokens, 2, dim)
    norm = (i.normal(heads + kv_heads, dim), 1e-6) if draw(st.booleans()) else None
    slots = i.distinct(tokens, (tokens + 2) * page)
    mine, theirs = [[each.clone() for each in caches] for _ in range(2)]
    got = triton(kernels.rotate_and_store, qkv, rotary, *mine, slots, norm)
    want = reference(kernels.rotate_and_store, qkv, rotary, *theirs, slots, norm)
    close(got, want)
    close(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


@case
def page_slots(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    page, pages, batch = i.size(1, 33), i.size(1, 9), i.size(1, 7)
    args = (
        i.integers(0, 2**33, batch, pages),
        i.integers(0, page * pages, i.size(1, 40), batch).T,
        page,
    )
    equal(triton(kernels.page_slots, *args), reference(kernels.page_slots, *args))


@case
def move_kv(draw: Draw, device: torch.device) -> None:
    """Sources of one row overlap its targets, as an accepted path's do."""
    i = Inputs(draw, device)
    batch, width, nodes = i.size(1, 3), i.size(1, 7), i.size(7, 12)
    shape = i.size(1, 3), batch * 3, i.size(4, 9), i.size(1, 3)
    dim = i.size(16, 130)
    caches = [i.normal(*shape, dim), i.normal(*shape, i.one_of(dim, 200))]
    slots = i.distinct(batch * nodes, shape[1] * shape[2]).view(batch, nodes)
    path = torch.stack([i.distinct(width, nodes) for _ in range(batch)])
    args = slots.gather(1, path), slots[:, :width]
    mine, theirs = [[each.clone() for each in caches] for _ in range(2)]
    triton(kernels.move_kv, *mine, *args)
    reference(kernels.move_kv, *theirs, *args)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@case
def pack_mask(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    mask = i.bools(0.5, i.size(1, 3), i.size(1, 40), i.size(1, 140))
    equal(triton(kernels.pack_mask, mask), reference(kernels.pack_mask, mask))


def _rest(i: Inputs, *sizes: int) -> int:
    """What keys have behind their values, of latents, which FlashAttention-3 does not take."""
    return 0 if kernel_harness.KERNELS == "flash" else i.one_of(*sizes)


def _attention(i: Inputs, span: KeySpan, window: int | None) -> None:
    """Queries behind prefixes that end anywhere, over few and over many shares of the keys."""
    batch, total = span.prefix.shape[0], span.positions.shape[0]
    kv_heads, group, dim = i.size(1, 2), i.one_of(1, 2, 3, 7, 8), i.one_of(32, 64, 80, 128, 256)
    page = PAGES[i.size(0, len(PAGES) - 1)]
    width = span.longest if span.offsets is not None else total // batch
    ends = int(span.prefix.max()) + (width if span.mask is None else span.mask.shape[1])
    pages = -(-ends // page) + 1
    places = i.distinct(batch * pages, batch * pages + 2).view(batch, pages)
    span = replace(span, pages=places)
    rest = _rest(i, 0, 0, 20)
    k, v = (i.normal(batch * pages + 2, page, kv_heads, size) for size in (rest or dim, dim))
    # As a slice of what one product makes: neither heads nor queries lie end to end.
    q = i.normal(total, kv_heads * group + 2, dim + rest + 8)[:, 1:-1, :-8]
    bits, size = 8 * q.element_size(), max(16, 1 << (dim - 1).bit_length())
    blocks = {"rows": 64, "keys": i.one_of(64, 16), "num_warps": 4, "num_stages": 2}
    if i.device.type == "cuda":
        blocks |= {"rows": 16, "keys": 16}
    blocks |= {"waves": i.one_of(1, 20), "split_keys": i.one_of(16, 48), "max_splits": 5}
    names = [f"attention.{kind}__{bits}bit__{size}" for kind in ("decode", "prefill")]
    scoring = Scoring(
        i.one_of(None, 0.3), i.one_of(None, 2.0, 50.0), i.one_of(None, i.normal(kv_heads * group))
    )
    with trial(**dict.fromkeys(names, blocks)):
        got = triton(kernels.tree_attention, q, *with_canaries(k, v, span), span, window, scoring)
    args = q.float(), k.float(), v.float(), span, window, scoring
    close(got, reference(kernels.tree_attention, *args))


def with_canaries(k: Tensor, v: Tensor, span: KeySpan, early: int = 0) -> list[Tensor]:
    """Caches that are NaN wherever no request of ``span`` has a key: in pages of nobody, and
    behind each one's last key. ``early``: so many slots before that, which is too much."""
    page = k.shape[1]
    if span.mask is not None:
        counts = torch.full_like(span.prefix, span.mask.shape[1])
    elif span.offsets is not None:
        counts = span.offsets.diff()
    else:
        counts = torch.full_like(span.prefix, len(span.positions) // len(span.prefix))
    held = torch.zeros(k.shape[0] * page, dtype=torch.bool, device=k.device)
    for pages, end in zip(span.pages, (span.prefix + counts - early).tolist(), strict=True):
        logical = torch.arange(end, device=k.device)
        held[pages[logical // page] * page + logical % page] = True
    outside = ~held.view(-1, page, 1, 1)
    return [cache.masked_fill(outside, torch.nan) for cache in (k, v)]


def guarded_attention(early: int) -> None:
    """Three nodes behind ten keys, on pages of four."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((3, 2, 32), (6, 4, 1, 32), (6, 4, 1, 32))
    )
    pages, prefix = torch.tensor([[2, 5, 1, 4]]), torch.tensor([10])
    span = KeySpan(pages, prefix, 10 + torch.arange(3), torch.ones(3, 3, dtype=torch.bool))
    got = triton(kernels.tree_attention, q, *with_canaries(k, v, span, early), span)
    close(got, reference(kernels.tree_attention, q, k, v, span))


PAGES = (4, 16, 1, 24)
NO_PAGES = torch.empty(0)


def _prefixes(i: Inputs, low: int, count: int) -> Tensor:
    """Anywhere, or about where a block of keys ends."""
    if i.one_of(True, False):
        return i.integers(low, i.one_of(4, 90), count)
    return (i.integers(1, 6, count) * 16 + i.integers(-2, 2, count)).clamp(min=low)


@case
def causal_attention(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    batch, queries, window = i.size(1, 2), i.size(1, 9), i.one_of(3, None, 40)
    prefix = _prefixes(i, 0, batch)
    position = prefix[:, None] + torch.arange(queries, device=device)
    _attention(i, KeySpan(NO_PAGES, prefix, position.flatten()), window)


@case
def tree_attention(draw: Draw, device: torch.device) -> None:
    """Nodes share depths; the window of keys may be wider than the queries are many."""
    i = Inputs(draw, device)
    batch, queries, window = i.size(1, 2), i.size(1, 9), i.one_of(None, 3, 40)
    prefix, offset = _prefixes(i, 0, batch), torch.arange(queries, device=device)
    mask = i.bools(0.5, batch, queries, queries + i.one_of(0, 70, 130))
    # Every query sees a key, also where nothing else is near.
    mask[:, offset, offset] = True
    position = prefix[:, None] + offset // 2
    _attention(i, KeySpan(NO_PAGES, prefix, position.flatten(), mask.flatten(0, 1)), window)


@case
def draft_attention(draw: Draw, device: torch.device) -> None:
    """A draft step's branches share one position, and slot 0 does not exist."""
    i = Inputs(draw, device)
    batch, queries, steps = i.size(1, 2), i.size(1, 5), i.size(1, 4)
    prefix = _prefixes(i, 1, 2 * batch)[::2]
    mask = i.bools(0.3, batch, queries, queries * steps)
    mask[:, :, -queries:] = torch.eye(queries, dtype=torch.bool)
    position = (prefix + steps).repeat_interleave(queries)
    span = KeySpan(NO_PAGES, prefix, position, mask.flatten(0, 1), first=1)
    _attention(i, span, i.one_of(None, 9))


def _ragged(i: Inputs, batch: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of requests with queries or none; each query's request, and number within it."""
    counts = i.integers(0, longest + 1, batch) * i.bools(0.8, batch)
    counts[i.size(0, batch - 1)] = longest
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    request = torch.arange(batch, device=i.device).repeat_interleave(counts)
    query = torch.arange(int(offsets[-1]), device=i.device) - offsets[request]
    return offsets, request, query


@case
def ragged_attention(draw: Draw, device: torch.device) -> None:
    """Chunks, or some nodes of trees, of which each request has its own number."""
    i = Inputs(draw, device)
    longest, first, window = i.size(1, 20), i.one_of(0, 1), i.one_of(None, 3, 40)
    offsets, request, query = _ragged(i, i.size(1, 5), longest)
    prefix = _prefixes(i, first, len(offsets) - 1)
    position, mask = prefix[request] + query, None
    if i.one_of(True, False):
        position = prefix[request] + query // 2
        mask = i.bools(0.4, len(query), longest + i.one_of(0, 3, 70, 130))
        mask[torch.arange(len(query), device=device), query] = True
    # The bound may be a loose one.
    longest += i.one_of(0, 5)
    _attention(i, KeySpan(NO_PAGES, prefix, position, mask, first, offsets, longest), window)


@case
def prefill_attention(draw: Draw, device: torch.device) -> None:
    """More rows than one program takes, at the committed block sizes."""
    i = Inputs(draw, device)
    group, longest, dim, page = i.one_of(1, 5), i.size(30, 150), i.one_of(32, 64, 72), 16
    rest = _rest(i, 0, 16)
    batch, pages = i.one_of(1, 3), 15
    offsets, request, query = _ragged(i, batch, longest)
    prefix = i.integers(0, 70, batch)
    span = KeySpan(
        i.distinct(batch * pages, batch * pages + 4).view(batch, pages),
        prefix,
        prefix[request] + query,
        offsets=None if batch == 1 else offsets,
        longest=longest,
    )
    k, v = (i.normal(batch * pages + 4, page, 1, size) for size in (rest or dim, dim))
    q = i.normal(len(query), group, dim + rest)
    window = i.one_of(None, 20)
    got = triton(kernels.tree_attention, q, *with_canaries(k, v, span), span, window)
    args = q.float(), k.float(), v.float(), span, window
    close(got, reference(kernels.tree_attention, *args))
