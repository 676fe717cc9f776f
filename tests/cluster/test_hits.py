"""What the routing saves, on real engines without Ray: prefixes found computed in two caches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from overlap_spec import Engine, SamplingParams
from overlap_spec.cluster.prefixes import SAMPLE, PrefixMap, blocks_of, capacity_of, prompt_bytes

PREFIXES, PAGES, ROOM = 8, 8, 4
PAGE = 16
ROUNDS = 5


def hit_rate(tiny: dict[str, Any], choose: Callable[[tuple[int, ...]], int]) -> float:
    """Share of the prompts' tokens that were found, with two engines whose caches hold four and a
    half of eight prefixes beside the one request that runs."""
    rng = Random(7)
    shared = [[rng.randrange(3, 90) for _ in range(PAGES * PAGE)] for _ in range(PREFIXES)]
    order = [index for index in range(PREFIXES) for _ in range(ROUNDS)]
    rng.shuffle(order)
    tokens = ROOM * PAGES * PAGE + PAGES * PAGE // 2 + 8 * PAGE
    engines = [
        Engine(**tiny, max_total_tokens=tokens, max_running_requests=1, page_size=PAGE, num_steps=1)
        for _ in range(2)
    ]
    cached = total = 0
    try:
        for index in order:
            prompt = shared[index] + [rng.randrange(3, 90) for _ in range(PAGE)]
            body = json.dumps({"input_ids": prompt}).encode()
            engine = engines[choose(blocks_of(prompt_bytes(body)))]
            stats = engine.generate(prompt, None, SamplingParams(max_tokens=2)).stats
            cached, total = cached + stats.cached_tokens, total + stats.prompt_tokens
    finally:
        for engine in engines:
            engine.close()
    return cached / total


@pytest.mark.ci
def test_prefix_routing_finds_half_more_than_turns(tiny: dict[str, Any]) -> None:
    # What a router is told of each: a number of a list is four bytes.
    tokens = ROOM * PAGES * PAGE + PAGES * PAGE // 2 + 8 * PAGE
    known = PrefixMap(capacity_of(tokens, len(SAMPLE) // 4), slack=4)
    turns = itertools.count()

    def by_prefix(blocks: tuple[int, ...]) -> int:
        (best, *_) = known.rank(blocks, {"0": 0, "1": 0})
        known.insert(best.replica, blocks)
        return int(best.replica)

    with_router = hit_rate(tiny, by_prefix)
    in_turn = hit_rate(tiny, lambda _: next(turns) % 2)
    print(f"hit rate by prefix {with_router:.3f}, in turn {in_turn:.3f}")
    assert with_router >= 1.5 * in_turn > 0
