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
    from overlap_spec.grammar.compile import GrammarCompiler as GrammarCompiler
    from overlap_spec.grammar.contract import Backend as Backend
    from overlap_spec.grammar.contract import CompiledGrammar as CompiledGrammar
    from overlap_spec.grammar.contract import Matcher as Matcher
    from overlap_spec.grammar.matching.pool import AcceptItem as AcceptItem
    from overlap_spec.grammar.matching.pool import FillItem as FillItem
    from overlap_spec.grammar.matching.pool import MatcherPool as MatcherPool
    from overlap_spec.grammar.spec import Grammar as Grammar
    from overlap_spec.grammar.vocabulary import Vocabulary as Vocabulary

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

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
