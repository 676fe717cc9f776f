"""Grammars: constraints on a request's output, and the token masks that enforce them.

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
