"""The registry of drafters, and drafters whose faults cost no request anything."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from overlap_spec.config import drafter_names
from overlap_spec.drafters.base import Drafter
from overlap_spec.drafters.registry import load_drafter
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.tiers import Tier
from overlap_spec.types import Output
from overlap_spec.worker.drafter_guard import FIRST_PAUSE_STEPS, OFF, DrafterGuard
from tests.support.tiers import few

OWN = "tests.support.drafters:"
PROMPTS = ["abcabcabc", "the train to platform 4", "xyz", "0123 0123 0123"]
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,9}"), Grammar.regex("(ab)+c"), None]


def ask(tiny: dict[str, Any], **settings: Any) -> tuple[list[Output], dict[str, Any]]:
    with Engine(**{**tiny, "context_length": 256, **settings}) as engine:
        outputs = engine.generate(
            PROMPTS, GRAMMARS, {"max_tokens": 60, "temperature": 0, "logprobs": 1}
        )
        return outputs, engine.snapshot()


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    return ask(tiny, algorithm="none", overlap="none")[0]


def same(mine: list[Output], theirs: list[Output]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


@pytest.mark.parametrize("name", drafter_names())
def test_every_file_is_a_drafter(name: str) -> None:
    drafter = load_drafter(name)
    assert issubclass(drafter, Drafter)
    assert drafter.__module__ == f"overlap_spec.drafters.{name}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.support.drafters:NoDrafter", "no Drafter"),
        ("tests.support.drafters:Absent", "no Drafter"),
        ("no.such.module:Class", "no.such.module"),
        ("telepathy", "must be one of"),
    ],
)
def test_what_is_no_drafter_is_an_error(tiny: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(**tiny, algorithm=name)


@pytest.mark.parametrize("overlap", few(("none", "once-sync"), "once-sync"))
@pytest.mark.parametrize("tree", few(({}, {"eagle_topk": 3, "num_draft_tokens": 12}), {}))
@pytest.mark.parametrize("kind", ["Echo", "Unrecorded", "Garbage", "OnHost"])
def test_a_users_own_drafter_changes_no_text(
    tiny: dict[str, Any], plain: list[Output], kind: str, tree: dict[str, Any], overlap: str
) -> None:
    outputs, state = ask(tiny, algorithm=OWN + kind, adaptive="static", overlap=overlap, **tree)
    same(outputs, plain)
    refused = state["drafter"].pop("refused_nodes")
    # Its trees are no chains.
    assert (refused > 0) == (kind == "Garbage" and not tree)
    assert state["drafter"] == {
        "name": OWN + kind, "paused": False, "faults": 0, "last_error": None,
    }  # fmt: skip
    assert sum(o.stats.drafted_tokens for o in outputs) > 0


def test_dead_nodes_are_not_counted_as_drafted(tiny: dict[str, Any]) -> None:
    settings = {"adaptive": "static", "eagle_topk": 3, "num_draft_tokens": 12}
    outputs, _ = ask(tiny, algorithm=OWN + "Garbage", **settings)
    # Of 11 drafted nodes 5 and 10 are dead, and with 5 its child 11.
    for output in outputs:
        assert output.stats.drafted_tokens == 8 * output.stats.verifies


@pytest.mark.parametrize("kind", ["Raises", "RaisesInExtend", "Frozen", "FrozenSize", "TooLong"])
def test_a_fault_costs_no_request(
    tiny: dict[str, Any], plain: list[Output], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        outputs, state = ask(tiny, algorithm=OWN + kind, adaptive="static", num_steps=3)
    same(outputs, plain)
    assert state["drafter"]["faults"] >= 1
    assert state["drafter"]["last_error"]
    assert any(OWN + kind in record.getMessage() for record in caplog.records)


def test_a_recording_that_froze_a_value_is_named(tiny: dict[str, Any]) -> None:
    """It runs unrecorded once its pause is over."""
    with Engine(**tiny, algorithm=OWN + "Frozen", adaptive="static") as engine:
        first = engine.generate("abcabc", None, {"max_tokens": 80})
        state = engine.snapshot()["drafter"]
        assert "Frozen" in state["last_error"]
        assert "recorded = False" in state["last_error"]
        assert not state["paused"]
        assert first.stats.drafted_tokens > 0


def test_a_drafter_that_hangs_is_waited_for(tiny: dict[str, Any], plain: list[Output]) -> None:
    outputs, state = ask(tiny, algorithm=OWN + "Sleeps", adaptive="static")
    same(outputs, plain)
    assert state["drafter"]["faults"] == 0


def test_pauses_double_until_the_drafter_has_worked_as_long() -> None:
    guard, tier = DrafterGuard("mine"), Tier(3, 1, 4)

    def paused_steps() -> int:
        with guard:
            raise ValueError("x")
        steps = 0
        while guard.allow(tier) == OFF:
            steps += 1
        return steps

    assert guard.allow(tier) == tier
    assert [paused_steps() for _ in range(3)] == [
        FIRST_PAUSE_STEPS, 2 * FIRST_PAUSE_STEPS, 4 * FIRST_PAUSE_STEPS,
    ]  # fmt: skip
    assert guard.faults == 3
    for _ in range(8 * FIRST_PAUSE_STEPS):
        assert guard.allow(tier) == tier
    assert paused_steps() == FIRST_PAUSE_STEPS
