"""Grammars' tables of states by bytes on the device, and who has which part of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from overlap_spec.drafters.states import StateTables
from overlap_spec.kernels import after_tokens
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
    GrammarTable,
    Int32s,
)
from overlap_spec.worker.kv_pool import lazy_zeros

# States that the tables of all grammars have together, some 17 MB.
STATES = 16_384


class GrammarStates(nn.Module):
    """The tables, and the state of each row's root.

    ``state`` int32 ``(R,)``; the others as in :class:`StateTables`. A row whose grammar has no
    table, or none yet, is at LOST: everything may come.

    Args:
        rows: R.
        states: Room for so many states, or for none but the common ones.
    """

    state: Tensor
    moves: Tensor
    texts: Tensor
    few: Tensor

    def __init__(self, rows: int, vocab_size: int, states: int, device: torch.device) -> None:
        super().__init__()
        every = COMMON_STATES + states
        moves = lazy_zeros((every * STATE_WIDTH,), torch.int32, device)
        moves[DEAD : DONE + STATE_WIDTH] = DEAD
        moves[DEAD + BY_NONE], moves[DONE + BY_NONE] = DEAD, DONE
        self.register_buffer("state", torch.zeros(rows, dtype=torch.int32, device=device))
        self.register_buffer("moves", moves)
        # Until it is told what tokens are, no token moves anything.
        shape = vocab_size if states else 1, TOKEN_STEPS
        self.register_buffer("texts", torch.full(shape, BY_NONE, dtype=torch.int32, device=device))
        self.register_buffer("few", lazy_zeros((every, FEW_TOKENS + 1), torch.int32, device))
        self.few[:COMMON_STATES, :FEW_TOKENS] = -1

    @property
    def tables(self) -> StateTables:
        """What drafts read."""
        return StateTables(self.moves, self.texts, self.few)

    def after(self, told: Tensor, tokens: Tensor) -> Tensor:
        """The states of new roots: int32 ``(S,)``.

        Args:
            told: int32 ``(S,)``: the states at the last accepted nodes, -1 where nothing is known.
            tokens: int64 ``(S,)``: the tokens behind them; negative ones are none.
        """
        return after_tokens(self.moves, told.clamp(min=LOST), self.texts, tokens.clamp(min=0))

    def write_texts(self, steps: Int32s) -> None:
        """Take in the steps of all tokens, as :func:`token_steps` makes them."""
        self.texts.copy_(torch.from_numpy(steps), non_blocking=True)

    def write(self, base: int, table: GrammarTable) -> None:
        """Take in a table whose states are numbered from ``base`` on."""
        own = table.moves[COMMON_STATES:]
        # The common states are the first ones everywhere.
        ahead = (base - COMMON_STATES) * STATE_WIDTH
        moves = torch.from_numpy(np.where(own < FIRST, own, own + np.int32(ahead)).reshape(-1))
        first = base * STATE_WIDTH
        self.moves[first : first + len(moves)].copy_(moves, non_blocking=True)
        few = torch.from_numpy(table.few[COMMON_STATES:])
        self.few[base : base + len(few)].copy_(few, non_blocking=True)


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


class StateRooms:
    """Which part of the tables each grammar has; on the host.

    Args:
        states: As in :class:`GrammarStates`.
    """

    def __init__(self, states: int = STATES) -> None:
        self._free = [(COMMON_STATES, states)]
        # By a table's identity: its part, who uses it, the table itself. The newest come last.
        self._parts: dict[int, tuple[int, int, set[int], GrammarTable]] = {}

    def enter(self, user: int, table: GrammarTable) -> tuple[int, bool] | None:
        """The base of a table for a user, and whether it is new; None where there is no room."""
        known = self._parts.pop(id(table), None)
        new = known is None
        if known is None:
            count = len(table.few) - COMMON_STATES
            base = self._take(count)
            if base is None:
                return None
            known = base, count, set(), table
        self._parts[id(table)] = known
        known[2].add(user)
        return known[0], new

    def leave(self, user: int) -> None:
        """A user reads its table no more."""
        for _, _, users, _ in self._parts.values():
            users.discard(user)

    def _take(self, count: int) -> int | None:
        """The start of a free part; unused tables give way, the oldest first."""
        while True:
            for index, (start, size) in enumerate(self._free):
                if size >= count:
                    self._free[index : index + 1] = (
                        [(start + count, size - count)] if size > count else []
                    )
                    return start
            unused = next((key for key, part in self._parts.items() if not part[2]), None)
            if unused is None:
                return None
            start, size, _, _ = self._parts.pop(unused)
            self._free = _joined([*self._free, (start, size)])


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts in order, neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(parts):
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((start, size))
    return found
