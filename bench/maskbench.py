"""How many schemas a backend gets right, and how fast its masks are.

``python -m bench.maskbench [--data FILE.jsonl] [--backend auto|xgrammar|outlines|llguidance]
[--vocab N] [--limit N] [--in-process] [--quick] [--json PATH]`` compiles each schema and feeds each
of its instances token by token, as compact JSON with its keys in schema order. A line of the file
is ``{"id", "schema", "tests": [{"valid", "data"}]}``.

Each schema lands in exactly one class: ``clean`` (at least one instance, all right), ``untested``
(compiles, no instance), ``refused``, ``over_constrained`` (a valid instance rejected),
``order_only`` (rejected in schema order, but let through as the file has it),
``under_constrained`` (an invalid one let through; it outranks over), ``crash``, ``timeout``,
``out_of_memory``.

Fields of the last line, beside those of every record (``bench.common``): ``counts``, ``schemas``,
``backend``, ``vocabulary``, ``ttfm_ms`` (time to first mask: from the grammar's text
to the first row, compiling and its process included), ``tbm_us`` (time between masks: one accept
and one fill), both with ``mean``, ``p50``, ``p90``, ``p99``, ``max`` and ``n``, ``routes`` (schemas
by the backend that took them) and ``failures`` (what happened to each schema that is not clean).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.backends.base import percentiles
from bench.common import Run, flags
from bench.masks import VOCABULARY, Order, Tokens, add_flags, entries_of, padded_tokens
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import CompiledGrammar

CLASSES = (
    "clean", "untested", "refused", "over_constrained", "order_only", "under_constrained", "crash",
    "timeout", "out_of_memory",
)  # fmt: skip
QUICK = 40


@dataclass
class Result:
    """What became of one schema."""

    name: str = "untested"
    reason: str = ""
    ttfm_ms: float | None = None
    tbm_us: list[float] = field(default_factory=list)
    route: str | None = None


def compact(value: Any) -> str:
    """Compact JSON with characters as they are."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def feed(compiled: CompiledGrammar, ids: Sequence[int], times_us: list[float]) -> int | None:
    """Feed a text's tokens, a mask before each and one after the last.

    A token is taken where its bit is set.

    Returns:
        The index of the first token that is not legal, ``len(ids)`` where the text may not end
        there, None for a sentence of the grammar.
    """
    matcher = compiled.matcher()
    row = np.zeros(matcher.vocabulary.words, np.int32)
    for at, token in enumerate((*ids, matcher.vocabulary.stop_ids[0])):
        start = time.perf_counter_ns()
        matcher.fill(row)
        filled = time.perf_counter_ns()
        if not (int(row[token >> 5]) >> (token & 31)) & 1:
            return at
        before = time.perf_counter_ns()
        accepted = matcher.accept(token)
        times_us.append((filled - start + time.perf_counter_ns() - before) / 1000)
        if not accepted:
            raise RuntimeError(f"token {token} is in the mask and was not accepted")
    return None


def run_schema(compiler: GrammarCompiler, entry: dict[str, Any], tokens_: Tokens) -> Result:
    """Compile one schema and feed all its instances."""
    result = Result()
    start = time.perf_counter_ns()
    try:
        compiled = compiler.compile(
            Grammar.json_schema(entry["schema"], additional_properties="schema")
        )
    except GrammarError as error:
        kind = getattr(error, "kind", "refused")
        result.name = kind if kind in CLASSES else "crash"
        result.reason = str(error)
        return result
    matcher = compiled.matcher()
    matcher.fill(np.zeros(matcher.vocabulary.words, np.int32))
    result.ttfm_ms = (time.perf_counter_ns() - start) / 1e6
    route = getattr(compiled, "route", None)
    result.route = getattr(route, "backend", None) or getattr(compiled, "backend", None)
    try:
        judge(compiled, entry, tokens_, result)
    except Exception as error:
        result.name, result.reason = "crash", f"{type(error).__name__}: {error}"
    return result


def judge(
    compiled: CompiledGrammar, entry: dict[str, Any], tokens_: Tokens, result: Result
) -> None:
    """Feed the instances of a schema, and write its class into the result."""
    order = Order(entry["schema"])
    rank = {name: i for i, name in enumerate(
        ("untested", "clean", "order_only", "over_constrained", "under_constrained"))}  # fmt: skip
    for case in entry.get("tests", []):
        text = compact(order.apply(case["data"]))
        ids = tokens_.encode(text)
        stopped = feed(compiled, ids, result.tbm_us)
        found, reason = "clean", ""
        if (stopped is None) != case["valid"]:
            found, reason = "under_constrained", text
            if case["valid"]:
                as_given = feed(compiled, tokens_.encode(compact(case["data"])), [])
                found = "order_only" if as_given is None else "over_constrained"
                reason = f"at token {stopped} of {len(ids)}: {text}"
        if rank[found] > rank[result.name]:
            result.name, result.reason = found, reason[:2000]


def main(arguments: list[str] | None = None) -> None:
    """Run all and print one record."""
    parser = flags("maskbench", "what share of schemas is held exactly, and how fast masks are")
    add_flags(parser)
    parser.add_argument("--backend", default="auto", help="grammar backend (default auto)")
    parser.add_argument("--vocab", type=int, default=VOCABULARY, help="tokens (default 131072)")
    parser.add_argument("--in-process", action="store_true", help="compile here, without limits")
    options = parser.parse_args(arguments)
    run = Run("maskbench", options, arguments)
    entries = entries_of(options, QUICK)
    chosen = padded_tokens(options.vocab, options.seed)
    results: list[Result] = []
    backend = load(options.backend)(chosen.vocabulary)
    isolated = False if options.in_process else None
    with GrammarCompiler(backend, cache_bytes=0, isolated=isolated) as compiler:
        compiler.warm()
        with run.progress() as progress:
            task = progress.add_task("schemas", total=len(entries))
            for entry in entries:
                progress.advance(task)
                result = run_schema(compiler, entry, chosen)
                results.append(result)
                run.sample(id=entry["id"], result=result.name, reason=result.reason,
                           ttfm_ms=result.ttfm_ms, route=result.route,
                           tbm_us=[round(us, 2) for us in result.tbm_us])  # fmt: skip
    run.finish(
        1,
        counts=dict.fromkeys(CLASSES, 0) | Counter(result.name for result in results),
        schemas=len(results),
        ttfm_ms=percentiles(r.ttfm_ms for r in results),
        tbm_us=percentiles(us for r in results for us in r.tbm_us),
        backend=options.backend,
        vocabulary=chosen.vocabulary.size,
        routes=dict(Counter(r.route for r in results if r.route)),
        failures=[
            {"id": entry["id"], "class": result.name, "reason": result.reason}
            for entry, result in zip(entries, results, strict=True)
            if result.name not in ("clean", "untested")
        ],
    )


if __name__ == "__main__":
    main()
