"""Serving compiles nothing that the start did not: no step waits for Triton's compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.speculation.tiers import SlotPolicy
from overlap_spec.worker import build as build_module
from overlap_spec.worker.phases import Phases
from tests.support import chaos
from tests.support.held_graphs import HeldGraphs, all_columns, held_graphs
from tests.support.specialisations import Key, noted_kernels
from tests.support.tiers import few

pytestmark = pytest.mark.ci

TIERS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "none"},
    "chain": {"num_steps": 3, "adaptive": "static"},
    "tree": {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 9, "adaptive": "static"},
    "several": {"adaptive": "default"},
}
EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    {"temperature": 0.7, "seed": 5, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {5: 2.0}, "min_tokens": 2},
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of one size each, over all columns of the page tables; and a warm start."""
    monkeypatch.setattr(build_module, "recordings_of", held_graphs)
    monkeypatch.setattr(Phases, "_visible", all_columns)
    traits = build_module.traits_of
    monkeypatch.setattr(
        build_module, "traits_of", lambda phases: replace(traits(phases), compiles=True)
    )


def serve(engine: Engine, batches: range) -> None:
    """Random requests, and one of each kind alone and beside others."""
    for seed in batches:
        chaos.run(engine, chaos.random_asks(seed))
    grammar = Grammar.regex(r"[a-f]{3}-\d{1,9}")
    for asked in EVERYTHING:
        for allowed in (None, grammar):
            engine.generate("a b c", allowed, {**asked, "max_tokens": 6})
    # Beside a request that takes no drafts, only some nodes are verified.
    asked = [*EVERYTHING[:3], {"temperature": 0.0, "speculate": False}]
    prompts, grammars = ["x" * 3, "yy", "abc" * 30, "z"], [None, grammar, None, grammar]
    for count in (1, 2, 3, 4):
        samplings = [{**each, "max_tokens": 8} for each in asked[-count:]]
        engine.generate(prompts[-count:], grammars[-count:], samplings)


def serve_many(engine: Engine) -> None:
    """Batches of 1 to 12."""
    for count in (12, 7, 3):
        # One after the other ends.
        samplings = [{"temperature": 0.0, "max_tokens": 24 + 2 * n} for n in range(count)]
        engine.generate(["abc" * 5] * count, None, samplings)


def late(
    tiny: dict[str, str],
    tier: str,
    batches: range,
    work: Callable[[Engine], None] = lambda _: None,
    **more: Any,
) -> set[Key]:
    """What is compiled after the start."""
    settings = {"dtype": "bfloat16", "overlap": "none", "mask_deadline_ms": None, **TIERS[tier]}
    settings |= more
    with noted_kernels() as keys, chaos.build(tiny, **settings) as engine:
        before = set(keys)
        assert len(before) > 10
        serve(engine, batches)
        work(engine)
        return keys - before


@pytest.mark.parametrize("tier", ["chain", "tree"])
def test_serving_compiles_nothing_that_the_start_did_not(tiny: dict[str, str], tier: str) -> None:
    assert late(tiny, tier, range(300, 302)) == set()


@pytest.mark.parametrize(("steps", "largest"), few([(5, None), (7, 1), (7, None)], (7, 1)))
def test_tiers_are_warm_at_the_sizes_that_take_them(
    tiny: dict[str, str], steps: int, largest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of 7 up to batches of 7, filled up to 8, but where they are what a fault leaves; and
    limits that are too low are seen."""
    if largest is not None:
        monkeypatch.setattr(SlotPolicy, "largest_batch", lambda *_: largest)
    warmed: set[tuple[int, int]] = set()
    find = HeldGraphs.verify

    def noted(graphs: Any, tier: Any, size: int) -> Any:
        warmed.add((tier.steps, size))
        return find(graphs, tier, size)

    monkeypatch.setattr(HeldGraphs, "verify", noted)
    after = late(tiny, "several", range(0), serve_many, max_running_requests=12, num_steps=steps)
    assert bool(after) is (largest is not None)
    sizes = {size for taken, size in warmed if taken == 7}
    assert max(sizes) == (8 if steps == 5 else 12)


def test_a_warm_start_leaves_no_trace(tiny: dict[str, str]) -> None:
    with chaos.build(tiny, overlap="none", num_steps=3, adaptive="static") as engine:
        runner = engine.core.worker.runner
        for pool in (runner.pool, *runner.draft_pools):
            assert not pool.k.any()
            assert not pool.v.any()
        assert not runner.page_features[:-1].any()
        assert not runner.tables.committed.any()
        assert not runner.tables.roots.any()
        assert (runner.told.forced == -1).all()
