"""A grammar's table of states by bytes, and where a request's text stands in it."""

from __future__ import annotations

import zlib

import numpy as np

from overlap_spec.types import FEW_TOKENS, STATE_WIDTH, GrammarTable

# States of every table: nothing is known; nothing can come; the grammar has ended. Then its own.
LOST, DEAD = 0, 1
FIRST = 3


class StateTable(GrammarTable):
    """A grammar's table; state :data:`FIRST` is its start."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """What :meth:`from_bytes` reads."""
        return zlib.compress(b"".join(part.tobytes() for part in self), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> StateTable:
        """The table that :meth:`to_bytes` wrote."""
        whole = np.frombuffer(zlib.decompress(data), np.uint8)
        count = len(whole) // (2 * 256 + 1 + 4 * (FEW_TOKENS + 1))
        moves, final, few = np.split(whole, [512 * count, 513 * count])
        return cls(
            moves.view(np.uint16).reshape(count, 256),
            final.view(np.bool_),
            few.copy().view(np.int32).reshape(count, FEW_TOKENS + 1),
        )


class TableStanding:
    """Where a request's text stands in its grammar's table.

    Attributes:
        table: None: there is none.
        state: Behind all text so far.
    """

    def __init__(self) -> None:
        self.table: StateTable | None = None
        self.state = LOST
        self._base, self._moves = 0, memoryview(b"")

    def enter(self, table: StateTable, base: int) -> None:
        """Start in a table whose states are numbered from ``base`` on where drafts are made."""
        self.table, self._base, self.state = table, base, FIRST
        # Of a view, Python reads a number several times faster than of an array.
        self._moves = np.ascontiguousarray(table.moves).reshape(-1).data

    def read(self, text: bytes) -> None:
        """Go on behind a token that was kept."""
        if self.table is not None:
            self.state = self.after(self.state, text)

    def after(self, state: int, text: bytes) -> int:
        """The state after more bytes."""
        moves = self._moves
        for byte in text:
            if state < FIRST:
                return state if state == LOST else DEAD
            state = moves[(state - FIRST) * 256 + byte]
        return state

    def number(self, state: int) -> int:
        """A state as drafts know it."""
        return (state if state < FIRST else state - FIRST + self._base) * STATE_WIDTH
