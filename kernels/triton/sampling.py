"""Masks, noise and choices over vocabularies of any size.

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

from overlap_spec.kernels.sampling import CHOICE, PURPOSE_STEP, Noise
from overlap_spec.kernels.triton.filters import cut_of, kept
from overlap_spec.kernels.triton.launch import launch, power_of_two, require_float
from overlap_spec.kernels.tuning import config


@triton.jit
def _allowed(words, places, row, token, inside, PLACED: tl.constexpr, WORDS: tl.constexpr):
    """Whether each token's bit is set in the mask of row ``row``, or that has none."""
    if PLACED:
        row = tl.load(places + row)
    word = tl.load(words + tl.maximum(row, 0) * WORDS + token // 32, mask=inside, other=0)
    allowed = ((word >> (token % 32)) & 1) != 0
    if PLACED:
        allowed = allowed | (row < 0)
    return allowed


@triton.jit(do_not_specialize_on_alignment=["words", "places"])
def _apply_bitmask(
    logits, words, places, vocab, row_stride,
    PLACED: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    banned = inside & (_allowed(words, places, row, token, inside, PLACED, WORDS) == 0)
    place = logits + row * row_stride + token
    value = tl.load(place, mask=banned, other=0.0).to(tl.float32)
    # A NaN must stay one: it ends its request, and a mask must not hide it.
    tl.store(place, (value - float("inf")).to(logits.dtype.element_ty), mask=banned)


def apply_bitmask(logits: Tensor, rows: Tensor, places: Tensor | None = None) -> None:
    """See :func:`overlap_spec.kernels.apply_bitmask`."""
    require_float("apply_bitmask", logits)
    vocab = logits.shape[1]
    tuned = config("apply_bitmask", logits.device)
    launch(
        _apply_bitmask,
        (len(logits), -(-vocab // tuned["block"])),
        logits, rows, rows if places is None else places, vocab, logits.stride(0),
        PLACED=places is not None, WORDS=rows.shape[1], SIZE=tuned["block"],
        num_warps=tuned["num_warps"],
    )  # fmt: skip


# A block of rows may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["logits"])
def _apply_penalties(
    logits, counts, prompts, repetition, presence, frequency, vocab, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    place = row * vocab + token
    value = tl.load(logits + place, mask=inside, other=0.0)
    count = tl.load(counts + place, mask=inside, other=0)
    output = count > 0
    seen = output | (tl.load(prompts + place, mask=inside, other=0) != 0)
    factor = tl.load(repetition + row)
    value = tl.where(seen, tl.where(value > 0, value / factor, value * factor), value)
    value = tl.where(output, value - tl.load(presence + row), value)
    value -= tl.load(frequency + row) * count.to(tl.float32)
    tl.store(logits + place, value, mask=inside & seen)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See :func:`overlap_spec.kernels.apply_penalties`; tensors without gaps."""
    require_float("apply_penalties", logits)
    vocab = logits.shape[1]
    tuned = config("apply_bitmask", logits.device)
    launch(
        _apply_penalties,
        (len(logits), -(-vocab // tuned["block"])),
        logits, output_counts, in_prompt, repetition, presence, frequency, vocab,
        SIZE=tuned["block"], num_warps=tuned["num_warps"],
    )  # fmt: skip


@triton.jit
def _mixed(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["count"])
def _noise_keys(seeds, positions, out, count, salt, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    golden = -7046029254386353131
    seed = tl.load(seeds + index, mask=inside, other=0) + golden
    place = tl.load(positions + index, mask=inside, other=0) * golden
    key = _mixed(_mixed(seed) + place + salt)
    tl.store(out + index, key, mask=inside)


def noise_keys(seeds: Tensor, positions: Tensor, purpose: int = CHOICE) -> Tensor:
    """See :func:`overlap_spec.kernels.noise_keys`."""
    out = torch.empty(seeds.shape, dtype=torch.int64, device=seeds.device)
    launch(
        _noise_keys, (-(-out.numel() // 128),),
        seeds.contiguous(), positions.contiguous(), out, out.numel(), purpose * PURPOSE_STEP,
        SIZE=128, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _exponential(key, token):
    """The standard exponential of each token under a key."""
    bits = token.to(tl.int32) ^ key.to(tl.int32)
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 2146121005
    bits = bits ^ ((bits >> 15) & 0x1FFFF) ^ (key >> 32).to(tl.int32)
    bits = bits * -2073254261
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    drawn = bits.to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    drawn = tl.minimum(drawn, 1.0 - 5.9604644775390625e-08)
    # -log(1 - x): near 0 a logarithm of what is near 1 would lose x's bits.
    ratio = drawn / (2.0 - drawn)
    square = ratio * ratio
    small = 2.0 * ratio * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7))))
    return tl.where(drawn < 0.25, small, -tl.log(1.0 - drawn))


@triton.jit
def _read(logits, words, places, row, row_stride, token, inside,
          MASKED: tl.constexpr, PLACED: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Logits of a row in float32, those of forbidden tokens at -inf, NaN kept."""
    value = tl.load(logits + row * row_stride + token, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    if MASKED:
        allowed = _allowed(words, places, row, token, inside, PLACED, WORDS)
        value = tl.where(allowed, value, value - float("inf"))
    return value


@triton.jit
def _perturbed(value, temperature, keys, row, token):
    """Logits over the temperature, less the noise's logarithm; as they are in a greedy row."""
    if tl.load(temperature + row) > 0.0:
        heat = tl.load(temperature + row).to(tl.float32)
        value = value / heat - tl.log(_exponential(tl.load(keys + row), token))
    return value


@triton.jit(do_not_specialize_on_alignment=["words", "places"])
def _survey(
    logits, words, places, temperature, keys, bests, tokens, vocab, row_stride,
    MASKED: tl.constexpr, PLACED: tl.constexpr, SAVED: tl.constexpr, NOISY: tl.constexpr,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's maximum, perturbed where asked (NaN if it holds one), and where that is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    value = _read(logits, words, places, row, row_stride, token, inside, MASKED, PLACED, WORDS)
    if SAVED:
        place = logits + row * row_stride + token
        forbidden = inside & (value == -float("inf"))
        tl.store(place, value.to(logits.dtype.element_ty), mask=forbidden)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    if NOISY:
        value = _perturbed(value, temperature, keys, row, token)
    best = tl.max(tl.where(value != value, -float("inf"), value), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0)
    tl.store(bests + row * CHUNKS + chunk, tl.where(broken, float("nan"), best))
    tl.store(tokens + row * CHUNKS + chunk, first)


@triton.jit
def _race(line, cut, least, key, SIZE: tl.constexpr):
    """The token that the noise chooses of those that the filters keep; -1 where none is left."""
    _, peaks, _, _, _, chunks = line
    seen = 0.0
    most = 0.0
    choice = tl.full((), -1, tl.int32)
    for chunk in range(chunks):
        if tl.load(peaks + chunk) >= cut[0]:
            weight, tied = kept(line, cut, least, chunk, seen, SIZE)
            token = chunk * SIZE + tl.arange(0, SIZE)
            score = weight / _exponential(key, token)
            high = tl.max(score, 0)
            winner = tl.min(tl.where(score == high, token, 2147483647), 0)
            choice = tl.where(high > most, winner, choice)
            most = tl.maximum(high, most)
            seen += tied
    return choice


@triton.jit
def _decide(
    logits, temperature, keys, top_k, top_p, min_p, bests, tokens, out, vocab, row_stride,
    FILTERED: tl.constexpr, LOW: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The row's choice: of its chunks' maxima, or of what the filters leave."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    exists = part < CHUNKS
    peak = tl.load(bests + row * CHUNKS + part, mask=exists, other=-float("inf"))
    broken = tl.max((peak != peak).to(tl.int32), 0) > 0
    peak = tl.where(peak != peak, -float("inf"), peak)
    best = tl.max(peak, 0)
    leader = tl.load(tokens + row * CHUNKS + part, mask=exists, other=2147483647)
    choice = tl.min(tl.where(peak == best, leader, 2147483647), 0)
    if FILTERED:
        heat = tl.load(temperature + row).to(tl.float32)
        warm = (heat > 0.0) & (best != -float("inf")) & (broken == 0)
        chunks = tl.where(warm, CHUNKS, 0)
        line = (
            logits + row * row_stride, bests + row * CHUNKS, vocab, tl.where(warm, best, 0.0),
            tl.where(warm, heat, 1.0), chunks,
        )  # fmt: skip
        cut = cut_of(line, tl.load(top_k + row), tl.load(top_p + row), LOW, SIZE)
        drawn = _race(line, cut, tl.load(min_p + row), tl.load(keys + row), SIZE)
        choice = tl.where(drawn >= 0, drawn, choice)
    choice = tl.where(best == -float("inf"), -1, choice)
    choice = tl.where(broken, -2, choice)
    tl.store(out + row, choice.to(tl.int64))


# Bits of a float32 that the type never sets, at its end.
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def masked_choose(
    logits: Tensor,
    rows: Tensor | None = None,
    places: Tensor | None = None,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.masked_choose`.

    Two launches, whatever is asked: all chunks are read at once, then a program a row decides. The
    filters' search is in the second, because each of its rounds waits for the one before: spread
    over chunks it would cost a launch a round. The first leaves it masked logits in place.
    """
    require_float("masked_choose", logits)
    count, vocab = logits.shape
    sampled = temperature is not None and keys is not None
    filtered = sampled and filters is not None
    tuned = config("choose/filtered" if filtered else "choose", logits.device)
    size = tuned["block"]
    chunks = -(-vocab // size)
    bests = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    words = tokens if rows is None else rows
    own = words if places is None else places
    heat, noise = (temperature, keys) if sampled else (bests, out)
    limits = filters if filtered and filters is not None else (bests, bests, bests)
    options = {"CHUNKS": chunks, "SIZE": size, "num_warps": tuned["num_warps"]}
    launch(
        _survey, (count, chunks),
        logits, words, own, heat, noise, bests, tokens, vocab, logits.stride(0),
        MASKED=rows is not None, PLACED=places is not None,
        WORDS=1 if rows is None else rows.shape[1],
        SAVED=filtered and rows is not None, NOISY=sampled and not filtered, **options,
    )  # fmt: skip
    launch(
        _decide, (count,),
        logits, heat, noise, *limits, bests, tokens, out, vocab, logits.stride(0),
        FILTERED=filtered, LOW=LOW_BITS[logits.dtype], PARTS=power_of_two(chunks), **options,
    )  # fmt: skip
    return out


def choose(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See :func:`overlap_spec.kernels.choose`."""
    return masked_choose(logits, None, None, temperature, keys, filters)


@triton.jit
def _shortlist(
    logits, offsets, temperature, keys, scores, tokens, bests, masses, vocab, row_stride,
    NOISY: tl.constexpr, MAPPED: tl.constexpr, TOP: tl.constexpr, CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's best tokens, its maximum and its mass relative to it, perturbed where asked."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=-float("inf"))
    value = value.to(tl.float32)
    if NOISY:
        named = token
        if MAPPED:
            named = token + tl.load(offsets + token, mask=inside, other=0).to(tl.int32)
        value = _perturbed(value, temperature, keys, row, named)
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
    logits: Tensor, count: int, offsets: Tensor | None = None, noise: Noise | None = None
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
    names = out_tokens if offsets is None else offsets
    heat, keys = (bests, out_tokens) if noise is None else noise
    launch(
        _shortlist, (rows, chunks),
        logits, names, heat, keys, scores, tokens, bests, masses, vocab, logits.stride(0),
        NOISY=noise is not None, MAPPED=offsets is not None, TOP=count, CHUNKS=chunks, SIZE=size,
        num_warps=tuned["num_warps"],
    )  # fmt: skip
    launch(
        _rank, (rows,),
        scores, tokens, bests, masses, names, out_scores, out_tokens,
        MAPPED=offsets is not None, TOP=count, CHUNKS=chunks, PARTS=power_of_two(chunks),
        SIZE=power_of_two(chunks * count), num_warps=4,
    )  # fmt: skip
    return out_scores, out_tokens
