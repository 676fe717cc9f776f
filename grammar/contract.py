"""What a grammar backend must do. Every backend is held to this text by the same tests.

A backend compiles a `Grammar` against one `Vocabulary`; the compiled grammar hands out matchers,
one a request. A matcher is a position inside the grammar: it takes tokens, gives them back, and
says which tokens may come next.

**Mask rows.** A row is int32 `(words,)` with `words = ceil(vocabulary.size / 32)`; token `t` may
come next if and only if bit `t % 32` of word `t // 32` is 1. Bits past the vocabulary are 0, and
so are those of special tokens. Where the grammar may end, the bits of all stop tokens are 1.

**Stop tokens.** Accepting one terminates the matcher. A terminated matcher is never filled nor
fed: `accept` returns False and every row asked of it is all zero.

**Trees.** `tokens`, `first_child` and `next_sibling` are int64 `(n,)`, -1 means none, and a link
always points to a later node (so there is no cycle). Node 0 is the last committed token and is
already in the matcher: it is never accepted again. Row `i` says what may follow node `i`. A node
is legal if and only if its bit is set in its parent's row. Rows of nodes that the walk does not
reach, because they or an ancestor are illegal or no link leads to them, and of a node that
terminates the grammar, are all zero, whatever stood in the buffer before.

**State.** `fill` and `fill_tree` leave the matcher as they found it, also when they raise.
`rollback` is exact, unlimited, and undoes termination as well. A rejected token leaves the state
unchanged. A matcher belongs to one thread at a time; different matchers may run in parallel.

**Errors.** A token that the grammar forbids is no error: `accept` returns False. ValueError is a
caller's mistake (shape, dtype, order of links, rolling back too far). Anything else that is
raised is a fault of the backend, and the matcher may not be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

Row = npt.NDArray[np.int32]
Links = npt.NDArray[np.int64]


class Matcher(ABC):
    """One request's position inside a grammar. The law is in the module's docstring."""

    vocabulary: Vocabulary

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Move over one token; False, with the state unchanged, where it is not legal."""

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
        """Write one mask row a node of a draft tree.

        Args:
            tokens: int64 `(n,)`, token ids; any value, also outside the vocabulary.
            first_child: int64 `(n,)`, a later node or -1.
            next_sibling: int64 `(n,)`, a later node or -1.
            rows: int32 `(n, words)`, C-contiguous, overwritten as a whole.
        """

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text accepted so far is a whole sentence of the grammar."""

    @property
    @abstractmethod
    def accepted_tokens(self) -> int:
        """How many tokens were accepted and not rolled back, a stop token included."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent matcher at the same position, with the same history."""

    def ended(self) -> bool:
        """Whether the grammar is at its end: complete, and nothing but a stop token is legal.

        Exact. It costs one `fill` where the text is complete, and next to nothing elsewhere.
        """
        if self.is_terminated:
            return True
        if not self.is_complete:
            return False
        row = np.zeros(self.vocabulary.words, np.int32)
        self.fill(row)
        return bool(np.array_equal(row, self.vocabulary.stop_row))


class CompiledGrammar(ABC):
    """A grammar compiled against a vocabulary: immutable, shared by requests and threads.

    Attributes:
        backend: Name of the backend that reads it.
        reason: Why that backend, where there was a choice; empty where there was none.
    """

    backend: str = ""
    reason: str = ""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """About how much host memory it holds, in bytes."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A new matcher at the start of the grammar."""

    def serialize(self) -> bytes | None:
        """What `Backend.deserialize` of the same library release makes this grammar of again.

        None means that there is no such form, and that the receiver has to `rebuild`.
        """
        return None


class Backend(ABC):
    """A grammar library behind the contract; built once a vocabulary.

    A backend file in `overlap_spec/grammar/backends/` names its class `BACKEND`.
    """

    name: str
    vocabulary: Vocabulary

    @abstractmethod
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    @abstractmethod
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile; safe to call from several threads.

        Raises:
            GrammarError: the grammar is broken, or this backend cannot read it exactly.
        """

    def compile_lowered(self, grammar: Grammar, ebnf: str) -> CompiledGrammar:  # noqa: ARG002
        """`compile`, for who has the grammar's EBNF (`lowering.to_ebnf`) at hand."""
        return self.compile(grammar)

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:  # noqa: ARG002
        """The grammar compiled elsewhere, from what its `serialize` gave.

        Made for the process that must not stall: it takes milliseconds, or releases the
        interpreter lock. Safe to call from several threads.

        Args:
            grammar: The grammar that was compiled.
            data: Bytes of a trusted process that has the same vocabulary and library release.

        Raises:
            GrammarError: the bytes are not of such a grammar.
        """
        raise GrammarError(f"{self.name} has no serialised grammars", grammar.kind)

    def rebuild(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar again that compiled elsewhere but has no serialised form.

        Raises:
            GrammarError: as `compile`.
        """
        return self.compile(grammar)
