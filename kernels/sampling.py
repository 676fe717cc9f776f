"""From logits to the target's choice: mask, penalties, filters, and noise for every token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation

_GOLDEN, _MIX_1, _MIX_2 = (
    -7046029254386353131,  # 0x9E3779B97F4A7C15
    -4658895280553007687,  # 0xBF58476D1CE4E5B9
    -7723592293110705685,  # 0x94D049BB133111EB
)

# What a purpose adds to a key, as often as its number says.
PURPOSE_STEP = 0x1F83D9ABFB41BD6B
# Multipliers of the noise's two rounds, as int32: 0x7FEB352D and 0x846CA68B.
_ROUND_1, _ROUND_2 = 2146121005, -2073254261

# What random numbers are for: those of different purposes are independent. Drafters share CHOICE
# with the target, so that both pick the same token where their distributions are alike. WHOLE
# texts are drawn at once.
CHOICE, ACCEPT, RESIDUAL, WHOLE = PURPOSES = (0, 2, 3, 4)

# Logits that a block of rows may have, so that it stays in a core's cache.
CACHED_LOGITS = 2**17


@operation
def apply_bitmask(logits: Tensor, rows: Tensor, places: Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: ``(L, V)``, finite or NaN.
        rows: int32 ``(M, ceil(V / 32))``, contiguous; bit ``t % 32`` of word ``t // 32`` allows
            token t.
        places: int64 ``(L,)``: which row each one's mask is, -1 where it has none; None: row by
            row.
    """
    index = None if places is None else (places >= 0).nonzero()[:, 0]
    # Eight tokens a byte, looked up and added: a fill by a bool mask is eight times as slow on
    # the CPU, where it is not vectorised. So many rows at a time as stay in its cache.
    table, vocab = _byte_penalties(logits.dtype, rows.device), logits.shape[1]
    block = max(1, CACHED_LOGITS // vocab)
    for start in range(0, len(rows if index is None else index), block):
        part = slice(start, start + block)
        own = rows[part] if index is None or places is None else rows[places[index[part]]]
        penalties = F.embedding(own.view(torch.uint8).int(), table).flatten(1)[:, :vocab]
        if index is None:
            logits[part].add_(penalties)
        else:
            logits.index_add_(0, index[part], penalties)


@cache
def _byte_penalties(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(256, 8)``: of each byte of a mask row, 0 for its set bits and -inf for the others."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits > 0, 0.0, -torch.inf).to(dtype)


@operation
def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Repetition, then presence and frequency penalties of every row, in place.

    Args:
        logits: float32 ``(L, V)``.
        output_counts: int32 ``(L, V)``: occurrences in the output and on the row's own draft path.
        in_prompt: bool ``(L, V)``; repetition counts these too.
        repetition, presence, frequency: float32 ``(L,)``.
    """
    output = output_counts > 0
    factor = torch.where(in_prompt | output, repetition[:, None], 1.0)
    torch.where(logits > 0, logits / factor, logits * factor, out=logits)
    logits -= presence[:, None] * output
    logits -= frequency[:, None] * output_counts


@operation
def noise_keys(seeds: Tensor, positions: Tensor, purpose: int = CHOICE) -> Tensor:
    """64 random bits for each (seed, position, purpose): a key of the noise of all tokens there.

    SplitMix64's finaliser (Steele et al., OOPSLA 2014) over int64 ``(L,)`` → int64 ``(L,)``, the
    same bits on every device.
    """
    return _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN + purpose * PURPOSE_STEP)


def coins(keys: Tensor) -> Tensor:
    """A uniform number in [0, 1) of each key: int64 ``(L,)`` → float32 ``(L,)``."""
    return ((keys >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def negative_exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """-E, with E standard exponential for each key and token: the noise of a choice.

    Where a token's weight is w, the token of the greatest w / E is a draw from the weights, and
    log w - log E is its score with Gumbel noise (Maddison et al., arXiv 1411.0030). A hash of two
    multiplications counts the tokens: 31 bits, the same on every device; its logarithm is rounded
    as the device does.

    Args:
        keys: int64 ``(L,)``, of :func:`noise_keys`.
        tokens: int32 ``(V,)``.

    Returns:
        float32 ``(L, V)``, from -17 to below 0.
    """
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    bits = tokens ^ low
    # In place: each pass is one over memory that stays in the cache.
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _ROUND_1
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits ^= high
    bits *= _ROUND_2
    bits ^= bits >> 16
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # Both ends are kept off: E is over 0 and finite.
    return uniform.mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=2.0**-24 - 1).log1p_()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def filter_probs(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p of the rest, then min-p drop; the rest is not renormalised.

    ``probs (L, V)``; ``top_k`` int64 ``(L,)`` at least 1; ``top_p``, ``min_p`` float ``(L,)``.
    Of equally probable tokens the lower id ranks first.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    keep = rank < top_k[:, None]
    kept = ranked * keep
    before = kept.cumsum(-1) - kept
    keep &= before < top_p[:, None] * kept.sum(-1, keepdim=True)
    keep &= ranked >= min_p[:, None] * ranked[:, :1]
    keep[:, 0] = True
    return probs * torch.zeros_like(keep).scatter_(1, order, keep)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """A token drawn from each row of ``weights (L, V)``, which need not sum to 1 and are lost.

    Never one of weight 0 where another one has more. ``keys`` int64 ``(L,)`` → int64 ``(L,)``.
    """
    tokens = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return weights.div_(negative_exponentials(keys, tokens)).argmin(-1)


@operation
def choose(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The target's choice of every row.

    Args:
        logits: ``(L, V)``, masked and penalised; a row of -inf alone is empty.
        temperature: ``(L,)``, 0 is greedy, of equal tokens the lowest id; None: all rows are.
        keys: int64 ``(L,)``, of :func:`noise_keys`, read where temperature is over 0.
        filters: ``top_k``, ``top_p``, ``min_p`` as in :func:`filter_probs`; None: no row has any.

    Returns:
        int64 ``(L,)``; -1 for empty rows, and -2 for rows that hold NaN.
    """
    best, greedy = logits.max(-1)
    token = greedy
    if temperature is not None and keys is not None:
        drawn = []
        for part in _cached_blocks(logits):
            weights = _weights(logits[part], best[part], temperature[part])
            if filters is not None:
                weights = filter_probs(weights, *(each[part] for each in filters))
            drawn.append(draw(weights, keys[part]))
        token = torch.where(temperature > 0, torch.cat(drawn), greedy)
    token = torch.where(best == -torch.inf, -1, token)
    return torch.where(best.isnan(), -2, token)


def _weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the best token's: float32 ``(L, V)``, 1 where greedy rows are."""
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    return (logits.float() - best[:, None]).div_(heat).exp_()


def _cached_blocks(logits: Tensor) -> Iterator[slice]:
    """So many rows at a time as stay in a core's cache on the CPU; all of them on a GPU."""
    rows, vocab = logits.shape
    block = rows if logits.is_cuda else max(1, CACHED_LOGITS // vocab)
    for start in range(0, max(rows, 1), max(block, 1)):
        yield slice(start, start + block)


def sampled_probs(
    logits: Tensor, temperature: Tensor, filters: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """The distributions from which :func:`choose` draws: float32 ``(L, V)``, rows of sum 1.

    A greedy row's is that at temperature 1; a row that is empty or holds NaN is all NaN.
    """
    weights = _weights(logits, logits.amax(-1), temperature)
    if filters is not None:
        weights = filter_probs(weights, *filters)
    return weights / weights.sum(-1, keepdim=True)


@operation
def masked_choose(
    logits: Tensor,
    rows: Tensor | None = None,
    places: Tensor | None = None,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """:func:`apply_bitmask`, then :func:`choose`: a step's one choice.

    Args:
        logits: ``(L, V)``, finite or NaN. They may be overwritten: here by the masked ones.
        rows, places: As in :func:`apply_bitmask`; None: nothing is masked.
        temperature, keys, filters: As in :func:`choose`.

    Returns:
        int64 ``(L,)`` as :func:`choose` does.
    """
    if rows is not None:
        apply_bitmask(logits, rows, places)
    return choose(logits, temperature, keys, filters)


class Noise(NamedTuple):
    """Noise of a draft's rows: ``temperature`` float32 ``(T,)``, 0 for none; ``keys`` int64
    ``(T,)``, those of the choice that the target makes there."""

    temperature: Tensor
    keys: Tensor


@operation
def top_candidates(
    logits: Tensor, count: int, offsets: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """A draft step's ``count`` best next tokens of every row, descending.

    With noise a row's logits are divided by its temperature, and each token has the Gumbel noise
    that it has in the target's choice: the best one is a draw from the draft distribution that is
    the target's own choice as often as the two distributions are alike.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        offsets: int64 ``(V,)``: target id = draft id + ``offsets[draft id]`` (EAGLE-3's ``d2t``);
            None: the vocabularies are one.
        noise: None: no row has any.

    Returns:
        Log-probabilities float32 ``(T, count)``, which with noise are shares of what the noise has
        left of the odds, and target ids int64 ``(T, count)``. Which of equally probable tokens come
        first is open.
    """
    if noise is None:
        best, ids = logits.float().log_softmax(-1).topk(count)
    else:
        best, ids = _noisy_candidates(logits, count, offsets, noise)
    return best, ids if offsets is None else ids + offsets[ids]


def log_probs_among(
    logits: Tensor, own: Tensor, ids: Tensor, bias: Tensor, noise: Noise | None = None
) -> Tensor:
    """The log-probabilities that :func:`top_candidates` has where a row's next token is one of few.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        own: int64 ``(T, K)``: the tokens' draft ids; one that is out of range counts as the last.
        ids: int64 ``(T, K)``: their target ids, distinct where they count.
        bias: float32 ``(T, K)``: 0, or -inf where there is no token.
        noise: As there.

    Returns:
        float32 ``(T, K)``, as told there; all NaN where there is no token.
    """
    known = logits.gather(1, own.clamp(max=logits.shape[1] - 1)).float() + bias
    if noise is not None:
        warm = noise.temperature[:, None] > 0
        exponential = negative_exponentials(noise.keys, ids.to(torch.int32)).neg_()
        weights = _weights(known, known.amax(-1), noise.temperature)
        known = (weights / torch.where(warm, exponential, 1.0)).log()
    return known.log_softmax(-1)


def _noisy_candidates(
    logits: Tensor, count: int, offsets: Tensor | None, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Scores and draft ids of :func:`top_candidates`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    tokens = (tokens if offsets is None else tokens + offsets).to(torch.int32)
    logits = logits.float()
    warm = noise.temperature[:, None] > 0
    exponential = negative_exponentials(noise.keys, tokens).neg_()
    weights = _weights(logits, logits.amax(-1), noise.temperature)
    weights = weights / torch.where(warm, exponential, 1.0)
    best, ids = weights.topk(count)
    return (best / weights.sum(-1, keepdim=True)).log(), ids
