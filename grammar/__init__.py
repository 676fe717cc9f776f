"""Grammars: constraints on a request's output, and the token masks that enforce them.

The root has what users import: `Grammar` (`spec`), `Vocabulary`, `GrammarCompiler` (`compile`), and
the `contract` of backends. The folders show the way of a grammar (`tests/test_laws.py` has who may
import whom):

- source: `schemas` reads JSON Schemas and types, `tools` the declarations of tools and structural
  tags, `parsing` EBNF and Lark, `automata` regular expressions.
- rules: `lowering` makes any of them `ir`, exactly, or refuses.
- backend: `backends` has one file a library, `dialects` the rules in their spellings. They compile
  in the processes of `isolation`.
- matcher: `matching` has the walk over a tree and the pool of threads.

Besides: text that must differ (`distinct`), thinking (`reasoning`), what drafts are told
(`drafting`), other libraries' tokenizers (`vocabularies`) and generation (`adapters`).

Names load on first use, so that importing the package imports no grammar library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_spec.grammar.compile import GrammarCompiler
    from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
    from overlap_spec.grammar.matching.pool import AcceptItem, FillItem, MatcherPool
    from overlap_spec.grammar.spec import Grammar
    from overlap_spec.grammar.vocabulary import Vocabulary

_HOME = {
    "AcceptItem": "matching.pool",
    "Backend": "contract",
    "CompiledGrammar": "contract",
    "FillItem": "matching.pool",
    "Grammar": "spec",
    "GrammarCompiler": "compile",
    "Matcher": "contract",
    "MatcherPool": "matching.pool",
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
    "Vocabulary",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
