"""The oracle: an Earley recogniser over bytes, in plain Python, for small vocabularies.

J. Earley, "An efficient context-free parsing algorithm", 1970; nullable rules as in J. Aycock and
R. N. Horspool, "Practical Earley parsing", 2002. An item set is identified by the items just
scanned, and equal sets are one object. The sets of a regular language are thus the states of a
finite automaton, built on demand; each caches its mask row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher, Row
from overlap_spec.grammar.ir.network import Network
from overlap_spec.grammar.ir.syntax import Syntax, bounded_depth
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching.states import Automaton, StateMatcher
from overlap_spec.grammar.rows import row_of
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary


class ReferenceBackend(Backend):
    """Supports every grammar that is lowered; slow beyond a few thousand tokens."""

    name = "reference"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @bounded_depth()
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return _Compiled(_Chart(lower(grammar).plain, self.vocabulary))


class _Set:
    """An Earley item set: positions in rules, each with the set in which its rule began.

    Attributes:
        waiting: By rule, the nodes that continue when a rule that begins here is complete, each
            with the origin set of its own rule.
        scans: Byte ranges that may come next, each with its target node and origin set.
        moves: The next set by byte, None if there is none; filled on demand.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[int, _Set]]] = {}
        self.scans: list[tuple[int, int, int, _Set]] = []
        self.moves: dict[int, _Set | None] = {}
        self.is_complete = False
        self.row: Row | None = None


class _Chart(Automaton[_Set]):
    """All Earley sets of a grammar that were built so far."""

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
        self.start = _Set()
        self._close(self.start, [(self.starts["root"], self.start)])
        self.start.is_complete = "root" in self.nullable

    def move(self, here: _Set, byte: int) -> _Set | None:
        """The set after one more byte; None if no text continues with it."""
        if byte not in here.moves:
            scanned = {(t, o) for low, high, t, o in here.scans if low <= byte <= high}
            here.moves[byte] = self._named(scanned) if scanned else None
        return here.moves[byte]

    def after(self, state: _Set, token: int) -> _Set | None:
        text = self.vocabulary.text[token]
        found: _Set | None = state if text else None
        with self.lock:
            for byte in text:
                found = self.move(found, byte) if found else None
        return found

    def is_final(self, state: _Set) -> bool:
        return state.is_complete

    def row(self, state: _Set) -> Row:
        with self.lock:
            if state.row is None:
                state.row = row_of(self._legal(state), self.vocabulary.words)
            return state.row

    def _legal(self, here: _Set) -> Iterator[int]:
        """Legal tokens. They are sorted, so that neighbours share work on common prefixes."""
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
        """Predict and complete until there are no new items."""
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
            # A rule that completes in its own origin is nullable, and was skipped over above.
            if node in self.done and origin is not here:
                rule = self.done[node]
                here.is_complete |= rule == "root" and origin is self.start
                for after, outer in origin.waiting.get(rule, ()):
                    add(after, outer)


class _Compiled(CompiledGrammar):
    backend = "reference"

    def __init__(self, chart: _Chart) -> None:
        self._chart = chart

    @property
    def memory_bytes(self) -> int:
        return 500 * (len(self._chart.network.bytes) + len(self._chart.sorted))

    def matcher(self) -> Matcher:
        return StateMatcher(self._chart)


BACKEND = ReferenceBackend
