"""A matcher for backends with states: it keeps the state after each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.vocabulary import Vocabulary

State = TypeVar("State")


class Automaton(ABC, Generic[State]):
    """States with transitions on tokens; safe to share between threads."""

    vocabulary: Vocabulary
    start: State

    @abstractmethod
    def after(self, state: State, token: int) -> State | None:
        """The state after a token that is no stop token; None if it is not legal."""

    @abstractmethod
    def is_final(self, state: State) -> bool:
        """Whether the grammar may end in a state."""

    @abstractmethod
    def row(self, state: State) -> Row:
        """The mask row of a state without stop tokens; callers must not write to it."""


class StateMatcher(Matcher, Generic[State]):
    """A path through an automaton; rollback truncates it.

    Args:
        path: The state after each token, the start first; None after a stop token.
    """

    def __init__(self, automaton: Automaton[State], path: list[State | None] | None = None) -> None:
        self.vocabulary = automaton.vocabulary
        self._automaton = automaton
        self._path: list[State | None] = [automaton.start] if path is None else path

    def accept(self, token_id: int) -> bool:
        here = self._path[-1]
        if here is None or not 0 <= token_id < self.vocabulary.size:
            return False
        is_stop = token_id in self.vocabulary.stop_ids
        after = None if is_stop else self._automaton.after(here, token_id)
        legal = self._automaton.is_final(here) if is_stop else after is not None
        if legal:
            self._path.append(after)
        return legal

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self.accepted_tokens:
            raise ValueError(f"cannot roll back {count} of {self.accepted_tokens} tokens")
        if count:
            del self._path[-count:]

    def fill(self, row: Row) -> None:
        walk.check_row(row, self.vocabulary.words)
        here = self._path[-1]
        if here is None:
            row.fill(0)
            return
        row[:] = self._automaton.row(here)
        if self._automaton.is_final(here):
            row |= self.vocabulary.stop_row

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.fill_tree(self, tokens, first_child, next_sibling, rows)

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        return walk.forced_bytes(self, path)

    @property
    def is_terminated(self) -> bool:
        return self._path[-1] is None

    @property
    def is_complete(self) -> bool:
        here = self._path[-1]
        return here is None or self._automaton.is_final(here)

    @property
    def accepted_tokens(self) -> int:
        return len(self._path) - 1

    def fork(self) -> Matcher:
        return StateMatcher(self._automaton, self._path.copy())
