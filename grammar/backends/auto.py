"""Routes each grammar to a backend; `parsing/route.py` has the rules."""

from __future__ import annotations

import threading

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
from overlap_spec.grammar.lowering import to_ebnf
from overlap_spec.grammar.parsing.route import CHARACTERS, FOREIGN, Route, route
from overlap_spec.grammar.parsing.syntax import ForeignConstruct, read
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary


class AutoBackend(Backend):
    """Picks the fastest backend for each grammar; builds backends on first use."""

    name = "auto"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._built: dict[str, Backend] = {}

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compile_lowered(grammar, to_ebnf(grammar))

    def compile_lowered(self, grammar: Grammar, ebnf: str) -> CompiledGrammar:
        found = self._route(ebnf)
        refusals: dict[str, GrammarError] = {}
        for name in found.backends:
            try:
                compiled = self._read(name, grammar, ebnf)
            except GrammarError as error:
                refusals[name] = error
                continue
            reason = "; ".join([*(f"{other} refused" for other in refusals), found.reason])
            return _Routed(compiled, reason)
        raise _all_refused(grammar, refusals)

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        head, _, body = data.partition(b"\n")
        name, _, reason = head.decode().partition(" ")
        return _Routed(self._backend(name).deserialize(grammar, body), reason)

    def _read(self, name: str, grammar: Grammar, ebnf: str) -> CompiledGrammar:
        # Only xgrammar needs another lowering, with ambiguous expressions as automata.
        if name == "xgrammar":
            return self._backend(name).compile(grammar)
        return self._backend(name).compile_lowered(grammar, ebnf)

    def _backend(self, name: str) -> Backend:
        with self._lock:
            if name not in self._built:
                self._built[name] = load(name)(self.vocabulary)
            return self._built[name]

    def _route(self, ebnf: str) -> Route:
        try:
            found = route(read(ebnf))
        except ForeignConstruct:
            return FOREIGN
        if found.backends[0] == "llguidance":
            from overlap_spec.grammar.backends.llguidance import to_lark

            if to_lark(ebnf).by_characters:
                return CHARACTERS
        return found


class _Routed(CompiledGrammar):
    def __init__(self, compiled: CompiledGrammar, reason: str) -> None:
        self._compiled = compiled
        self.backend = compiled.backend
        self.reason = reason

    @property
    def memory_bytes(self) -> int:
        return self._compiled.memory_bytes

    def matcher(self) -> Matcher:
        return self._compiled.matcher()

    def serialize(self) -> bytes | None:
        data = self._compiled.serialize()
        return None if data is None else f"{self.backend} {self.reason}\n".encode() + data


def _all_refused(grammar: Grammar, refusals: dict[str, GrammarError]) -> GrammarError:
    reasons = "; ".join(f"{name}: {error}" for name, error in refusals.items())
    return GrammarError(f"no backend accepts this {grammar.kind} grammar: {reasons}", grammar.kind)


BACKEND = AutoBackend
