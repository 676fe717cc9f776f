"""The kernels' work in serving: Llama-3.1-8B's shapes, a few requests and many.

Everything is drawn on the CPU first and at random: zeros would hide what is wrong, and run faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from overlap_spec import kernels
from overlap_spec.kernels import KeySpan
from overlap_spec.kernels.experts import MANY

HIDDEN, INTERMEDIATE, LAYERS = 4096, 14336, 32
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
VOCAB, DRAFT_VOCAB = 128256, 32000
# DeepSeek-V3's latents, and what of their keys is rotated.
LATENT, TURNED = 512, 64
# Qwen3-30B-A3B's mixture.
EXPERTS, PER_TOKEN, EXPERT_HIDDEN, EXPERT_INNER = 128, 8, 2048, 768
PAGE, NODES, TOP_K, STEPS, CONTEXT = 16, 16, 8, 5, 4096
LONG = torch.int64


@dataclass(frozen=True)
class Work:
    """One operation on inputs of one size.

    Attributes:
        name: ``operation/what``.
        operation: Of ``overlap_spec.kernels``.
        draw: Makes the arguments.
        bytes, flops: The least that must be moved and computed.
        config: The entry of the tuning tables that rules it; None: there is none.
        reference_reads: Whether its reference waits for a value, and cannot be captured.
    """

    name: str
    operation: Callable[..., Any]
    draw: Callable[[], tuple[Any, ...]]
    bytes: int
    flops: int = 0
    config: str | None = None
    reference_reads: bool = False


class Draw:
    """Random tensors on a device, in one floating type."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = LONG) -> Tensor:
        return torch.randint(
            low, high, shape, generator=self.generator, device=self.device, dtype=dtype
        )

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def distinct(self, count: int, below: int) -> Tensor:
        return torch.randperm(below, generator=self.generator, device=self.device)[:count]


def works(draw: Draw, batches: tuple[int, ...] = (1, 32)) -> Iterator[Work]:
    """All operations at each batch size, ``NODES`` nodes a request."""
    for batch in batches:
        yield from _elementwise(draw, batch)
        yield from _cache(draw, batch)
        yield from _choice(draw, batch)
        yield from _tree(draw, batch)
        yield attention(draw, batch, NODES, CONTEXT, tree=True)
        yield attention(draw, batch, 1, CONTEXT)
        yield attention(draw, batch, TOP_K, CONTEXT, tree=True, first=1)
        counts = tuple(1 + 5 * request % NODES for request in range(batch + 1))
        yield ragged(draw, counts, CONTEXT, NODES)
        yield experts(draw, batch * NODES)
    yield experts(draw, 2048)
    yield ragged(draw, (1536, 300, 212), 1024)
    yield attention(draw, 1, 4 * NODES, 8 * CONTEXT, tree=True)
    yield attention(draw, 1, 2048, 0)
    yield attention(draw, 1, 2048, 6144)


def _elementwise(d: Draw, batch: int) -> Iterator[Work]:
    rows, size, item = batch * NODES, HIDDEN, d.dtype.itemsize
    x = rows * size * item
    rope = rows * 2 * HEAD_DIM * item
    qk = rows * (HEADS + KV_HEADS) * HEAD_DIM * item

    def norm() -> tuple[Any, ...]:
        return d.normal(rows, size), d.normal(size), 1e-5

    def add_norm() -> tuple[Any, ...]:
        return d.normal(rows, size), *norm()

    def turn() -> tuple[Any, ...]:
        both = d.normal(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        return both[:, : HEADS + KV_HEADS], d.normal(rows, 2, HEAD_DIM)

    yield Work(f"rms_norm/{rows}", kernels.rms_norm, norm, 2 * x, config="rms_norm")
    yield Work(f"add_rms_norm/{rows}", kernels.add_rms_norm, add_norm, 4 * x, config="rms_norm")
    yield Work(f"apply_rope/{rows}", kernels.apply_rope, turn, 2 * qk + rope, config="rope")
    for gate in (kernels.silu_and_mul, kernels.gelu_and_mul):
        yield Work(
            f"{gate.__name__}/{rows}",
            gate,
            lambda: (d.normal(rows, 2 * INTERMEDIATE),),
            3 * rows * INTERMEDIATE * item,
            config="silu_and_mul",
        )


def _cache(d: Draw, batch: int) -> Iterator[Work]:
    rows, item = batch * NODES, d.dtype.itemsize
    pages = batch * CONTEXT // PAGE
    all_heads = HEADS + 2 * KV_HEADS

    def caches(layers: int | None = None, pages: int = pages) -> list[Tensor]:
        shape = (pages, PAGE, KV_HEADS, HEAD_DIM)
        return [d.normal(*((layers,) if layers else ()), *shape) for _ in range(2)]

    def rotate(norm: bool) -> tuple[Any, ...]:
        weight = (d.normal(HEADS + KV_HEADS, HEAD_DIM), 1e-6) if norm else None
        qkv, rotary = d.normal(rows, all_heads, HEAD_DIM), d.normal(rows, 2, HEAD_DIM)
        return qkv, rotary, *caches(), d.distinct(rows, pages * PAGE), weight

    def slots() -> tuple[Any, ...]:
        pages = d.integers(0, 2**20, batch, CONTEXT // PAGE)
        return pages, d.integers(0, CONTEXT, batch, NODES), PAGE

    def move() -> tuple[Any, ...]:
        # Few pages: all layers of a context would not fit many times.
        slots = d.distinct(2 * batch * NODES, 2 * rows).view(batch, 2 * NODES)
        k, v = caches(LAYERS, 2 * rows // PAGE)
        return k, v, slots[:, 1 : 2 * STEPS : 2].contiguous(), slots[:, :STEPS].contiguous()

    moved = 4 * LAYERS * batch * STEPS * KV_HEADS * HEAD_DIM * item
    through = 2 * rows * all_heads * HEAD_DIM * item + rows * 2 * HEAD_DIM * item
    for name, norm in (("", False), ("/norm", True)):
        yield Work(
            f"rotate_and_store/{rows}{name}",
            kernels.rotate_and_store,
            partial(rotate, norm),
            through,
            config="rope",
        )
    yield Work(f"page_slots/{rows}", kernels.page_slots, slots, 24 * rows)
    yield Work(f"move_kv/{batch}", kernels.move_kv, move, moved, config="move_kv")


def _choice(d: Draw, batch: int) -> Iterator[Work]:
    rows, item = batch * NODES, d.dtype.itemsize
    words = -(-VOCAB // 32)
    read = rows * VOCAB * item
    masks = rows * words * 4

    def masked() -> tuple[Any, ...]:
        bits = d.integers(-(2**31), 2**31, rows, words, dtype=torch.int32)
        return d.normal(rows, VOCAB), bits

    def penalised() -> tuple[Any, ...]:
        counts = d.integers(0, 2, rows, VOCAB).int()
        wide = d.normal(rows, VOCAB).float()
        return wide, counts, counts > 0, *(d.uniform(rows) + 0.5 for _ in range(3))

    def sampled() -> tuple[Any, ...]:
        return *masked(), None, d.uniform(rows) + 0.5, d.integers(0, 2**62, rows)

    def filtered() -> tuple[Any, ...]:
        top_k = d.integers(20, 60, rows)
        return *sampled(), (top_k, d.uniform(rows) / 10 + 0.85, d.uniform(rows) / 10)

    def candidates() -> tuple[Any, ...]:
        rows = batch * TOP_K
        return d.normal(rows, DRAFT_VOCAB), TOP_K, d.integers(0, VOCAB // 2, DRAFT_VOCAB)

    def noisy() -> tuple[Any, ...]:
        rows = batch * TOP_K
        noise = kernels.Noise(d.uniform(rows) + 0.5, d.integers(0, 2**62, rows))
        return *candidates(), noise

    yield Work(
        f"apply_bitmask/{rows}", kernels.apply_bitmask, masked, read + masks, config="apply_bitmask"
    )
    yield Work(
        f"apply_penalties/{rows}",
        kernels.apply_penalties,
        penalised,
        13 * rows * VOCAB,
        config="apply_bitmask",
    )
    for name, inputs, entry in (
        ("greedy", masked, "choose"),
        ("sampled", sampled, "choose"),
        ("filtered", filtered, "choose/filtered"),
    ):
        yield Work(
            f"masked_choose/{rows}/{name}",
            kernels.masked_choose,
            inputs,
            read + masks,
            config=entry,
        )
    yield Work(
        f"noise_keys/{rows}",
        kernels.noise_keys,
        lambda: (d.integers(0, 2**40, rows), d.integers(0, CONTEXT, rows)),
        20 * rows,
    )
    for name, inputs in (("", candidates), ("/noise", noisy)):
        yield Work(
            f"top_candidates/{batch * TOP_K}{name}",
            kernels.top_candidates,
            inputs,
            batch * TOP_K * DRAFT_VOCAB * item,
            config="top_candidates",
        )


def _tree(d: Draw, batch: int) -> Iterator[Work]:
    candidates, widest = TOP_K + (STEPS - 1) * TOP_K**2, 10 + 7 * 10**2
    seen = (STEPS - 1) * TOP_K

    def scores(count: int) -> tuple[Any, ...]:
        return -d.uniform(batch, count), NODES - 1

    def children() -> tuple[Any, ...]:
        added, tokens = -d.uniform(batch * TOP_K, TOP_K), d.integers(0, VOCAB, batch * TOP_K, TOP_K)
        mask = d.uniform(batch, TOP_K, seen) < 0.5
        # Scores of 0: what is added to in place must not grow from call to call.
        return torch.zeros(batch, TOP_K, device=d.device), added, tokens, mask

    def states() -> tuple[Any, ...]:
        count, width = 1000, 260
        moves = (d.integers(0, count, count * width) * width).int()
        here = (d.integers(0, count, batch * TOP_K**2) * width).int()
        texts = d.integers(0, 256, VOCAB, 16).int()
        return moves, here, texts, d.integers(0, VOCAB, batch * TOP_K**2)

    def nodes() -> tuple[Any, ...]:
        below = torch.arange(1, NODES, device=d.device)
        parents = d.integers(0, NODES, batch, NODES - 1) % below
        root, tokens = d.integers(0, VOCAB, batch), d.integers(0, VOCAB, batch, NODES - 1)
        return root, tokens, parents, -d.uniform(batch, NODES - 1), STEPS

    def select() -> tuple[Any, ...]:
        most = d.integers(NODES // 2, NODES + 1, batch)
        return -d.uniform(batch, NODES), batch * NODES // 2, most

    def accept() -> tuple[Any, ...]:
        tree = kernels.build_tree(*nodes())
        return tree.tokens.roll(-1, 1), tree, STEPS + 1

    def mask() -> tuple[Any, ...]:
        return (d.uniform(batch, NODES, NODES) < 0.5,)

    square = batch * NODES * NODES
    for count in (candidates, widest):
        yield Work(
            f"rerank/{batch}x{count}",
            kernels.rerank,
            partial(scores, count),
            batch * (4 * count + 8 * NODES),
        )
    yield Work(
        f"grow/{batch}",
        kernels.grow,
        children,
        batch * TOP_K * (8 * TOP_K + 40 + 2 * seen + TOP_K),
    )
    yield Work(f"build_tree/{batch}", kernels.build_tree, nodes, 64 * batch * NODES + square)
    yield Work(f"select_nodes/{batch}", kernels.select_nodes, select, 12 * batch * NODES)
    yield Work(f"accept_path/{batch}", kernels.accept_path, accept, 40 * batch * NODES)
    yield Work(f"after_tokens/{batch}", kernels.after_tokens, states, 144 * batch * TOP_K**2)
    yield Work(f"pack_mask/{batch}", kernels.pack_mask, mask, square + 8 * batch * NODES)


def experts(d: Draw, rows: int) -> Work:
    """A layer's mixture of experts."""
    picks = rows * PER_TOKEN
    matrices = 3 * EXPERT_HIDDEN * EXPERT_INNER

    def draw() -> tuple[Any, ...]:
        ids = d.uniform(rows, EXPERTS).argsort(1)[:, :PER_TOKEN].contiguous()
        up = d.normal(EXPERTS, 2 * EXPERT_INNER, EXPERT_HIDDEN)
        down = d.normal(EXPERTS, EXPERT_HIDDEN, EXPERT_INNER)
        shares = d.uniform(rows, PER_TOKEN).to(d.dtype)
        return d.normal(rows, EXPERT_HIDDEN), ids, shares, up, down, None, None, None

    return Work(
        f"mix_experts/{rows}",
        kernels.mix_experts,
        draw,
        min(picks, EXPERTS) * matrices * d.dtype.itemsize,
        2 * picks * matrices,
        config="experts/many" if picks > MANY * EXPERTS else "experts",
        reference_reads=True,
    )


def attention(
    d: Draw,
    batch: int,
    queries: int,
    prefix: int,
    tree: bool = False,
    first: int = 0,
    head_dim: int = HEAD_DIM,
) -> Work:
    """Queries of each request behind ``prefix`` keys: a tree's, or causal ones."""
    what = "draft" if first else "tree" if tree else "causal"
    name = f"{batch}x{queries}@{prefix}/{what}/{head_dim}"
    nodes = queries if tree else 0
    return _attention(d, name, (queries,) * batch, prefix, nodes, first, (KV_HEADS, head_dim, 0))


def latents(d: Draw, batch: int, queries: int, prefix: int, tree: bool = False) -> Work:
    """The same over latents that all heads share."""
    name = f"{batch}x{queries}@{prefix}/{'tree' if tree else 'causal'}/{LATENT}+{TURNED}"
    nodes = queries if tree else 0
    return _attention(d, name, (queries,) * batch, prefix, nodes, 0, (1, LATENT, TURNED))


def ragged(d: Draw, counts: tuple[int, ...], prefix: int, nodes: int = 0) -> Work:
    """Each request's number of queries: of a tree of ``nodes`` nodes, or (0) of a chunk."""
    name = f"ragged_{len(counts)}x{max(counts)}@{prefix}/{'tree' if nodes else 'causal'}"
    return _attention(d, name, counts, prefix, nodes, 0, (KV_HEADS, HEAD_DIM, 0))


def _attention(
    d: Draw,
    name: str,
    counts: tuple[int, ...],
    prefix: int,
    nodes: int,
    first: int,
    shape: tuple[int, int, int],
) -> Work:
    """``shape``: heads of keys, their size, and what a latent's key has more."""
    kv_heads, dim, rest = shape
    batch, total, longest, item = len(counts), sum(counts), max(counts), d.dtype.itemsize
    width = nodes or longest
    pages = -(-(prefix + width) // PAGE)

    def draw() -> tuple[Any, ...]:
        k, v = (d.normal(batch * pages, PAGE, kv_heads, size) for size in (rest or dim, dim))
        start = torch.full((batch,), prefix, device=d.device)
        offset = torch.cat([torch.arange(count, device=d.device) for count in counts])
        mask = offsets = None
        if nodes:
            own = offset[:, None] == torch.arange(width, device=d.device)
            mask = (d.uniform(total, width) < 0.5) | own
        if total < batch * longest:
            offsets = torch.tensor([0, *accumulate(counts)], device=d.device)
        places = d.distinct(batch * pages, batch * pages).view(batch, pages)
        span = KeySpan(places, start, prefix + offset, mask, first, offsets, longest)
        return d.normal(total, HEADS, dim + rest), k, v, span

    # What a query sees on average: the prefix, and of the window about half.
    seen = sum(count * (prefix + (nodes or count) / 2) for count in counts)
    keys = sum(prefix + (nodes or count) for count in counts)
    size = max(16, 1 << (dim - 1).bit_length())
    kind = "prefill" if longest * HEADS // kv_heads > 64 else "decode"
    return Work(
        f"attention/{name}",
        kernels.tree_attention,
        draw,
        (keys * kv_heads * ((rest or dim) + dim) + total * HEADS * (2 * dim + rest)) * item,
        int(2 * seen * HEADS * (2 * dim + rest)),
        config=f"attention.{kind}/{8 * item}bit/{size}",
    )
