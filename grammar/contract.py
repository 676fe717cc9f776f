"""The contract of grammar backends; the same tests hold every backend to it.

A backend compiles a `Grammar` for one `Vocabulary`; the compiled grammar creates matchers, one per
request. A matcher is a position in the grammar: it accepts tokens, rolls them back, and computes
which tokens may come next.

**Mask rows.** A row is int32 `(words,)` with `words = ceil(vocabulary.size / 32)`; token `t` may
come next if and only if bit `t % 32` of word `t // 32` is 1. Bits past the vocabulary are 0, and
so are those of special tokens. If the grammar may end, the bits of all stop tokens are 1.

**Stop tokens.** Accepting one terminates the matcher. A terminated matcher accepts nothing:
`accept` returns False, and every row it fills is all zero.

**Trees.** `tokens`, `first_child` and `next_sibling` are int64 `(n,)`, -1 means none, and a link
always points to a later node (so there is no cycle). Node 0 is the last committed token and is
already in the matcher: it is never accepted again. Row `i` is the mask of what may follow node
`i`. A node is legal if and only if its bit is set in its parent's row. Rows of nodes that the walk
does not reach (they or an ancestor are illegal, or no link leads to them) and of a node that
terminates the grammar are all zero, whatever the buffer held before.

**State.** `fill` and `fill_tree` leave the matcher unchanged, also when they raise. `rollback` is
exact, unlimited, and undoes termination as well. A rejected token leaves the state unchanged. A
matcher belongs to one thread at a time; different matchers may run in parallel.

**Errors.** A token that the grammar forbids is not an error: `accept` returns False. ValueError is
a mistake of the caller (shape, dtype, order of links, rolling back too far). Any other exception
is a fault of the backend, and the matcher may not be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.drafting.state_table import StateTable
from overlap_spec.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from overlap_spec.grammar.ir.reach import Reach
    from overlap_spec.grammar.room.room import Room
    from overlap_spec.grammar.spec import Grammar

Row = npt.NDArray[np.int32]
Links = npt.NDArray[np.int64]


class Matcher(ABC):
    """One request's position in a grammar; the module's docstring has the rules.

    Attributes:
        is_untold: Whether nothing told in time whether the text comes to its end within its room.
    """

    vocabulary: Vocabulary
    is_untold: bool = False

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Accept one token; False, with the state unchanged, if it is not legal."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens.

        Raises:
            ValueError: `count` is negative or more than `accepted_tokens`.
        """

    @abstractmethod
    def fill(self, row: Row) -> None:
        """Write the mask of the next token into `row`, int32 `(words,)`, C-contiguous."""

    @abstractmethod
    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        """Write one mask row per node of a draft tree.

        Args:
            tokens: int64 `(n,)`, token ids; values outside the vocabulary are allowed.
            first_child: int64 `(n,)`, a later node or -1.
            next_sibling: int64 `(n,)`, a later node or -1.
            rows: int32 `(n, words)`, C-contiguous, completely overwritten.
        """

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:  # noqa: ARG002
        """Bytes with which every text goes on after the tokens of `path`.

        For drafts alone: it may be shorter than the truth, as this default is, and may end inside
        a character. The matcher is left unchanged.

        Args:
            path: Tokens that are legal one after the other, none of them a stop token.
        """
        return b""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the grammar may end after the text accepted so far."""

    @property
    def narrowed(self) -> int:
        """Accepted tokens whose mask had been narrowed, lest the text outgrow its room."""
        return 0

    @property
    def is_led(self) -> bool:
        """Whether narrowed masks led the text to an end, before which it had none to stop at."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether it is inside a model's thinking, which may be any text."""
        return False

    @property
    @abstractmethod
    def accepted_tokens(self) -> int:
        """Tokens accepted and not rolled back, including a stop token."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent matcher at the same position, with the same history."""

    def ended(self) -> bool:
        """Whether the grammar is at its end: complete, and only stop tokens are legal.

        Exact. Costs one `fill` if the text is complete, and next to nothing otherwise.
        """
        if self.is_terminated:
            return True
        if not self.is_complete:
            return False
        row = np.zeros(self.vocabulary.words, np.int32)
        self.fill(row)
        return bool(np.array_equal(row, self.vocabulary.stop_row))


class CompiledGrammar(ABC):
    """A grammar compiled for a vocabulary: immutable, shared by requests and threads.

    Attributes:
        backend: Name of the backend that compiled it.
        reason: Why that backend was picked; empty if there was no choice.
        plan: What its grammar leaves to `distinct.matcher`; empty if nothing.
        states: Its table of states by bytes, for drafts; None: it has none, or nobody asked.
        reach: How long its texts are, in bytes; None: they are nested too deep, or nobody asked.
        room: How long they are at least, from wherever they stand; None: likewise.
    """

    backend: str = ""
    reason: str = ""
    plan: bytes = b""
    states: StateTable | None = None
    reach: Reach | None = None
    room: Room | None = None

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Approximate host memory in bytes."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A new matcher at the start of the grammar."""

    def serialize(self) -> bytes | None:
        """Bytes from which `Backend.deserialize` of the same library release restores this grammar.

        None means that there is no such form; the receiver then has to `rebuild`.
        """
        return None


class Backend(ABC):
    """Compiles grammars with one library for one vocabulary.

    A backend's file in `overlap_spec/grammar/backends/` exports its class as `BACKEND`.

    Attributes:
        makes_masks: False in processes that only compile: what serves masks alone is left out.
    """

    name: str
    vocabulary: Vocabulary
    makes_masks: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def warm(self) -> None:  # noqa: B027
        """Build what the first grammar would wait for. Safe to call from several threads, and
        before a fork: it starts no thread."""

    @abstractmethod
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile; safe to call from several threads.

        Raises:
            GrammarError: the grammar has an error, or this backend cannot enforce it exactly.
        """

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:  # noqa: ARG002
        """Restore a compiled grammar from the bytes of its `serialize`.

        Takes milliseconds or releases the GIL, so that the engine's process does not stall. Safe
        to call from several threads.

        Args:
            grammar: The grammar that was compiled.
            data: Bytes from a trusted process with the same vocabulary and library release.

        Raises:
            GrammarError: the bytes are not such a grammar.
        """
        raise GrammarError(f"{self.name} has no serialised grammars", grammar.kind)

    def rebuild(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar that compiled in a worker but has no serialised form.

        Raises:
            GrammarError: as `compile`.
        """
        return self.compile(grammar)
