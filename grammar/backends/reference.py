"""The oracle: the Earley recogniser over bytes of `room.chart`, in plain Python.

A place is named by the positions just read, and equal ones are one object. So the places of a
regular language are the states of a finite automaton, built on demand; each keeps its mask row.
"""

from __future__ import annotations

import numpy as np

from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher, Row
from overlap_spec.grammar.ir.syntax import bounded_depth
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching.states import Automaton, StateMatcher
from overlap_spec.grammar.room.chart import Chart, Place
from overlap_spec.grammar.room.rules import RoomRules, room_rules
from overlap_spec.grammar.room.trie import token_trie
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

MOST_NODES = 200_000


class ReferenceBackend(Backend):
    """Supports every grammar that is lowered, of up to :data:`MOST_NODES` nodes in its rules."""

    name = "reference"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @bounded_depth()
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        rules = room_rules(lower(grammar).plain, most_nodes=MOST_NODES)
        return _Compiled(rules, self.vocabulary)


class _Compiled(CompiledGrammar, Automaton[Place]):
    backend = "reference"

    def __init__(self, rules: RoomRules, vocabulary: Vocabulary) -> None:
        self.vocabulary, self._chart = vocabulary, Chart(rules, token_trie(vocabulary))
        self.start = self._chart.start
        self._every = vocabulary.text_row & ~vocabulary.stop_row
        self._rows: dict[int, Row] = {}

    @property
    def memory_bytes(self) -> int:
        return self._chart.nbytes + len(self._rows) * self._every.nbytes

    def matcher(self) -> Matcher:
        return StateMatcher(self)

    def after(self, state: Place, token: int) -> Place | None:
        text = self.vocabulary.text[token]
        return self._chart.after(state, text) if text else None

    def is_final(self, state: Place) -> bool:
        return state.rest == 0

    def row(self, state: Place) -> Row:
        if state.number not in self._rows:
            step = self._chart.step(state, self._every)
            self._rows[state.number] = step.row(np.ones(len(step.places), np.bool_), self._every)
        return self._rows[state.number]


BACKEND = ReferenceBackend
