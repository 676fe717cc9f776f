"""A grammar's table of states by bytes, and where a request's text stands in what drafts read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.drafting.token_trie import TokenTrie
from overlap_spec.steps import (
    BY_NONE,
    BY_OTHER,
    BY_REST,
    BY_STOP,
    COMMON_STATES,
    DEAD,
    DONE,
    FEW_TOKENS,
    FIRST,
    LOST,
    STATE_WIDTH,
    TOKEN_STEPS,
    GrammarMap,
    Int32s,
    Part,
)

# Of a state as bytes: its moves, whether the grammar may end, its few tokens; and the most states.
STATE_BYTES = 2 * 256 + 1 + 4 * (FEW_TOKENS + 1)
MOST_STATES = 2**16


class StateTable(NamedTuple):
    """A grammar's states by bytes: it allows all that the grammar does, and little more.

    Of ``S`` states, the common ones first and the start, :data:`FIRST`, behind them. ``moves``
    int32 ``(S, STATE_WIDTH)``: the state after each step. ``few`` int32 ``(S, FEW_TOKENS + 1)``:
    tokens with which a text can go on, -1 behind their end, and last 1 where no other can.
    ``forced`` int16 ``(S,)``: the only byte that can come, -1 where there is another, or none, or
    an end.
    """

    moves: npt.NDArray[np.int32]
    few: npt.NDArray[np.int32]
    forced: npt.NDArray[np.int16]

    @classmethod
    def of(
        cls, moves: npt.NDArray[np.uint16], final: npt.NDArray[np.bool_], few: npt.NDArray[np.int32]
    ) -> StateTable:
        """The table of ``n`` states beside the common ones.

        Args:
            moves: uint16 ``(n, 256)``: rows of the states after each byte.
            final: bool ``(n,)``: where the grammar may end.
            few: int32 ``(n, FEW_TOKENS + 1)``.
        """
        count = COMMON_STATES + len(moves)
        steps = np.full((count, STATE_WIDTH), DEAD, np.int32)
        steps[0] = LOST
        np.multiply(moves, STATE_WIDTH, out=steps[COMMON_STATES:, :BY_NONE], dtype=np.int32)
        steps[1:, BY_NONE] = np.arange(1, count) * STATE_WIDTH
        steps[COMMON_STATES:, BY_STOP][final] = DONE
        steps[COMMON_STATES:, BY_REST] = LOST
        every = np.full((count, FEW_TOKENS + 1), -1, np.int32)
        every[:COMMON_STATES, -1] = 0
        every[COMMON_STATES:] = few
        forced = np.full(count, -1, np.int16)
        ways = moves != DEAD // STATE_WIDTH
        single = (ways.sum(1) == 1) & ~final
        forced[COMMON_STATES:][single] = ways[single].argmax(1)
        return cls(steps, every, forced)

    @property
    def size(self) -> int:
        """States of its own."""
        return len(self.few) - COMMON_STATES

    def parts(self, base: int) -> dict[str, Part]:
        """As :class:`GrammarMap`; the common states are the first ones everywhere."""
        own, ahead = self.moves[COMMON_STATES:], np.int32((base - COMMON_STATES) * STATE_WIDTH)
        moves = np.where(own < FIRST, own, own + ahead).reshape(-1)
        return {"moves": (base * STATE_WIDTH, moves), "few": (base, self.few[COMMON_STATES:])}

    @property
    def final(self) -> npt.NDArray[np.bool_]:
        """bool ``(S,)``: where the grammar may end."""
        ends: npt.NDArray[np.bool_] = self.moves[:, BY_STOP] == DONE
        return ends

    def to_bytes(self) -> bytes:
        """What :meth:`from_bytes` reads."""
        own = slice(COMMON_STATES, None)
        moves = (self.moves[own, :BY_NONE] // STATE_WIDTH).astype(np.uint16)
        parts = moves, self.final[own], self.few[own]
        return zlib.compress(b"".join(part.tobytes() for part in parts), 1)

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int) -> StateTable:
        """The table that :meth:`to_bytes` wrote.

        Raises:
            ValueError: it names states or tokens that there are not: those who read the table look
                at no bounds.
        """
        try:
            read = zlib.decompressobj().decompress(data, MOST_STATES * STATE_BYTES)
        except zlib.error as error:
            raise ValueError(f"not a table of states: {error}") from None
        whole = np.frombuffer(read, np.uint8)
        count, rest = divmod(len(whole), STATE_BYTES)
        if rest:
            raise ValueError("not a table of states: a part of a state is missing")
        parts = np.split(whole, [512 * count, 513 * count])
        moves = parts[0].view(np.uint16).reshape(count, 256)
        few = parts[2].copy().view(np.int32).reshape(count, FEW_TOKENS + 1)
        if not (moves < COMMON_STATES + count).all() or not ((few >= -1) & (few < tokens)).all():
            raise ValueError("not a table of states: it names a state or a token that is not there")
        return cls.of(moves, parts[1] != 0, few)


def token_steps(texts: Sequence[bytes], stop_ids: Sequence[int]) -> Int32s:
    """int32 ``(V, TOKEN_STEPS)``: the steps of each token; of a long one its first bytes, behind
    which nothing is known."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    every = np.frombuffer(b"".join(texts), np.uint8)
    starts = np.cumsum(lengths) - lengths
    steps = np.full((len(texts), TOKEN_STEPS), BY_NONE, np.int32)
    for place in range(TOKEN_STEPS):
        there = lengths > place
        steps[there, place] = every[starts[there] + place]
    steps[lengths > TOKEN_STEPS, -1] = BY_REST
    steps[lengths == 0, 0] = BY_OTHER
    steps[list(stop_ids), 0] = BY_STOP
    return steps


# Of the state LOST alone: its moves and what it forces.
NOTHING_KNOWN = np.zeros(STATE_WIDTH, np.int32).data, np.full(1, -1, np.int16).data


class Standing:
    """Where a request's text stands in what drafts read of its grammar.

    Attributes:
        table, trie: None: there is none.
        state: In the table, behind all text so far.
        node: In the trie, -1 where nothing is known yet; None where no text goes on so.
    """

    def __init__(self) -> None:
        self.table: StateTable | None = None
        self.trie: TokenTrie | None = None
        self.state = LOST
        self.node: int | None = None
        self._state_base = self._node_base = 0
        # Of a view, Python reads a number several times faster than of an array.
        self._moves, self._forced = NOTHING_KNOWN

    def enter(self, known: GrammarMap, base: int) -> None:
        """Start in a map whose first row is number ``base`` where drafts are made."""
        if isinstance(known, TokenTrie):
            self.trie, self.node, self._node_base = known, -1, base
        else:
            assert isinstance(known, StateTable)
            self.table, self.state = known, FIRST
            self._state_base = (base - COMMON_STATES) * STATE_WIDTH
            self._moves, self._forced = known.moves.reshape(-1).data, known.forced.data

    def read(self, token: int, text: bytes) -> None:
        """Go on behind a token that was kept."""
        if self.table is not None:
            self.state = self.after(self.state, text)
        if self.trie is not None:
            self.node = self.trie.follow(self.node, (token,))

    @property
    def left(self) -> int:
        """Nodes of the trie that can be left behind the text; -1: it has none."""
        return -1 if self.trie is None or self.node is None else self.trie.left(self.node)

    def after(self, state: int, text: bytes) -> int:
        """The state after more bytes."""
        moves = self._moves
        for byte in text:
            state = moves[state + byte]
        return state

    def forced(self, state: int, most: int) -> bytes:
        """The bytes that must come next, as far as they are told."""
        moves, forced, found = self._moves, self._forced, bytearray()
        while (byte := forced[state // STATE_WIDTH]) >= 0 and len(found) < most:
            found.append(byte)
            state = moves[state + byte]
        return bytes(found)

    def number(self, state: int) -> int:
        """A state as drafts know it."""
        return state if state < FIRST else state + self._state_base

    def place(self, node: int | None) -> int:
        """A node as drafts know it, -1 for none."""
        return -1 if node is None else node + 1 + self._node_base
