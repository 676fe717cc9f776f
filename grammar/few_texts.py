"""The whole outputs of a grammar that has few of them, for drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Repetition,
)
from overlap_spec.grammar.spec import Grammar

# Texts that a pattern may have.
MOST_TEXTS = 512
# Characters of a grammar that is looked at.
LONGEST = 2**16
# What says nothing of a value.
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id"})


def few_texts(grammar: Grammar) -> list[str]:
    """All texts of a grammar, if it is known to have few; else none.

    A choice, a schema of an enum, a constant or a boolean, and a pattern of few texts. For drafts
    alone: masks and the target decide.
    """
    if len(grammar.source) > LONGEST:
        return []
    if grammar.kind == "choice":
        return list(json.loads(grammar.source))
    if grammar.kind == "json_schema":
        return _values(json.loads(grammar.source))
    if grammar.kind == "regex":
        try:
            return sorted(set(_few(_of(parse(grammar.source)))))
        except (_TooManyError, GrammarError, RecursionError):
            return []
    return []


class _TooManyError(Exception):
    """More texts than are drafted from."""


def _values(schema: object) -> list[str]:
    if not isinstance(schema, dict):
        return []
    kinds = schema.keys() - NOTES
    if "const" in kinds and kinds <= {"const", "type"}:
        values = [schema["const"]]
    elif "enum" in kinds and kinds <= {"enum", "type"}:
        values = schema["enum"]
    elif kinds == {"type"} and schema["type"] == "boolean":
        values = [True, False]
    else:
        return []
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
    return list(dict.fromkeys(texts))


def _of(node: Node) -> Iterator[str]:
    """The texts that an expression matches in full, some of them twice."""
    if isinstance(node, CharClass):
        for low, high in node.members:
            yield from map(chr, range(low, high + 1))
    elif isinstance(node, Alternation):
        for way in node.ways:
            yield from _of(way)
    elif isinstance(node, Concat):
        parts = [list(_few(_of(part))) for part in node.parts]
        yield from map("".join, product(*parts))
    else:
        if not isinstance(node, Repetition) or node.most is None:
            raise _TooManyError
        body = list(_few(_of(node.body)))
        for count in range(node.least, node.most + 1):
            yield from map("".join, product(body, repeat=count))


def _few(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number >= MOST_TEXTS:
            raise _TooManyError
        yield text
