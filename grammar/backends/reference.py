"""The oracle: an Earley recogniser over bytes, in plain Python, for small vocabularies.

J. Earley, "An efficient context-free parsing algorithm", 1970; rules that match the empty text as
in J. Aycock and R. N. Horspool, "Practical Earley parsing", 2002. A set of items is named by what
was just scanned, and equal sets are one object, so that the sets of a regular language are the
states of a finite automaton, found as they are met; each keeps its mask row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from overlap_spec.grammar import walk
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.lowering import to_ebnf
from overlap_spec.grammar.network import Network
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.syntax import Syntax, read
from overlap_spec.grammar.vocabulary import Vocabulary


class ReferenceBackend(Backend):
    """Reads every EBNF text that `syntax` reads; slow beyond a few thousand tokens."""

    name = "reference"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compile_lowered(grammar, to_ebnf(grammar))

    def compile_lowered(self, grammar: Grammar, ebnf: str) -> CompiledGrammar:
        return self.deserialize(grammar, ebnf.encode())

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:  # noqa: ARG002
        return _Compiled(_Chart(read(data.decode()), self.vocabulary), data)


class _Set:
    """An Earley set: where in which rules the text so far may stand, and since when.

    Attributes:
        waiting: By rule, the nodes to go on from when the rule that begins here is done, each
            with the set in which the rule of that node began.
        scans: Byte ranges that may come next, with the node behind and its set of origin.
        moves: The next set by byte, None where there is none; found as needed.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[int, _Set]]] = {}
        self.scans: list[tuple[int, int, int, _Set]] = []
        self.moves: dict[int, _Set | None] = {}
        self.is_complete = False
        self.row: Row | None = None


class _Chart:
    """All Earley sets of a grammar that were met so far."""

    def __init__(self, syntax: Syntax, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.lock = threading.RLock()
        self.network = Network()
        self.nullable = syntax.nullable
        self.starts: dict[str, int] = {}
        self.done: dict[int, str] = {}
        for name, body in syntax.rules.items():
            self.starts[name] = self.network.node()
            self.done[self.network.add(body, self.starts[name])] = name
        self.sets: dict[frozenset[tuple[int, int]], _Set] = {}
        self.sorted = sorted((text, i) for i, text in enumerate(vocabulary.text) if text)
        self.first = _Set()
        self._close(self.first, [(self.starts["root"], self.first)])
        self.first.is_complete = "root" in self.nullable

    def move(self, here: _Set, byte: int) -> _Set | None:
        """The set after one more byte, or None where no text goes on with it."""
        if byte not in here.moves:
            scanned = {(t, o) for low, high, t, o in here.scans if low <= byte <= high}
            here.moves[byte] = self._named(scanned) if scanned else None
        return here.moves[byte]

    def follow(self, here: _Set, text: bytes) -> _Set | None:
        """The set after a text."""
        found: _Set | None = here
        for byte in text:
            found = self.move(found, byte) if found else None
        return found

    def row(self, here: _Set) -> Row:
        """The mask row of a set; read-only."""
        if here.row is None:
            flags = np.zeros(self.vocabulary.words * 32, np.uint8)
            flags[list(self._legal(here))] = 1
            row = np.packbits(flags, bitorder="little").view(np.int32)
            if here.is_complete:
                row |= self.vocabulary.stop_row
            here.row = row
        return here.row

    def _legal(self, here: _Set) -> Iterator[int]:
        """Tokens with which the text may go on; sorted, neighbours share their beginnings."""
        path = [here]
        before = b""
        for text, token in self.sorted:
            shared = 0
            while shared < min(len(path) - 1, len(text)) and before[shared] == text[shared]:
                shared += 1
            del path[shared + 1 :]
            while len(path) <= len(text):
                after = self.move(path[-1], text[len(path) - 1])
                if after is None:
                    break
                path.append(after)
            else:
                yield token
            before = text

    def _named(self, scanned: set[tuple[int, _Set]]) -> _Set:
        name = frozenset((node, id(origin)) for node, origin in scanned)
        if name not in self.sets:
            made = self.sets[name] = _Set()
            self._close(made, list(scanned))
        return self.sets[name]

    def _close(self, here: _Set, pending: list[tuple[int, _Set]]) -> None:
        """Predict and complete until nothing new comes."""
        seen = set(pending)

        def add(node: int, origin: _Set) -> None:
            if (node, origin) not in seen:
                seen.add((node, origin))
                pending.append((node, origin))

        while pending:
            node, origin = pending.pop()
            here.scans += [(*edge, origin) for edge in self.network.bytes[node]]
            for target in self.network.steps[node]:
                add(target, origin)
            for rule, after in self.network.calls[node]:
                here.waiting.setdefault(rule, []).append((after, origin))
                add(self.starts[rule], here)
                if rule in self.nullable:
                    add(after, origin)
            # A rule that is done where it began is nullable, and was stepped over above.
            if node in self.done and origin is not here:
                rule = self.done[node]
                here.is_complete |= rule == "root" and origin is self.first
                for after, outer in origin.waiting.get(rule, ()):
                    add(after, outer)


class _Compiled(CompiledGrammar):
    backend = "reference"

    def __init__(self, chart: _Chart, ebnf: bytes) -> None:
        self._chart = chart
        self._ebnf = ebnf

    @property
    def memory_bytes(self) -> int:
        return 500 * (len(self._chart.network.bytes) + len(self._chart.sorted))

    def matcher(self) -> Matcher:
        return _ReferenceMatcher(self._chart, [self._chart.first])

    def serialize(self) -> bytes:
        return self._ebnf


class _ReferenceMatcher(Matcher):
    def __init__(self, chart: _Chart, path: list[_Set | None]) -> None:
        self.vocabulary = chart.vocabulary
        self._chart = chart
        # The set after each token; None after a stop token.
        self._path = path

    def accept(self, token_id: int) -> bool:
        here = self._path[-1]
        if here is None or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.stop_ids:
            after = None
            legal = here.is_complete
        else:
            text = self.vocabulary.text[token_id]
            with self._chart.lock:
                after = self._chart.follow(here, text) if text else None
            legal = after is not None
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
        with self._chart.lock:
            row[:] = self._chart.row(here)

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.fill_tree(self, tokens, first_child, next_sibling, rows)

    @property
    def is_terminated(self) -> bool:
        return self._path[-1] is None

    @property
    def is_complete(self) -> bool:
        here = self._path[-1]
        return here is None or here.is_complete

    @property
    def accepted_tokens(self) -> int:
        return len(self._path) - 1

    def fork(self) -> Matcher:
        return _ReferenceMatcher(self._chart, self._path.copy())


BACKEND = ReferenceBackend
