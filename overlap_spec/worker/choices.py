"""Weighing the texts of choices: passes of the target over their tries, behind the prompt.

A text's weight is the probability of its tokens and of the output's end after them, as the model
has it: without mask, bias, penalties or temperature. It is what scoring the text by itself would
give, though all texts of a trie share one pass, and their beginnings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_spec.kernels import KeySpan, filter_probs, noise_keys
from overlap_spec.kernels.sampling import WHOLE, draw
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import Chunk, Int64s, StepPlan, TokenTrie, WeighedChoices
from overlap_spec.tiers import Floats
from overlap_spec.types import Request
from overlap_spec.worker.batch import uploaded
from overlap_spec.worker.kv_pool import KVPool, PagedAttend
from overlap_spec.worker.tables import RowTables

# Rows whose logits are held at once.
ROWS = 64


class Member(NamedTuple):
    """One trie of a step's pass: behind chunk ``number`` of those that have one."""

    number: int
    chunk: Chunk
    choices: WeighedChoices
    trie: TokenTrie


def members_of(plan: StepPlan) -> list[Member]:
    """What a step's pass weighs."""
    weighing = [chunk for chunk in plan.chunks if chunk.trie is not None]
    return [
        Member(number, chunk, chunk.choices, chunk.trie)
        for number, chunk in enumerate(weighing)
        if chunk.choices is not None and chunk.trie is not None
    ]


class ChoiceScorer:
    """Runs the passes; what they write are slots behind the prompt, which later tokens overwrite.

    Args:
        slots: Physical slots of tokens, whose rows ``(T,)`` and positions ``(T,)`` are given.
    """

    def __init__(
        self,
        target: Decoder,
        pool: KVPool,
        tables: RowTables,
        slots: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._target, self._pool, self._tables, self._slots = target, pool, tables, slots

    def __call__(self, plan: StepPlan, hidden: Tensor) -> Tensor | None:
        """The numbers that :func:`read` reads, float32 ``(n,)``; None where nothing is weighed.

        Args:
            hidden: ``(T, H)``, of the chunks' tokens.
        """
        members = members_of(plan)
        if not members:
            return None
        ends = np.cumsum([len(chunk.tokens) for chunk in plan.chunks], dtype=np.int64) - 1
        places = [end for end, c in zip(ends, plan.chunks, strict=True) if c.trie is not None]
        (rows,) = self._upload(np.array(places, np.int64))
        return self._weigh(members, self._target.logits(hidden[rows]))

    def _weigh(self, members: Sequence[Member], logits: Tensor) -> Tensor:
        """One pass: of each trie's nodes their log-probability after their parents, then of each
        of its texts those of the stop tokens after it."""
        layout = _Layout(members)
        places, positions, owners, lengths = self._upload(
            layout.places, layout.positions, layout.owners, layout.prefixes
        )
        tokens, bounds, rows = self._upload(layout.tokens, layout.bounds, layout.rows)
        pages, size = self._tables.pages, self._pool.page_size
        span = KeySpan(
            pages[rows, : -(-layout.most_keys // size)],
            lengths,
            positions,
            uploaded(torch.from_numpy(layout.mask), self._tables.device),
            offsets=bounds,
            longest=layout.mask.shape[1],
        )
        attend = PagedAttend(self._pool, self._slots(owners, places), span)
        hidden, _ = self._target(tokens, positions, attend, ())
        parts = [_gathered(logits, *self._upload(*layout.asked_of_roots))]
        for start in range(0, len(layout.tokens), ROWS):
            some = self._target.logits(hidden[start : start + ROWS])
            parts.append(_gathered(some, *self._upload(*layout.asked(start, start + ROWS))))
        (order,) = self._upload(layout.order)
        every = torch.cat(parts)
        return torch.empty_like(every).index_copy_(0, order, every)

    def _upload(self, *arrays: Int64s) -> list[Tensor]:
        """int64 arrays on the device, in one copy."""
        whole = uploaded(torch.from_numpy(np.concatenate(arrays)), self._tables.device)
        return list(whole.split([len(array) for array in arrays]))


class _Layout:
    """The numbers of a pass over several tries, which lie end to end."""

    def __init__(self, members: Sequence[Member]) -> None:
        tries = [member.trie for member in members]
        sizes = np.array([len(trie.tokens) for trie in tries], np.int64)
        first = np.cumsum(sizes) - sizes
        chunks = [member.chunk for member in members]
        self.rows = np.array([chunk.row for chunk in chunks], np.int64)
        self.prefixes = np.array([chunk.start + len(chunk.tokens) for chunk in chunks], np.int64)
        self.tokens = np.concatenate([trie.tokens for trie in tries])
        self.owners = np.repeat(self.rows, sizes)
        before = np.repeat(self.prefixes, sizes)
        self.places = before + np.arange(sizes.sum()) - np.repeat(first, sizes)
        self.positions = before + np.concatenate([trie.depths for trie in tries]) - 1
        self.bounds = np.append(first, sizes.sum())
        self.most_keys = int((self.prefixes + sizes.max()).max())
        self.mask = np.zeros((len(self.tokens), sizes.max()), bool)
        at, wanted = [], []
        for member, start in zip(members, first.tolist(), strict=True):
            trie = member.trie
            _mark_ancestors(self.mask[start : start + len(trie.tokens)], trie.parents)
            # Below 0: after a chunk.
            at += [np.where(trie.parents < 0, -1 - member.number, start + trie.parents)]
            wanted += [trie.tokens]
            stops = np.array(member.choices.stop_ids, np.int64)
            at += [np.repeat(start + trie.ends, len(stops))]
            wanted += [np.tile(stops, len(trie.ends))]
        every = np.concatenate(at)
        # Those of one row together; where each of them goes.
        self.order = np.argsort(np.where(every < 0, -1, every), kind="stable").astype(np.int64)
        self._at, self._wanted = every[self.order], np.concatenate(wanted)[self.order]
        self._roots = int((every < 0).sum())

    @property
    def asked_of_roots(self) -> tuple[Int64s, Int64s]:
        """Chunks, and tokens after them."""
        return -1 - self._at[: self._roots], self._wanted[: self._roots]

    def asked(self, start: int, end: int) -> tuple[Int64s, Int64s]:
        """Nodes from ``start`` to ``end`` - 1, counted from ``start``, and tokens after them."""
        nodes = self._at[self._roots :]
        low, high = self._roots + np.searchsorted(nodes, (start, end))
        return self._at[low:high] - start, self._wanted[low:high]


def _mark_ancestors(mask: np.ndarray[tuple[int, int], np.dtype[np.bool_]], parents: Int64s) -> None:
    """Let every node see itself and what is above it."""
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True


def _gathered(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of ``tokens (n,)`` in ``rows (n,)`` of ``logits``: float32 ``(n,)``."""
    exact = logits.float()
    return exact[rows, tokens] - exact.logsumexp(-1)[rows]


def read(plan: StepPlan, scores: Floats) -> None:
    """Enter what :class:`ChoiceScorer` made of a step's tries into their choices."""
    at = 0
    for _, _, choices, trie in members_of(plan):
        count, stops = len(trie.tokens), choices.stop_ids
        own = scores[at : at + count].astype(np.float64)
        ends = scores[at + count : at + count + len(trie.ends) * len(stops)]
        at += count + len(ends)
        along = own
        for node, parent in enumerate(trie.parents.tolist()):
            if parent >= 0:
                along[node] += along[parent]
        last = ends.reshape(-1, len(stops)).astype(np.float64)
        choices.logprobs[trie.texts] = along[trie.ends] + np.logaddexp.reduce(last, axis=1)
        places = zip(trie.texts.tolist(), trie.ends.tolist(), strict=True)
        for n, (text, end) in enumerate(places):
            path = [int(trie.tokens[node]) for node in trie.path(end)]
            choices.tokens[text] = (*path, stops[int(last[n].argmax())])
        choices.known += 1


def pick(logprobs: np.ndarray[tuple[int], np.dtype[np.float64]], request: Request) -> int:
    """The text that a request gets: the most probable one at temperature 0, else a draw.

    Temperature, top-k, top-p and min-p act on the texts as they would on tokens: the chance of a
    text is its probability to the power of 1 / temperature, over the sum of these.
    """
    asked = request.sampling
    heat = 1.0 if asked.temperature is None else asked.temperature
    if heat == 0:
        return int(logprobs.argmax())
    probs = (torch.from_numpy(logprobs) / heat).softmax(0).float()[None]
    top_k = len(logprobs) if asked.top_k in (None, -1) else asked.top_k
    top_p = 2.0 if asked.top_p is None or asked.top_p >= 1 else asked.top_p
    probs = filter_probs(
        probs, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([asked.min_p])
    )
    seed, place = torch.tensor([request.seed]), torch.tensor([len(request.prompt_ids)])
    return int(draw(probs, noise_keys(seed, place, WHOLE)))
