"""What ``bench.attack`` sends, and what it takes for a fault."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from bench.attack import faults
from bench.attack_kinds import LIMITS, MOST_TOKENS, mutations

RECORD: dict[str, Any] = {
    "good": {"requests": 100, "wrong": 0, "calm_p99_ms": 30.0, "attacked_p99_ms": 80.0},
    "health_worst_ms": 40.0,
    "schema_worst_ms": 900.0,
    "turn_worst_ms": 20.0,
    "front_peak_mib": 300.0,
    "left_over": {"open": 0},
}


def memory(engine_late_mib: float, cache_late_mib: float) -> dict[str, Any]:
    engine = {"early_mib": 500.0, "late_mib": engine_late_mib}
    cache = {"early_mib": 50.0, "late_mib": cache_late_mib, "most_mib": 700.0}
    return RECORD | {"memory": {"engine": engine, "kv_cache": cache}}


def test_changed_bodies_ask_for_few_tokens() -> None:
    asked, without = [], 0
    for path, content in mutations(Random(5), 600):
        try:
            body = json.loads(content)
        except ValueError:
            continue
        place = body.get("sampling_params") if path == "/generate" else body
        if path in LIMITS and isinstance(place, dict):
            asked.append(place.get(LIMITS[path]))
            without += asked[-1] is None
    # A changed byte may change the field's name.
    assert without < len(asked) / 20
    assert len(asked) > 300
    assert all(n <= MOST_TOKENS for n in asked if isinstance(n, int))
    # What is no number at all stays as it is.
    assert any(isinstance(n, list | dict | str) for n in asked)


def test_the_cache_may_fill_and_the_engine_may_not_grow() -> None:
    assert faults(memory(540.0, 690.0)) == []
    (found,) = faults(memory(560.0, 690.0))
    assert "engine" in found
    (found,) = faults(memory(500.0, 701.0))
    assert "kv_cache" in found


def test_good_requests_may_take_three_times_as_long() -> None:
    slow = RECORD | {"good": RECORD["good"] | {"attacked_p99_ms": 91.0}}
    assert faults(RECORD) == []
    assert len(faults(slow)) == 1
