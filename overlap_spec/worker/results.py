"""A step's results on the host: what each request got, and how its tokens came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from overlap_spec.errors import NumericFault
from overlap_spec.steps import RowResult
from overlap_spec.tiers import OFF, Tier
from overlap_spec.worker.extras import base as extras
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.packed_rows import read_rows
from overlap_spec.worker.sampler import token_logprobs
from overlap_spec.worker.tables import RowTables

NAN_CHOICE = -2


class ResultReader:
    """Reads steps' results, and keeps of each row what the next step's are read by."""

    def __init__(self, tables: RowTables) -> None:
        self._tables = tables
        # Behind each row's root, as far as results have been read: the run, and nodes of its trie.
        self._told: dict[int, tuple[list[int], int]] = {}

    def run_behind(self, row: int) -> list[int]:
        """The tokens that the grammar forces behind the row's root."""
        return self._told[row][0]

    def read(self, step: InFlightStep) -> tuple[tuple[RowResult, ...], dict[int, dict[str, Any]]]:
        """What each of ``plan.verified`` gave, trees first, and what the chunks told the optional
        parts, by request. Steps are read in their order, once they are settled."""
        plan, trees, rows = step.plan, len(step.plan.decode_rows), list[RowResult]()
        if trees:
            rows += self._rows(step, step.results[0][:trees], 0, plan.tier)
        if plan.final_chunks:
            # Of each a tree of its root alone.
            rows += self._rows(step, step.results[-1], trees, OFF)
        return tuple(rows), extras.read(plan, step.extras)

    def _rows(
        self, step: InFlightStep, packed: Tensor, first: int, tier: Tier
    ) -> Iterator[RowResult]:
        """The results of ``plan.verified`` from ``first`` on, which are trees of ``tier``."""
        members, limits = step.plan.verified, step.limits
        plain, known = not step.tensors.features.tells, self._told
        for index, told in enumerate(read_rows(packed, tier.steps), first):
            drafted, accepted, tokens, behind, confidences = told
            row, error, grafts, grafted = members[index][1], None, 0, 0
            run, left = known[row] if drafted else ((), -1)
            if tier.base is not None and 0 <= left < tier.nodes:
                grafts, grafted = drafted, accepted
            elif run:
                # Grafts come first: their scores are best.
                grafts = min(len(run), drafted, tier.steps)
                most = min(grafts, accepted)
                while grafted < most and run[grafted] == tokens[grafted]:
                    grafted += 1
            known[row] = behind
            if tokens[-1] < 0 and tokens.pop() == NAN_CHOICE:
                error = NumericFault()
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
            at, parts = index, step.logprobs[0]
            if index >= trees:
                at, parts = index - trees, step.logprobs[-1]
            own, best, ids = (part[at, : len(row.tokens)] for part in parts)
            row = row._replace(logprobs=token_logprobs(own, best, ids, asked.top_logprobs))
        if not asked.extras:
            return row
        links = step.links[:, index] if index < trees else None
        masks = step.mask_rows(index) if constrained else None
        reached = row.tokens, row.accepted, row.grafted, row.limited
        told = extras.Row(step.plan.index, *reached, links, masks)
        return row._replace(extras=extras.told_of(asked.extras, told))
