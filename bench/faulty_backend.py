"""A grammar backend with grammars whose compile fails, for ``bench.compile``."""

from __future__ import annotations

import ctypes

import numpy as np

from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.spec import Grammar

EATEN_BYTES = 10 * 2**30
STEP_BYTES = 2**24
MARK = "# hostile"


def hang(number: int) -> Grammar:
    """A grammar that the library itself compiles for hours: a chain of 100,000 rules."""
    rules = "\n".join(f'r{i} ::= r{i + 1} | r{i + 1} "a"' for i in range(100_000))
    return Grammar.ebnf(f'root ::= r0\n{rules}\nr100000 ::= "{number}"')


def eat(number: int) -> Grammar:
    """A grammar whose compile allocates 10 GiB, if it can."""
    return Grammar.ebnf(f"{MARK} eat {number}")


def crash(number: int) -> Grammar:
    """A grammar whose compile reads address zero."""
    return Grammar.ebnf(f"{MARK} crash {number}")


class FaultyBackend(XGrammarBackend):
    """xgrammar, except for the grammars of `eat` and `crash`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar.source.startswith(f"{MARK} eat"):
            blocks = [np.ones(STEP_BYTES, np.uint8) for _ in range(EATEN_BYTES // STEP_BYTES)]
            raise AssertionError(f"{len(blocks)} blocks fitted")
        if grammar.source.startswith(f"{MARK} crash"):
            ctypes.string_at(0)
        return super().compile(grammar)
