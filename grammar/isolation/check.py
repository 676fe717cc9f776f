"""Validates a finished best-effort output against its whole schema.

Runs only in a process that can be killed: a single call of Python's `re` may never return while it
holds the interpreter lock, and schemas may nest to any depth.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from decimal import Decimal
from typing import Any

from overlap_spec.children import (
    OUTSIDE,
    end_with,
    is_stopped,
    without_secrets,
)
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.reasoning import answer_of
from overlap_spec.grammar.source import json_path
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tool_stream import parse_reply

MOST_CHARACTERS = 500
MOST_DIGITS = 400
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from overlap_spec.grammar.isolation.check import main; main(int(sys.argv[2]))"
)


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


def violation_elsewhere(grammar: Grammar, text: str, time_s: float) -> str | None:
    """As `violation`, in a new process, for executors without workers.

    One whose process is killed or stopped from outside is made again, once.

    Raises:
        CompileFailure: it took longer than `time_s`, or the check is impossible.
    """
    body = pickle.dumps((dataclasses.replace(grammar, output=None), text))
    what = f"the {grammar.kind} grammar cannot check its output"
    for _ in range(2):
        try:
            done = _run(body, time_s)
        except _TakesLong:
            late = f"{what}: it took longer than {time_s:g} s"
            raise CompileFailure(late, "timeout", grammar.kind) from None
        if done is not None and -done.returncode not in OUTSIDE:
            break
    else:
        lost = f"{what}: its process was killed or stopped, for the second time; try again later"
        raise CompileFailure(lost, "unavailable", grammar.kind)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CompileFailure(f"{what}: {last}", "crash", grammar.kind)
    try:
        found = json.loads(done.stdout)
    except ValueError as error:
        raise CompileFailure(f"{what}: its answer is no JSON: {error}", "crash") from None
    return None if found is None else str(found)[:MOST_CHARACTERS]


class _TakesLong(Exception):
    """A check that ran is over its time."""


def _run(body: bytes, time_s: float) -> subprocess.CompletedProcess[bytes] | None:
    """Check in a new process; None if it was stopped."""
    command = [sys.executable, "-c", START, json.dumps(sys.path), str(os.getpid())]
    pipe, clean = subprocess.PIPE, without_secrets(os.environ)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=clean) as process:
        try:
            out, err = process.communicate(body, time_s)
        except subprocess.TimeoutExpired:
            if is_stopped(process.pid):
                return None
            raise _TakesLong from None
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def main(parent: int) -> None:
    """Entry point of the new process; reads standard input, writes standard output."""
    end_with(parent)
    sys.stdout.write(json.dumps(violation(*pickle.load(sys.stdin.buffer))))
