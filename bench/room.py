"""What whole outputs cost in mask time: near the end of the room, and far from it.

``python -m bench.room [--data FILE.jsonl] [--limit N] [--backend NAME] [--tokenizer PATH]
[--vocab N] [--rounds R] [--quick] [--json PATH]`` takes schemas (as ``bench.maskbench`` does) and
feeds each its first valid instance, token by token. Near the end the text has as many tokens as the
grammar's shortest, 2 and 8 more, and as many as the instance and 5 more; from where a mask forbids
the instance, tokens are drawn from it. Far from it the text has 600 tokens, and is fed with its
room looked after and without, in turns.

Fields of the last line, beside those of every record (``bench.common``): ``schemas``, ``untold``
(nothing tells how long their texts are), ``vocabulary``, ``backend``; ``near_ms`` (masks for which
the end of the room was looked at) and ``narrowed_ms`` (those of them that were narrowed), the
matcher's own mask included, with ``p50``, ``p90``, ``p99``, ``max`` and ``n``; ``far_ratio`` (a
schema's grammar time with its room looked after over without, medians of the rounds) with ``p10``,
``p50``, ``p90`` and ``n``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common import Run, flags, median, percentile
from bench.maskbench import QUICK, compact, percentiles
from bench.masks import schemas, tokens
from bench.masks.order import Order
from bench.masks.tokens import Tokens
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import CompiledGrammar, Matcher
from overlap_spec.grammar.room.matcher import RoomMatcher, least_tokens
from overlap_spec.grammar.rows import allowed, tokens_of

MORE, BEHIND, MOST_TOKENS, FAR_TOKENS = (0, 2, 8), 5, 300, 600


class Feed:
    """Feeds matchers token by token, a mask row before each, as an engine without drafts does.

    Args:
        words: Of a mask row.
    """

    def __init__(self, words: int) -> None:
        self.rows = np.zeros((1, words), np.int32)
        self._token, self._none = np.zeros(1, np.int64), np.full(1, -1, np.int64)

    def fill_ms(self, matcher: Matcher) -> float:
        """How long the next mask row takes."""
        start = time.perf_counter_ns()
        matcher.fill_tree(self._token, self._none, self._none, self.rows)
        return (time.perf_counter_ns() - start) / 1e6

    def accept_ms(self, matcher: Matcher, token: int) -> float:
        """How long a token takes, which the row allows."""
        start = time.perf_counter_ns()
        accepted = matcher.accept(token)
        end = time.perf_counter_ns()
        if not accepted:
            raise RuntimeError(f"token {token} is in the mask and was not accepted")
        return (end - start) / 1e6


def near(
    compiled: CompiledGrammar, ids: Sequence[int], most: int, feed: Feed, seed: int
) -> list[tuple[float, bool]]:
    """The milliseconds of each mask for which the end of the room was looked at, and whether it
    was narrowed, of a text of at most so many tokens."""
    assert compiled.room is not None
    matcher = RoomMatcher(compiled.matcher(), compiled.room, most)
    rng, follows, found = random.Random(seed), True, []
    for at in range(most):
        took_ms = feed.fill_ms(matcher)
        if matcher.chart is not None:
            plain = np.zeros_like(feed.rows[0])
            matcher.inner.fill(plain)
            found.append((took_ms, not np.array_equal(plain, feed.rows[0])))
        token = ids[at] if at < len(ids) else matcher.vocabulary.stop_ids[0]
        follows = follows and allowed(feed.rows[0], token)
        feed.accept_ms(matcher, token if follows else rng.choice(tokens_of(feed.rows[0]).tolist()))
        if matcher.is_terminated:
            break
    return found


def far_ms(matcher: Matcher, ids: Sequence[int], feed: Feed) -> float:
    """The grammar time of a text."""
    return sum(feed.fill_ms(matcher) + feed.accept_ms(matcher, token) for token in ids)


def measure(
    compiled: CompiledGrammar, ids: Sequence[int], feed: Feed, options: Any
) -> dict[str, Any]:
    """One schema's figures, with its text."""
    least = least_tokens(compiled, 0)
    assert least is not None
    mosts = [*(least + more for more in MORE), max(least, len(ids) + BEHIND)]
    masks = [mask for most in mosts for mask in near(compiled, ids, most, feed, options.seed)]
    taken_ms: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(options.rounds + 1):
        for kept in (True, False) if turn % 2 else (False, True):
            matcher = compiled.matcher()
            if kept:
                assert compiled.room is not None
                matcher = RoomMatcher(matcher, compiled.room, FAR_TOKENS)
            took_ms = far_ms(matcher, ids, feed)
            # The first turn warms up.
            if turn:
                taken_ms[kept].append(took_ms)
    return {
        "least": least,
        "tokens": len(ids),
        "near_ms": [round(ms, 4) for ms, _ in masks],
        "narrowed_ms": [round(ms, 4) for ms, narrow in masks if narrow],
        "far_ratio": median(taken_ms[True]) / median(taken_ms[False]),
    }


def text_of(entry: dict[str, Any], chosen: Tokens) -> list[int]:
    """The tokens of a schema's first valid instance; none where it has none."""
    cases = (case["data"] for case in entry.get("tests", []) if case["valid"])
    order = Order(entry["schema"])
    return next((chosen.encode(compact(order.apply(data))) for data in cases), [])[:MOST_TOKENS]


def main(arguments: list[str] | None = None) -> None:
    """Run all and print one record."""
    parser = flags("room", "what it costs that outputs are whole, in mask time")
    schemas.add_flags(parser)
    parser.add_argument("--backend", default="auto", help="grammar backend (default auto)")
    tokens.add_flags(parser)
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="far from the end")
    options = parser.parse_args(arguments)
    run = Run("room", options, arguments)
    entries = schemas.entries_of(options, QUICK)
    chosen = tokens.read(options.tokenizer, options.vocab, options.seed)
    feed = Feed(chosen.vocabulary.words)
    with (
        GrammarCompiler(load(options.backend)(chosen.vocabulary), cache_bytes=0) as compiler,
        run.progress() as bar,
    ):
        task = bar.add_task("schemas", total=len(entries))
        for entry in entries:
            bar.advance(task)
            ids = text_of(entry, chosen)
            grammar = Grammar.json_schema(entry["schema"], additional_properties="schema")
            try:
                compiled = compiler.compile(grammar, 0)
            except GrammarError:
                continue
            if compiled.room is None or compiled.room.chart() is None:
                run.sample(id=entry["id"], least=None)
            elif ids and is_taken(compiled, ids):
                run.sample(id=entry["id"], **measure(compiled, ids, feed, options))
    told = [sample for sample in run.samples if sample["least"] is not None]
    ratios = [sample["far_ratio"] for sample in told]
    far = {f"p{p}": percentile(ratios, p) for p in (10, 50, 90)} if ratios else {}
    run.finish(
        options.rounds,
        schemas=len(told),
        untold=[sample["id"] for sample in run.samples if sample["least"] is None],
        near_ms=percentiles([ms for sample in told for ms in sample["near_ms"]]),
        narrowed_ms=percentiles([ms for sample in told for ms in sample["narrowed_ms"]]),
        far_ratio={**far, "n": len(ratios)},
        backend=options.backend,
        vocabulary=chosen.vocabulary.size,
    )


def is_taken(compiled: CompiledGrammar, ids: Sequence[int]) -> bool:
    """Whether a grammar takes a text's tokens."""
    matcher = compiled.matcher()
    return all(matcher.accept(token) for token in ids)


if __name__ == "__main__":
    main()
