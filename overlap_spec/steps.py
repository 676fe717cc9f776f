"""What scheduler, worker and engine hand to each other in a step. Frozen values; no torch.

A step is planned over rows of the worker's tables, drafts a tree for each, verifies all trees at
once, and returns what each row accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from overlap_spec.tiers import Budget, Tier
from overlap_spec.types import NO_EXTRAS, TokenLogprobs

# Tokens of a run that a grammar forces, as far as it is drafted; the first is what was chosen last.
RUN_TOKENS = 16
# Numbers that the lane tells of a node: the run behind it, and where it stands in its grammar's
# table and trie.
TOLD = RUN_TOKENS + 2
# States by bytes (`grammar/drafting/byte_states.py`): a state is the number at which its moves
# begin. Steps from it: by each of 256 bytes; by none; by what is no text; by a stop token; by the
# rest of a long token. States of every table: nothing is known; nothing can come; all is over. Then
# its own.
STATE_WIDTH, COMMON_STATES = 260, 3
BY_NONE, BY_OTHER, BY_STOP, BY_REST = 256, 257, 258, 259
LOST, DEAD, DONE, FIRST = (STATE_WIDTH * state for state in range(COMMON_STATES + 1))
# Steps of a token, and tokens that are listed of a state in which few can come.
TOKEN_STEPS, FEW_TOKENS = 16, 8
# Nodes of a trie that is drafted from, the prompt's end included.
TRIE_NODES = 512
# States that the tables of all grammars have together, some 17 MB.
STATES = 16_384
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
# A part of a table on the device: its first row, and its values.
Part = tuple[int, NDArray[Any]]


class GrammarMap(Protocol):
    """What drafts read of a grammar on the device: a table of states, or a trie of texts."""

    @property
    def size(self) -> int:
        """Rows that it takes there."""

    def parts(self, base: int) -> dict[str, Part]:
        """Its values by the name of their table, for a map whose rows are numbered from ``base``
        on."""


class ByteStates(Protocol):
    """A grammar's states, as the host has them (`grammar/drafting/state_table.py`): ``moves`` int32
    ``(S, STATE_WIDTH)``, the state after each step; ``forced`` int16 ``(S,)``, the only byte that
    can come, -1 where there is none such."""

    @property
    def moves(self) -> NDArray[np.int32]: ...

    @property
    def forced(self) -> NDArray[np.int16]: ...


class Guide(NamedTuple):
    """What a drafter on the host reads of a request's grammar.

    ``texts``: each token's bytes. ``encode``: the tokenizer's tokens of a text inside another.
    ``salt``: requests of one alone may learn of each other.
    """

    states: ByteStates
    texts: Sequence[bytes]
    encode: Callable[[str], Sequence[int]]
    salt: str


@dataclass(frozen=True, slots=True)
class History:
    """A request's known tokens: its prompt and its output so far, neither copied.

    The output grows while the request runs. ``forced``: the likely tokens of what the grammar
    forces behind the known ones. ``guide``: None where there is no grammar, or none in a table, or
    the drafter reads none.
    """

    request_id: int
    prompt: Sequence[int]
    output: Sequence[int]
    forced: Sequence[int] = ()
    guide: Guide | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Those at positions ``start .. end - 1``."""
        first, last = max(start - len(self.prompt), 0), max(end - len(self.prompt), 0)
        return [*self.prompt[start:end], *self.output[first:last]]


@dataclass(frozen=True)
class Chunk:
    """A run of one request's tokens to prefill, at positions ``start ..``; starts with a page.

    ``final``: the run ends the known text, and its last token is verified as a one-node tree.
    ``page_before``: the page that ends at ``start``, 0 at the start of the text. ``asks``: what
    optional parts ask of it, by name; ``behind``: slots behind it that one of them writes.
    Of a model that has layers without keys ``state``: the slot of the states before it, None: none
    at the start of the text, and those that the last chunk left after it; ``kept``: how many of its
    tokens come before states that are kept, and in which slot.
    """

    row: int
    start: int
    tokens: Int64s
    final: bool
    page_before: int = 0
    behind: int = 0
    asks: Mapping[str, Any] = field(default_factory=dict)
    state: int | None = None
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def comes_again(self) -> bool:
        """Whether a later step computes the same tokens again, for another pass behind them."""
        return self.behind > 0 and not self.final

    @property
    def end(self) -> int:
        """Where the keys end that it writes, those behind it included."""
        return self.start + len(self.tokens) + self.behind


@dataclass(frozen=True)
class StepPlan:
    """One step: trees for ``decode_rows`` and prefill for ``chunks``.

    Attributes:
        index: Number of the step.
        budget: What the step's trees may cost.
        request_ids: Request of each decode row, then of each chunk.
        grammar: Whether each of these has a grammar.
        max_keys: No key of a decode row lies at or beyond this position.
        pages: New pages of rows: (row, index of the first, page numbers).
        untrusted: Pages that may hold what is no number, to be cleared before the step.
    """

    index: int
    budget: Budget
    decode_rows: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    request_ids: tuple[int, ...]
    grammar: tuple[bool, ...]
    max_keys: int
    pages: tuple[tuple[int, int, tuple[int, ...]], ...]
    untrusted: tuple[int, ...] = ()

    @cached_property
    def tier(self) -> Tier:
        """What the step's trees draft."""
        return self.budget.tier

    @cached_property
    def final_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that end their known text: one-node trees, verified behind the others."""
        return tuple(chunk for chunk in self.chunks if chunk.final)

    @cached_property
    def verified(self) -> tuple[tuple[int, int, bool], ...]:
        """(request id, row, has a grammar) of what the step verifies, in the order of its trees."""
        rows = (*self.decode_rows, *[chunk.row for chunk in self.chunks])
        everyone = tuple(zip(self.request_ids, rows, self.grammar, strict=True))
        trees = len(self.decode_rows)
        behind = zip(everyone[trees:], self.chunks, strict=True)
        return (*everyone[:trees], *[member for member, chunk in behind if chunk.final])

    @cached_property
    def verified_ids(self) -> tuple[int, ...]:
        """The request ids of :attr:`verified`."""
        return tuple([request_id for request_id, _, _ in self.verified])


@dataclass(frozen=True)
class HostTrees:
    """The drafted trees of a step on the host, ragged: request r of ``plan.verified`` owns
    ``offsets[r]:offsets[r+1]``, the living nodes of its tree, and nothing where it has no grammar.

    Links count from the request's own node 0, the last committed token; -1 is none. And where to
    write what the grammars say: ``rows (nodes, words)``, a mask row for each node; ``limits
    (requests,)``, to be lowered to the depth down to which a request's rows are good; ``runs
    (nodes, TOLD)``, the run behind each node, -1 where there is no more, and its state.
    """

    tokens: Int64s
    first_child: Int64s
    next_sibling: Int64s
    offsets: Int64s
    rows: Int32s
    limits: Int64s
    runs: Int32s


class RowResult(NamedTuple):
    """What one request got from a step, before the stop rules cut it.

    Attributes:
        tokens: Accepted drafts, then the bonus; the bonus is absent where its mask row was empty.
        drafted: Drafted tokens that were verified: the tree's living nodes but its root; 0 in
            prefill.
        accepted: How many of ``tokens`` are drafts.
        confidences: The drafter's probability of each accepted draft after the one before it;
            then, where the last one had children that were all refused, of the best of these.
        logprobs: One entry a token, if asked for.
        error: Why the request must end, if it must.
        limited: The masks were late: only the root's row was used.
        grafts: How many of the verified drafts the grammar had forced.
        grafted: How many of these are among the accepted ones, which they begin.
        extras: What the optional parts that are asked for tell of the tokens, by name.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None
    limited: bool = False
    confidences: tuple[float, ...] = ()
    grafts: int = 0
    grafted: int = 0
    extras: Mapping[str, Any] = NO_EXTRAS


@dataclass(frozen=True)
class StepResult:
    """Results in the order of ``plan.verified``.

    ``exposed_ms``: how long compute stood idle for the masks. ``step_ms``: time since the accept of
    the step before, ``idle_ms``: how long it stood idle meanwhile for whatever reason; None and 0
    where no step came right before.
    ``verified_rows``: rows that the target computed for the trees. ``told``: by request, what its
    chunk told the optional parts, by name.
    """

    plan: StepPlan
    rows: tuple[RowResult, ...]
    exposed_ms: float = 0.0
    idle_ms: float = 0.0
    step_ms: float | None = None
    verified_rows: int = 0
    told: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
