"""From logits to the target's choice: mask, penalties, filters, and one coin a position."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation

_GOLDEN, _MIX_1, _MIX_2 = (
    -7046029254386353131,  # 0x9E3779B97F4A7C15
    -4658895280553007687,  # 0xBF58476D1CE4E5B9
    -7723592293110705685,  # 0x94D049BB133111EB
)

# Logits that a block of rows may have, so that it stays in a core's cache.
CACHED_LOGITS = 2**17


@operation
def apply_bitmask(logits: Tensor, rows: Tensor, index: Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: ``(L, V)``, finite or NaN.
        rows: int32 ``(L, ceil(V / 32))``, contiguous; bit ``t % 32`` of word ``t // 32`` allows
            token t.
        index: int64, the rows to which the mask applies; None means all.
    """
    if index is not None:
        rows = rows[index]
    # Eight tokens a byte, looked up and added: a fill by a bool mask is eight times as slow on
    # the CPU, where it is not vectorised. So many rows at a time as stay in its cache.
    table, vocab = _byte_penalties(logits.dtype, rows.device), logits.shape[1]
    block = max(1, CACHED_LOGITS // vocab)
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        penalties = F.embedding(rows[part].view(torch.uint8).int(), table).flatten(1)[:, :vocab]
        if index is None:
            logits[part].add_(penalties)
        else:
            logits.index_add_(0, index[part], penalties)


@cache
def _byte_penalties(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(256, 8)``: of each byte of a mask row, 0 for its set bits and -inf for the others."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits > 0, 0.0, -torch.inf).to(dtype)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Repetition, then presence and frequency penalties of every row.

    ``logits (L, V)``; ``output_counts (L, V)``: occurrences in the output and on the row's own
    draft path; ``seen (L, V)`` bool: these or in the prompt; the three factors ``(L,)``.
    """
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - presence[:, None] * (output_counts > 0)
    return logits - frequency[:, None] * output_counts


@operation
def coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) that depend on (seed, position) alone.

    SplitMix64's finaliser (Steele et al., OOPSLA 2014) over int64 ``(L,)`` → float32 ``(L,)``.
    """
    z = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return ((z >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


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


def inverse_cdf(probs: Tensor, coin: Tensor) -> Tensor:
    """The token at which the running sum of ``probs (L, V)`` passes ``coin (L,)`` of its total.

    Never a token of zero probability, however the sum rounds. → int64 ``(L,)``.
    """
    running = probs.cumsum(-1)
    passed = (running > coin[:, None] * running[:, -1:]) & (probs > 0)
    found, token = passed.to(torch.uint8).max(-1)
    return torch.where(found > 0, token, probs.argmax(-1))


@operation
def choose(
    logits: Tensor,
    temperature: Tensor | None = None,
    coin: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The target's choice of every row.

    Args:
        logits: ``(L, V)``, masked and penalised; a row of -inf alone is empty.
        temperature: ``(L,)``, 0 is greedy, of equal tokens the lowest id; None: all rows are.
        coin: float32 ``(L,)`` in [0, 1), read where temperature is over 0.
        filters: ``top_k``, ``top_p``, ``min_p`` as in :func:`filter_probs`; None: no row has any.

    Returns:
        int64 ``(L,)``; -1 for empty rows, and -2 for rows that hold NaN.
    """
    best, greedy = logits.max(-1)
    token = greedy
    if temperature is not None and coin is not None:
        scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
        probs = ((logits.float() - best[:, None]) / scale).softmax(-1)
        if filters is not None:
            probs = filter_probs(probs, *filters)
        token = torch.where(temperature > 0, inverse_cdf(probs, coin), greedy)
    token = torch.where(best == -torch.inf, -1, token)
    return torch.where(best.isnan(), -2, token)


@operation
def masked_choose(
    logits: Tensor,
    rows: Tensor | None = None,
    flags: Tensor | None = None,
    temperature: Tensor | None = None,
    coin: Tensor | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """:func:`apply_bitmask`, then :func:`choose`: a step's one choice.

    Args:
        logits: ``(L, V)``, finite or NaN. They may be overwritten: here by the masked ones.
        rows: Mask rows int32 ``(L, ceil(V / 32))``, contiguous; None: nothing is masked.
        flags: bool ``(L,)``: the rows to which the mask applies; None means all.
        temperature, coin, filters: As in :func:`choose`.

    Returns:
        int64 ``(L,)`` as :func:`choose` does.
    """
    if rows is not None:
        apply_bitmask(logits, rows, None if flags is None else flags.nonzero()[:, 0])
    return choose(logits, temperature, coin, filters)


@operation
def top_candidates(
    logits: Tensor, count: int, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A draft step's ``count`` best next tokens of every row, descending.

    Args:
        logits: ``(T, V)`` over the draft vocabulary.
        offsets: int64 ``(V,)``: target id = draft id + ``offsets[draft id]`` (EAGLE-3's ``d2t``);
            None: the vocabularies are one.

    Returns:
        Log-probabilities float32 ``(T, count)``, and target ids int64 ``(T, count)``. Which of
        equally probable tokens come first is open.
    """
    best, ids = logits.float().log_softmax(-1).topk(count)
    return best, ids if offsets is None else ids + offsets[ids]
