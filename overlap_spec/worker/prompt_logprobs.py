"""How probable the tokens of prompts are: the target's rows of a chunk, each asked for the token
behind it.

They are the model's own log-probabilities: without mask, bias, penalties or temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlap_spec.models.decoder import Decoder
from overlap_spec.types import PromptLogprobs, StepPlan
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.sampler import BLOCK_ENTRIES


def score_prompts(target: Decoder, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
    """What :func:`read` reads; empty where no chunk is asked.

    Args:
        hidden: ``(T, hidden_size)``: the target's last layer over the chunks' tokens.

    Returns:
        Of each row asked, its token's log-probability float32 ``(P,)`` and rank int64 ``(P,)``; the
        best log-probabilities float32 ``(P, n)``, descending, and their ids int64 ``(P, n)``, for
        the largest n that a chunk asks for.
    """
    chunks = batch.chunks
    assert chunks is not None
    if not len(chunks.scored):
        return ()
    asked = [chunk.scored.top for chunk in batch.plan.chunks if chunk.scored is not None]
    top = min(max(asked), target.config.vocab_size)
    rows = max(1, BLOCK_ENTRIES // target.config.vocab_size)
    blocks = [
        _score(target.logits(hidden[index]), tokens, top)
        for index, tokens in zip(
            chunks.scored.split(rows), chunks.scored_tokens.split(rows), strict=True
        )
    ]
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def _score(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`score_prompts` of one block: logits ``(B, V)``, tokens ``(B,)``."""
    found = logits.float().log_softmax(-1)
    own = found.gather(1, tokens[:, None])
    rank = (found > own).sum(1) + 1
    return own[:, 0], rank, *found.topk(top)


def read(plan: StepPlan, scores: Sequence[Tensor]) -> dict[int, tuple[PromptLogprobs, ...]]:
    """What :func:`score_prompts` made of a step's chunks, on the host, by request id."""
    if not scores:
        return {}
    told: dict[int, tuple[PromptLogprobs, ...]] = {}
    start, ids = 0, plan.request_ids[len(plan.decode_rows) :]
    for request_id, chunk in zip(ids, plan.chunks, strict=True):
        if chunk.scored is None:
            continue
        end = start + len(chunk.scored.tokens)
        own, rank, best, best_ids = (part[start:end] for part in scores)
        best, best_ids = best[:, : chunk.scored.top], best_ids[:, : chunk.scored.top]
        rows = zip(own.tolist(), rank.tolist(), best_ids.tolist(), best.tolist(), strict=True)
        told[request_id] = tuple(
            PromptLogprobs(value, tuple(zip(some, values, strict=True)), place)
            for value, place, some, values in rows
        )
        start = end
    return told
