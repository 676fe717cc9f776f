"""Masks, coins and choices over vocabularies of any size.

A row is cut into chunks, one program each, so that a few rows still fill the device; a second
kernel puts the chunks together. The cut depends on the vocabulary alone, never on the batch: a
row's choice is the same in whatever company it is computed.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap_spec.kernels.triton.filters import kept, sift
from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import config


@triton.jit
def _allowed(words, row, token, inside, WORDS: tl.constexpr):
    """Whether each token's bit is set in mask row ``row``."""
    word = tl.load(words + row * WORDS + token // 32, mask=inside, other=0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def _apply_bitmask(
    logits, words, index, vocab, row_stride,
    WORDS: tl.constexpr, SOME: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if SOME:
        row = tl.load(index + row)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    banned = inside & (_allowed(words, row, token, inside, WORDS) == 0)
    place = logits + row * row_stride + token
    value = tl.load(place, mask=banned, other=0.0).to(tl.float32)
    # A NaN must stay one: it ends its request, and a mask must not hide it.
    tl.store(place, (value - float("inf")).to(logits.dtype.element_ty), mask=banned)


def apply_bitmask(logits: Tensor, rows: Tensor, index: Tensor | None = None) -> None:
    """See :func:`overlap_spec.kernels.apply_bitmask`."""
    require_float("apply_bitmask", logits)
    vocab = logits.shape[1]
    tuned = config("apply_bitmask", logits.device)
    launch(
        _apply_bitmask,
        (len(logits) if index is None else len(index), -(-vocab // tuned["block"])),
        logits, rows, rows if index is None else index, vocab, logits.stride(0),
        WORDS=rows.shape[1], SOME=index is not None, SIZE=tuned["block"],
        num_warps=tuned["num_warps"],
    )  # fmt: skip


@triton.jit
def _mixed(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _coins(seeds, positions, out, count, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    golden = -7046029254386353131
    seed = tl.load(seeds + index, mask=inside, other=0) + golden
    z = _mixed(_mixed(seed) + tl.load(positions + index, mask=inside, other=0) * golden)
    drawn = ((z >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    tl.store(out + index, drawn, mask=inside)


def coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """See :func:`overlap_spec.kernels.coins`."""
    out = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    launch(
        _coins, (-(-out.numel() // 128),),
        seeds.contiguous(), positions.contiguous(), out, out.numel(), SIZE=128, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _read(logits, words, flags, row, row_stride, token, inside,
          MASKED: tl.constexpr, FLAGGED: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Logits of a row in float32, those of forbidden tokens at -inf, NaN kept."""
    value = tl.load(logits + row * row_stride + token, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    if MASKED:
        allowed = _allowed(words, row, token, inside, WORDS)
        if FLAGGED:
            allowed = allowed | (tl.load(flags + row) == 0)
        value = tl.where(allowed, value, value - float("inf"))
    return value


@triton.jit
def _heat(temperature, row):
    """What logits are divided by: 1 where a row is greedy."""
    heat = tl.load(temperature + row).to(tl.float32)
    return tl.where(heat > 0.0, heat, 1.0)


@triton.jit
def _survey(
    logits, words, flags, temperature, bests, tokens, masses, vocab, row_stride,
    MASKED: tl.constexpr, FLAGGED: tl.constexpr, SAVED: tl.constexpr, WEIGHED: tl.constexpr,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's maximum (NaN if it holds one), where that is, and its mass relative to it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    value = _read(logits, words, flags, row, row_stride, token, inside, MASKED, FLAGGED, WORDS)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    best = tl.max(tl.where(value != value, -float("inf"), value), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0)
    tl.store(bests + row * CHUNKS + chunk, tl.where(broken, float("nan"), best))
    tl.store(tokens + row * CHUNKS + chunk, first)
    if WEIGHED:
        pivot = tl.where(best == -float("inf"), 0.0, best)
        mass = tl.sum(tl.exp((value - pivot) / _heat(temperature, row)), 0)
        tl.store(masses + row * CHUNKS + chunk, mass)
    if SAVED:
        place = logits + row * row_stride + token
        forbidden = inside & (value == -float("inf"))
        tl.store(place, value.to(logits.dtype.element_ty), mask=forbidden)


@triton.jit
def _find(part, mass, coin):
    """The chunk in which the coin falls, if any has mass; the coin's goal, and the mass before."""
    running = tl.cumsum(mass, 0)
    goal = coin * tl.sum(mass, 0)
    chunk = tl.min(tl.where((running > goal) & (mass > 0.0), part, 2147483647), 0)
    found = chunk != 2147483647
    chunk = tl.where(found, chunk, 0)
    return chunk, found, goal, tl.sum(tl.where(part < chunk, mass, 0.0), 0)


@triton.jit
def _pick(token, weight, before, goal):
    """The chunk's token at which the running sum passes the goal; -1 where none is possible."""
    passed = (before + tl.cumsum(weight, 0) > goal) & (weight > 0.0)
    drawn = tl.min(tl.where(passed, token, 2147483647), 0)
    # Two sums of the same chunk may round apart: its last possible token is then meant.
    last = tl.max(tl.where(weight > 0.0, token, -1), 0)
    return tl.where(drawn == 2147483647, last, drawn)


@triton.jit
def _decide(
    logits, words, flags, temperature, coin, top_k, top_p, min_p, bests, tokens, masses, out,
    vocab, row_stride,
    MASKED: tl.constexpr, FLAGGED: tl.constexpr, SAMPLED: tl.constexpr, FILTERED: tl.constexpr,
    LOW: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The row's choice: of its chunks' maxima, or of the one chunk in which the coin falls."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    exists = part < CHUNKS
    peak = tl.load(bests + row * CHUNKS + part, mask=exists, other=-float("inf"))
    broken = tl.max((peak != peak).to(tl.int32), 0) > 0
    peak = tl.where(peak != peak, -float("inf"), peak)
    best = tl.max(peak, 0)
    leader = tl.load(tokens + row * CHUNKS + part, mask=exists, other=2147483647)
    choice = tl.min(tl.where(peak == best, leader, 2147483647), 0)
    if SAMPLED:
        heat = _heat(temperature, row)
        warm = tl.load(temperature + row) > 0.0
        pivot = tl.where(best == -float("inf"), 0.0, best)
        if FILTERED:
            chunks = tl.where(warm & (best != -float("inf")) & (broken == 0), CHUNKS, 0)
            line = (logits + row * row_stride, bests + row * CHUNKS, vocab, pivot, heat, chunks)
            least = tl.load(min_p + row)
            cut, mass, ties = sift(
                line, tl.load(top_k + row), tl.load(top_p + row), least, PARTS, LOW, SIZE
            )
        else:
            mass = tl.load(masses + row * CHUNKS + part, mask=exists, other=0.0)
            mass = mass * tl.exp((peak - pivot) / heat)
            # Broken rows are settled below; their sums must not misguide the search.
            mass = tl.where(exists & (mass == mass), mass, 0.0)
        chunk, found, goal, before = _find(part, mass, tl.load(coin + row))
        token = chunk * SIZE + tl.arange(0, SIZE)
        if FILTERED:
            tied = tl.sum(tl.where(part == chunk, ties, 0.0), 0)
            weight, _ = kept(line, cut, least, chunk, tied, SIZE)
        else:
            inside = token < vocab
            value = _read(
                logits, words, flags, row, row_stride, token, inside, MASKED, FLAGGED, WORDS
            )
            weight = tl.exp((value - pivot) / heat)
            weight = tl.where(inside & (weight == weight), weight, 0.0)
        drawn = _pick(token, weight, before, goal)
        choice = tl.where(warm & found & (drawn >= 0), drawn, choice)
    choice = tl.where(best == -float("inf"), -1, choice)
    choice = tl.where(broken, -2, choice)
    tl.store(out + row, choice.to(tl.int64))


# Bits of a float32 that the type never sets, at its end.
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def masked_choose(
    logits: Tensor,
    rows: Tensor | None = None,
    flags: Tensor | None = None,
    temperature: Tensor | None = None,
    coin: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.masked_choose`.

    Two launches, whatever is asked: all chunks are read at once, then a program a row decides. The
    filters' search is in the second, because each of its rounds waits for the one before: spread
    over chunks it would cost a launch a round. The first leaves it masked logits in place.
    """
    require_float("masked_choose", logits)
    count, vocab = logits.shape
    sampled = temperature is not None and coin is not None
    filtered = sampled and filters is not None
    weighed = sampled and not filtered
    tuned = config("choose/filtered" if filtered else "choose", logits.device)
    size = tuned["block"]
    chunks = -(-vocab // size)
    bests = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    masses = torch.empty_like(bests) if weighed else bests
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    words = tokens if rows is None else rows
    marks = words if flags is None else flags.view(torch.uint8)
    heat, draw = (temperature, coin) if sampled else (bests, bests)
    limits = filters if filtered and filters is not None else (bests, bests, bests)
    options = {
        "MASKED": rows is not None,
        "FLAGGED": flags is not None,
        "WORDS": 1 if rows is None else rows.shape[1],
        "CHUNKS": chunks,
        "SIZE": size,
        "num_warps": tuned["num_warps"],
    }
    launch(
        _survey, (count, chunks),
        logits, words, marks, heat, bests, tokens, masses, vocab, logits.stride(0),
        SAVED=filtered and rows is not None, WEIGHED=weighed, **options,
    )  # fmt: skip
    launch(
        _decide, (count,),
        logits, words, marks, heat, draw, *limits, bests, tokens, masses, out,
        vocab, logits.stride(0),
        SAMPLED=sampled, FILTERED=filtered, LOW=LOW_BITS[logits.dtype],
        PARTS=power_of_two(chunks), **options,
    )  # fmt: skip
    return out


def choose(
    logits: Tensor,
    temperature: Tensor | None = None,
    coin: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.choose`."""
    return masked_choose(logits, None, None, temperature, coin, filters)


@triton.jit
def _shortlist(
    logits, scores, tokens, bests, masses, vocab, row_stride,
    TOP: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's best tokens, its maximum and its mass relative to it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    place = row * CHUNKS + chunk
    best = tl.max(value, 0)
    pivot = tl.where(best == -float("inf"), 0.0, best)
    tl.store(bests + place, best)
    tl.store(masses + place, tl.sum(tl.where(inside, tl.exp(value - pivot), 0.0), 0))
    free = inside
    for rank in range(TOP):
        top = tl.max(tl.where(free, value, -float("inf")), 0)
        winner = tl.min(tl.where(free & (value == top), token, 2147483647), 0)
        tl.store(scores + place * TOP + rank, top)
        tl.store(tokens + place * TOP + rank, winner)
        free = free & (token != winner)


@triton.jit
def _rank(
    scores, tokens, bests, masses, offsets, out_scores, out_tokens,
    MAPPED: tl.constexpr, TOP: tl.constexpr, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The row's best tokens among its chunks', with their log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    exists = part < CHUNKS
    peak = tl.load(bests + row * CHUNKS + part, mask=exists, other=-float("inf"))
    best = tl.max(peak, 0)
    pivot = tl.where(best == -float("inf"), 0.0, best)
    mass = tl.load(masses + row * CHUNKS + part, mask=exists, other=0.0)
    normaliser = pivot + tl.log(tl.sum(mass * tl.exp(peak - pivot), 0))
    entry = tl.arange(0, SIZE)
    inside = entry < CHUNKS * TOP
    value = tl.load(scores + row * (CHUNKS * TOP) + entry, mask=inside, other=-float("inf"))
    token = tl.load(tokens + row * (CHUNKS * TOP) + entry, mask=inside, other=2147483647)
    free = token != 2147483647
    for rank in range(TOP):
        top = tl.max(tl.where(free, value, -float("inf")), 0)
        winner = tl.min(tl.where(free & (value == top), token, 2147483647), 0)
        free = free & (token != winner)
        # A row that holds NaN has no winner; its token must still be one.
        winner = tl.where(winner == 2147483647, 0, winner).to(tl.int64)
        tl.store(out_scores + row * TOP + rank, top - normaliser)
        if MAPPED:
            winner += tl.load(offsets + winner)
        tl.store(out_tokens + row * TOP + rank, winner)


def top_candidates(
    logits: Tensor, count: int, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`overlap_spec.kernels.top_candidates`."""
    require_float("top_candidates", logits)
    rows, vocab = logits.shape
    tuned = config("top_candidates", logits.device)
    size = tuned["block"]
    chunks = -(-vocab // size)
    device = logits.device
    scores = torch.empty(rows, chunks, count, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, chunks, count, dtype=torch.int32, device=device)
    bests = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    masses = torch.empty_like(bests)
    out_scores = torch.empty(rows, count, dtype=torch.float32, device=device)
    out_tokens = torch.empty(rows, count, dtype=torch.int64, device=device)
    launch(
        _shortlist, (rows, chunks),
        logits, scores, tokens, bests, masses, vocab, logits.stride(0),
        TOP=count, CHUNKS=chunks, SIZE=size, num_warps=tuned["num_warps"],
    )  # fmt: skip
    launch(
        _rank, (rows,),
        scores, tokens, bests, masses, tokens if offsets is None else offsets,
        out_scores, out_tokens,
        MAPPED=offsets is not None, TOP=count, CHUNKS=chunks, PARTS=power_of_two(chunks),
        SIZE=power_of_two(chunks * count), num_warps=4,
    )  # fmt: skip
    return out_scores, out_tokens
