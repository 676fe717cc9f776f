"""Validates a finished best-effort output against its whole schema.

Runs only in a process that can be killed: a single call of Python's `re` may never return while it
holds the interpreter lock, and schemas may nest to any depth.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from overlap_spec.grammar.reasoning.reply import answer_of
from overlap_spec.grammar.schemas.source import json_path
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tools.stream import parse_reply

MOST_CHARACTERS = 500
MOST_DIGITS = 400


def is_best_effort(grammar: Grammar) -> bool:
    """Whether the grammar may have left out schema keywords, as its caller allowed."""
    return grammar.best_effort if grammar.inner is None else is_best_effort(grammar.inner)


def violation(grammar: Grammar, text: str) -> str | None:
    """Where and how an output violates its grammar's schema; None if it is valid.

    Raises:
        Exception: the check is impossible: the schema is nested too deep, or has a pattern that
            Python cannot compile.
    """
    inner = grammar.inner
    if inner is not None and grammar.kind == "after_thinking":
        return violation(inner, answer_of(grammar.source, text))
    if inner is not None:
        called = parse_reply(text, json.loads(grammar.source)["format"]).calls
        return None if called else violation(inner, text)
    try:
        instance = _read(text)
    except json.JSONDecodeError as error:
        return f"it is not complete JSON: {error}"
    return _first_error(_read(grammar.source), instance)


def _first_error(schema: Any, instance: Any) -> str | None:
    # Imported lazily: most workers compile and never check.
    from jsonschema import validators
    from referencing import Registry

    kind = validators.validator_for(schema, validators.Draft202012Validator)
    # An empty registry, so that nothing is ever fetched.
    error = next(kind(schema, registry=Registry()).iter_errors(instance), None)
    if error is None:
        return None
    return f"{json_path('$', *error.absolute_path)}: {error.message}"[:MOST_CHARACTERS]


class _Exact(Decimal):
    """A number in decimal: 0.3 is a multiple of 0.1."""

    __repr__ = Decimal.__str__


def _read(text: str) -> Any:
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    exact = _Exact(text)
    # JSON Schema counts 1.0 as an integer; 1e999999999 as an int would fill the memory.
    is_whole = exact.adjusted() < MOST_DIGITS and exact == exact.to_integral_value()
    return int(exact) if is_whole else exact
