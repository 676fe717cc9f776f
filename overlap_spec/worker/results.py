"""A step's results on the host: what each request got, and how its tokens came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_spec.errors import NumericFault
from overlap_spec.types import (
    RUN_TOKENS,
    Int64s,
    Request,
    RowResult,
    TokenLogprobs,
    TokenTrie,
    WeighedChoices,
)
from overlap_spec.worker import choices
from overlap_spec.worker.extras.base import Row
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.passes import DEAD_SCORE, SCORE_UNIT
from overlap_spec.worker.sampler import token_logprobs
from overlap_spec.worker.tables import RowTables

NAN_CHOICE = -2
NO_SCORE = DEAD_SCORE / SCORE_UNIT / 2


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
        trees = len(plan.decode_rows)
        rows = self._tree_results(step) if trees else []
        chosen = step.results[-1].tolist() if plan.final_chunks else ()
        if step.scores is not None:
            choices.read(plan, step.scores.numpy())
        for index, (token, *run) in enumerate(chosen):
            self._runs[plan.final_chunks[index].row] = _run(run)
            row = self._row_result(step, trees + index, [token], 0, 0, False, (), 0, 0)
            weighed = plan.final_chunks[index].choices
            if weighed is not None and row.error is None:
                row = self._weighed(step, plan.final_chunks[index].row, weighed, row)
            rows.append(row)
        return tuple(rows)

    def _weighed(
        self, step: InFlightStep, number: int, weighed: WeighedChoices, row: RowResult
    ) -> RowResult:
        """The result of row ``number``, whose choices were weighed; where these choose, it has the
        whole output."""
        logprobs = weighed.logprobs
        if not np.isfinite(logprobs).all():
            weighed.forget()
            return row._replace(
                error=NumericFault("the model's logits are not numbers: numeric fault")
            )
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

    def _tree_results(self, step: InFlightStep) -> list[RowResult]:
        """The trees' results: a row costs one turn of this, and no call that not all need."""
        plan, tier, limits = step.plan, step.plan.tier, step.limits
        numbers = step.results[0][: len(plan.decode_rows)].numpy()
        scores = numbers[:, 3 + tier.steps : 1 - RUN_TOKENS] / SCORE_UNIT
        each = zip(
            plan.decode_rows, numbers.tolist(), *_confidences(scores, numbers[:, 0]), strict=True
        )
        plain, runs, places = not step.features.tells, self._runs, self._places
        found = []
        for index, (row, told, sure, refused) in enumerate(each):
            length, drafted = told[0], told[1]
            tokens, grafts, grafted = told[2 : 3 + length], 0, 0
            limited = bool(limits) and limits[index] < tier.steps
            confidences = tuple(sure[:length] if refused is None else [*sure[:length], refused])
            place = places[row]
            if tier.base is not None and place is not None and place.left < tier.nodes:
                grafts, grafted = drafted, length
            elif (run := runs[row]) and tier.parents is None:
                # Grafts come first: their scores are best. A tree of a fixed shape has none.
                grafts = min(len(run), drafted, tier.steps)
                most = min(grafts, length)
                while grafted < most and run[grafted] == tokens[grafted]:
                    grafted += 1
            runs[row] = _run(told[1 - RUN_TOKENS :])
            if plain and place is None and tokens[-1] >= 0:
                fields = tuple(tokens), drafted, length, (), None, limited, confidences
                found.append(RowResult(*fields, grafts, grafted))
                continue
            found.append(
                self._row_result(
                    step, index, tokens, length, drafted, limited, confidences, grafts, grafted
                )
            )
        return found

    def _row_result(
        self,
        step: InFlightStep,
        index: int,
        tokens: list[int],
        accepted: int,
        drafted: int,
        limited: bool,
        confidences: tuple[float, ...],
        grafts: int,
        grafted: int,
    ) -> RowResult:
        _, row, constrained = step.plan.verified[index]
        error = None
        if tokens[-1] == NAN_CHOICE:
            error = NumericFault("the model's logits are not numbers: numeric fault")
        if tokens[-1] < 0:
            tokens.pop()
        place = self._places[row]
        if place is not None:
            self._places[row] = place.after(tokens)
        if not step.features.tells:
            result = tuple(tokens), drafted, accepted, (), error, limited, confidences
            return RowResult(*result, grafts, grafted)
        asked = self._tables.features_of(row)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if asked.top_logprobs is not None and step.logprobs:
            trees = len(step.plan.decode_rows)
            parts = step.logprobs[0 if index < trees else -1]
            at = index if index < trees else index - trees
            own, best, ids = (part[at, : len(tokens)] for part in parts)
            logprobs = token_logprobs(own, best, ids, asked.top_logprobs)
        told = {}
        if asked.extras:
            links = step.links[:, index] if index < len(step.plan.decode_rows) else None
            masks = step.mask_rows(index) if constrained else None
            reached = Row(step.plan.index, tokens, accepted, grafted, limited, links, masks)
            told = self._extras(row, reached)
        return RowResult(
            tuple(tokens),
            drafted,
            accepted,
            logprobs,
            error,
            limited,
            confidences,
            grafts,
            grafted,
            extras=told,
        )


def _run(told: list[int]) -> list[int]:
    """A run without the -1 behind its end."""
    return told[: told.index(-1)] if told[-1] == -1 else told


def _confidences(
    scores: NDArray[np.float64], lengths: Int64s
) -> tuple[list[list[float]], list[float | None]]:
    """How sure the drafter was, of each row of a step.

    Args:
        scores: float64 ``(rows, steps + 2)``: along the path, the root's 0 first; then the best of
            what was refused after it.
        lengths: int64 ``(rows,)``: drafts that were accepted.

    Returns:
        Of each row ``steps`` probabilities, of which the accepted drafts' come first; and the
        probability of what was refused, None where nothing was.
    """
    last = scores[np.arange(len(scores)), lengths]
    with np.errstate(over="ignore"):
        # Behind the accepted ones there is no path.
        accepted = np.exp(np.diff(scores[:, :-1]))
        refused = np.exp(scores[:, -1] - last)
    there = (scores[:, -1] > NO_SCORE).tolist()
    best = zip(there, refused.tolist(), strict=True)
    return accepted.tolist(), [value if is_there else None for is_there, value in best]
