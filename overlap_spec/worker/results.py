"""A step's results on the host: what each request got, and how its tokens came."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from overlap_spec.errors import NumericFault
from overlap_spec.steps import RowResult, TokenTrie, WeighedChoices
from overlap_spec.tiers import Tier
from overlap_spec.types import Request
from overlap_spec.worker import choices
from overlap_spec.worker.extras.base import Row
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.packed_rows import read_rows
from overlap_spec.worker.sampler import token_logprobs
from overlap_spec.worker.tables import RowTables

NAN_CHOICE = -2
NOT_NUMBERS = "the model's logits are not numbers: numeric fault"
# Of a final chunk, which is a tree of its root alone.
NO_DRAFT = Tier(0, 1, 1)


class TriePlace(NamedTuple):
    """Where a row's output stands in its trie, as far as results have been read; None: outside."""

    trie: TokenTrie
    node: int | None

    @property
    def left(self) -> float:
        """Nodes below the place."""
        if self.node is None:
            return math.inf
        return len(self.trie.tokens) if self.node < 0 else int(self.trie.sizes[self.node])

    def after(self, tokens: Sequence[int]) -> TriePlace:
        """The place after more tokens."""
        return TriePlace(self.trie, self.trie.follow(self.node, tokens))


class ResultReader:
    """Reads steps' results, and keeps of each row what the next step's are read by."""

    def __init__(self, tables: RowTables) -> None:
        self._tables = tables
        # Behind each row's root, as far as results have been read.
        self._runs: dict[int, list[int]] = {}
        self._requests: dict[int, Request] = {}
        self._places: dict[int, TriePlace | None] = {}

    def assign(
        self, row: int, request: Request, output_ids: list[int], trie: TokenTrie | None
    ) -> None:
        """``row`` is a request's, whose output so far is ``output_ids``; ``trie`` as in
        :meth:`Worker.assign`."""
        self._places[row] = None if trie is None else TriePlace(trie, trie.follow(-1, output_ids))
        self._requests[row] = request

    def run_behind(self, row: int) -> list[int]:
        """The tokens that the grammar forces behind the row's root."""
        return self._runs[row]

    def read(self, step: InFlightStep) -> tuple[RowResult, ...]:
        """What each of ``plan.verified`` gave, trees first; once ``results_on_host`` has passed and
        the step is settled. Steps are read in their order."""
        plan = step.plan
        trees, rows = len(plan.decode_rows), list[RowResult]()
        if trees:
            rows += self._rows(step, step.results[0][:trees], 0, plan.tier)
        if plan.final_chunks:
            rows += self._rows(step, step.results[-1], trees, NO_DRAFT)
        if step.scores is not None:
            choices.read(plan, step.scores.numpy())
        for index, chunk in enumerate(plan.final_chunks, trees):
            if chunk.choices is not None and rows[index].error is None:
                rows[index] = self._weighed(step, chunk.row, chunk.choices, rows[index])
        return tuple(rows)

    def _weighed(
        self, step: InFlightStep, number: int, weighed: WeighedChoices, row: RowResult
    ) -> RowResult:
        """The result of row ``number``, whose choices were weighed; where these choose, it has the
        whole output."""
        logprobs = weighed.logprobs
        if not np.isfinite(logprobs).all():
            weighed.forget()
            return row._replace(error=NumericFault(NOT_NUMBERS))
        row = row._replace(choice_logprobs=tuple(logprobs.tolist()))
        if not weighed.faithful:
            return row
        tokens = weighed.tokens[choices.pick(logprobs, self._requests[number])]
        # The whole text was drafted, so to speak; no mask chose its tokens one by one.
        drafts = len(tokens) - 1
        told = Row(step.plan.index, tokens, drafts, drafts, False, None, None)
        return row._replace(tokens=tokens, extras=self._extras(number, told))

    def _extras(self, number: int, row: Row) -> dict[str, Any]:
        """What the optional parts that row ``number`` has asked for tell of its tokens."""
        return {part.name: part.read_row(row) for part in self._tables.features_of(number).extras}

    def _rows(
        self, step: InFlightStep, packed: Tensor, first: int, tier: Tier
    ) -> Iterator[RowResult]:
        """The results of ``plan.verified`` from ``first`` on, which are trees of ``tier``: a row
        costs one turn of this, and no call that not all need."""
        members, limits = step.plan.verified, step.limits
        plain, runs, places = not step.features.tells, self._runs, self._places
        for index, told in enumerate(read_rows(packed, tier.steps), first):
            drafted, accepted, tokens, behind, confidences = told
            row, error, grafts, grafted = members[index][1], None, 0, 0
            place = places[row]
            if tier.base is not None and place is not None and place.left < tier.nodes:
                grafts, grafted = drafted, accepted
            elif drafted and tier.parents is None and (run := runs[row]):
                # Grafts come first: their scores are best. A tree of a fixed shape has none.
                grafts = min(len(run), drafted, tier.steps)
                most = min(grafts, accepted)
                while grafted < most and run[grafted] == tokens[grafted]:
                    grafted += 1
            runs[row] = behind
            if tokens[-1] < 0 and tokens.pop() == NAN_CHOICE:
                error = NumericFault(NOT_NUMBERS)
            if place is not None:
                places[row] = place.after(tokens)
            limited = bool(limits) and limits[index] < tier.steps
            fields = tuple(tokens), drafted, accepted, (), error, limited, confidences
            found = RowResult(*fields, grafts, grafted)
            yield found if plain else self._telling(step, index, found)

    def _telling(self, step: InFlightStep, index: int, row: RowResult) -> RowResult:
        """A result with what its request asks for beyond the tokens."""
        trees = len(step.plan.decode_rows)
        _, number, constrained = step.plan.verified[index]
        asked = self._tables.features_of(number)
        if asked.top_logprobs is not None and step.logprobs:
            parts, at = (
                (step.logprobs[0], index) if index < trees else (step.logprobs[-1], index - trees)
            )
            own, best, ids = (part[at, : len(row.tokens)] for part in parts)
            row = row._replace(logprobs=token_logprobs(own, best, ids, asked.top_logprobs))
        if not asked.extras:
            return row
        links = step.links[:, index] if index < trees else None
        masks = step.mask_rows(index) if constrained else None
        reached = row.tokens, row.accepted, row.grafted, row.limited
        told = Row(step.plan.index, *reached, links, masks)
        return row._replace(extras=self._extras(number, told))
