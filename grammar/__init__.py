"""Grammars: constraints on a request's output, and the token masks that enforce them.

From the bottom up; each room imports only rooms above it in this list (`tests/test_laws.py`):

- `automata`: character sets, regular expressions, automata.
- `parsing`: EBNF text parsed into trees, for backends.
- `spec` and the files that it reads with: a grammar as a value, structural tags, tools, reasoning.
- `lowering`: any grammar as EBNF text.
- `contract`, `vocabulary`, `walk`, `states`: what a backend implements, and helpers for it.
- `backends`: one file per grammar library.
- `isolation`: compiles in processes that may fail.
- `compile`, `matcher_pool`, `reasoning_matcher`: what the engine calls.

Names load on first use, so that importing the package imports no grammar library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_spec.grammar.compile import GrammarCompiler
    from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
    from overlap_spec.grammar.matcher_pool import AcceptItem, FillItem, MatcherPool, PoolResult
    from overlap_spec.grammar.spec import Grammar
    from overlap_spec.grammar.vocabulary import Vocabulary

_HOME = {
    "AcceptItem": "matcher_pool",
    "Backend": "contract",
    "CompiledGrammar": "contract",
    "FillItem": "matcher_pool",
    "Grammar": "spec",
    "GrammarCompiler": "compile",
    "Matcher": "contract",
    "MatcherPool": "matcher_pool",
    "PoolResult": "matcher_pool",
    "Vocabulary": "vocabulary",
}

__all__ = [
    "AcceptItem",
    "Backend",
    "CompiledGrammar",
    "FillItem",
    "Grammar",
    "GrammarCompiler",
    "Matcher",
    "MatcherPool",
    "PoolResult",
    "Vocabulary",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
