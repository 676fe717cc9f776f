"""Routes each grammar to a backend; `ir/route.py` has the rules."""

from __future__ import annotations

import threading
from contextlib import suppress

from overlap_spec.errors import ConfigError, GrammarError
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
from overlap_spec.grammar.dialects.lark import to_lark
from overlap_spec.grammar.ir.route import CHARACTERS, FOREIGN, LEXEMES, Route, route
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.parsing.ebnf import ForeignConstruct
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary


class AutoBackend(Backend):
    """Picks the fastest backend for each grammar; builds backends on first use."""

    name = "auto"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._built: dict[str, Backend] = {}

    def warm(self) -> None:
        # Most grammars go there, and its view of a large vocabulary takes half a second.
        with suppress(ConfigError):
            self._backend(LEXEMES[0]).warm()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        found = _route(grammar)
        refusals: dict[str, Exception] = {}
        for name in found.backends:
            try:
                compiled = self._backend(name).compile(grammar)
            except (GrammarError, ConfigError) as error:
                # One that is not installed refuses everything.
                refusals[name] = error
                continue
            reason = "; ".join([*(f"{other} refused" for other in refusals), found.reason])
            return _Routed(compiled, reason)
        reasons = "; ".join(f"{name}: {error}" for name, error in refusals.items())
        kind = grammar.kind
        raise GrammarError(f"no backend accepts this {kind} grammar: {reasons}", kind)

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        head, _, body = data.partition(b"\n")
        name, _, reason = head.decode().partition(" ")
        return _Routed(self._backend(name).deserialize(grammar, body), reason)

    def _backend(self, name: str) -> Backend:
        with self._lock:
            if name not in self._built:
                self._built[name] = load(name)(self.vocabulary)
            return self._built[name]


def _route(grammar: Grammar) -> Route:
    try:
        syntax = lower(grammar)
    except ForeignConstruct:
        return FOREIGN
    found = route(syntax)
    if found.backends[0] == "llguidance" and to_lark(syntax).by_characters:
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
        self._compiled.reach = self.reach
        return self._compiled.matcher()

    def serialize(self) -> bytes | None:
        data = self._compiled.serialize()
        return None if data is None else f"{self.backend} {self.reason}\n".encode() + data


BACKEND = AutoBackend
