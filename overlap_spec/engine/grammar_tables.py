"""Brings grammars' tables of states to the device, for the requests that run."""

from __future__ import annotations

from overlap_spec.grammar.matching.pool import MatcherPool
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.scheduler.sequence import Sequence
from overlap_spec.steps import GrammarTable
from overlap_spec.worker import jobs
from overlap_spec.worker.grammar_states import StateRooms, token_steps
from overlap_spec.worker.worker import Worker


class GrammarTables:
    """Which requests read which table.

    Args:
        pool: Follows the requests' texts in their tables.
        vocabulary: What the device is told of tokens.
    """

    def __init__(self, worker: Worker, pool: MatcherPool, vocabulary: Vocabulary) -> None:
        self._worker, self._pool, self._rooms = worker, pool, StateRooms()
        worker.do(jobs.write_texts, token_steps(vocabulary.text, vocabulary.stop_ids))

    def enter(self, sequence: Sequence) -> None:
        """Take a request's table in before its first token; where there is no room it has none."""
        table, request_id = sequence.states, sequence.request.id
        if table is None or sequence.output_ids:
            return
        part = self._rooms.enter(request_id, table)
        if part is not None:
            base, new = part
            if new:
                self._worker.do(jobs.write_table, base, GrammarTable(*table))
            self._pool.guesses(request_id).standing.enter(table, base)

    def leave(self, request_id: int) -> None:
        """A request has ended; steps under way may still read its table."""
        self._rooms.leave(request_id)
