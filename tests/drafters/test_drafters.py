"""The registry of drafters, and drafters that fail or mean no good: no request notices."""

import logging
from typing import Any

import pytest
import torch

from overlap_spec.config import drafter_names
from overlap_spec.drafters.base import Draft, Drafter
from overlap_spec.drafters.registry import load_drafter
from overlap_spec.drafters.sound import sound
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.tiers import OFF, Tier
from overlap_spec.types import Output
from overlap_spec.worker.drafter_guard import FIRST_PAUSE_STEPS, DrafterGuard
from tests.support.tiers import few

OWN = "tests.support.drafters:"
PROMPTS = ["abcabcabc", "the train to platform 4", "xyz", "0123 0123 0123"]
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,9}"), Grammar.regex("(ab)+c"), None]
SAMPLING = [
    {"max_tokens": 40, "logprobs": 1, **how}
    for how in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}) * 2
]
CHAIN: dict[str, Any] = {"num_steps": 5}
TREE: dict[str, Any] = {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12}
BROKEN = ("TooLarge", "Negative", "Twins", "Circles", "NoNumbers", "Orphans")


def ask(tiny: dict[str, Any], **settings: Any) -> tuple[list[Output], dict[str, Any]]:
    settings = {"context_length": 256, **settings}
    with Engine(**{**tiny, **settings}) as engine:
        return engine.generate(PROMPTS, GRAMMARS, SAMPLING), engine.snapshot()["drafter"]


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    return ask(tiny, algorithm="none", overlap="none")[0]


def same(mine: list[Output], theirs: list[Output]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        assert a.error is None
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


@pytest.mark.parametrize("name", ["dflash", "draft_model", "parallel"])
def test_a_model_that_drafts_needs_a_folder(tiny: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm '{name}' needs draft"):
        Engine(model=tiny["model"], algorithm=name)


@pytest.mark.parametrize("overlap", few(("none", "once-sync"), "once-sync"))
@pytest.mark.parametrize("tree", few(({}, TREE), {}))
@pytest.mark.parametrize(
    "kind", few(["Echo", "Unrecorded", "Garbage", "OnHost"], "Unrecorded", "OnHost")
)
def test_a_users_own_drafter_changes_no_text(
    tiny: dict[str, Any], plain: list[Output], kind: str, tree: dict[str, Any], overlap: str
) -> None:
    outputs, state = ask(tiny, algorithm=OWN + kind, overlap=overlap, **tree)
    same(outputs, plain)
    refused = state.pop("refused_nodes")
    # Its trees are no chains.
    assert (refused > 0) == (kind == "Garbage" and not tree)
    assert state == {
        "name": OWN + kind, "paused": False, "faults": 0, "last_error": None,
    }  # fmt: skip
    assert sum(o.stats.drafted_tokens for o in outputs) > 0


def test_dead_nodes_are_not_counted_as_drafted(tiny: dict[str, Any]) -> None:
    outputs, _ = ask(tiny, algorithm=OWN + "Garbage", **TREE)
    # Of 11 drafted nodes 5 and 10 are dead, and with 5 its child 11.
    for output in outputs:
        assert output.stats.drafted_tokens == 8 * output.stats.verifies


@pytest.mark.parametrize("graphs", few((True, False), True))
@pytest.mark.parametrize(
    "kind",
    few(
        ("Raises", "RaisesInExtend", "Frozen", "FrozenSize", "TooLong", "WrongShape", "WrongType"),
        *("RaisesInExtend", "FrozenSize", "TooLong"),
    ),
)
def test_a_fault_costs_no_request(
    tiny: dict[str, Any],
    plain: list[Output],
    kind: str,
    graphs: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        outputs, state = ask(tiny, algorithm=OWN + kind, graphs=graphs, num_steps=3)
    same(outputs, plain)
    # Without a recording nothing is frozen.
    if graphs or "Frozen" not in kind:
        assert state["faults"] >= 1
        assert state["last_error"]
        assert any(OWN + kind in record.getMessage() for record in caplog.records)


def test_a_recording_that_froze_a_value_is_named(tiny: dict[str, Any]) -> None:
    """It runs unrecorded once its pause is over."""
    with Engine(**tiny, algorithm=OWN + "Frozen") as engine:
        first = engine.generate("abcabc", None, {"max_tokens": 80})
        state = engine.snapshot()["drafter"]
        assert "Frozen" in state["last_error"]
        assert "recorded = False" in state["last_error"]
        assert not state["paused"]
        assert first.stats.drafted_tokens > 0


@pytest.mark.parametrize("overlap", few(["none", "once-sync"], "once-sync"))
@pytest.mark.parametrize("shape", few([CHAIN, TREE], TREE))
def test_nothing_but_what_the_grammar_forbids(
    tiny: dict[str, Any], plain: list[Output], shape: dict[str, Any], overlap: str
) -> None:
    outputs, state = ask(tiny, algorithm=OWN + "Forbidden", overlap=overlap, **shape)
    same(outputs, plain)
    assert (state["faults"], state["refused_nodes"]) == (0, 0)
    for output, grammar in zip(outputs, GRAMMARS, strict=True):
        assert output.stats.drafted_tokens > 0
        assert grammar is None or output.stats.accepted_drafts == 0


@pytest.mark.parametrize("graphs", few((True, False), True))
@pytest.mark.parametrize("shape", few((CHAIN, TREE), TREE))
@pytest.mark.parametrize("kind", few(BROKEN, "Circles", "Orphans"))
def test_a_node_that_breaks_the_contract_is_dead(
    tiny: dict[str, Any], plain: list[Output], kind: str, shape: dict[str, Any], graphs: bool
) -> None:
    """Of each tree the first two nodes are good, and the others are not verified."""
    outputs, state = ask(tiny, algorithm=OWN + kind, graphs=graphs, **shape)
    same(outputs, plain)
    assert state["faults"] == 0
    # Of the orphans one is dead as it should be.
    wrong = (5 if shape is CHAIN else 11) - 2 - (kind == "Orphans")
    verifies = sum(output.stats.verifies for output in outputs)
    assert sum(output.stats.drafted_tokens for output in outputs) == 2 * verifies
    assert state["refused_nodes"] >= wrong * verifies


def test_sound_drafts_stay_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        count = int(torch.randint(1, 12, (), generator=generator))
        tokens = torch.stack([torch.randperm(64, generator=generator)[:count] for _ in range(3)])
        parents = (torch.rand(3, count, generator=generator) * torch.arange(1, count + 1)).long()
        scores = torch.zeros(3, count + 1)
        for node in range(count):
            above = scores[:, : node + 1].gather(1, parents[:, node : node + 1])[:, 0]
            step = torch.rand(3, generator=generator)
            scores[:, node + 1] = above - torch.where(step < 0.1, torch.inf, step)
        draft = Draft(tokens, parents, scores[:, 1:])
        found, refused = sound(draft, Tier(count, 2, count + 1), 64)
        for mine, its in zip(found[:3], draft[:3], strict=True):
            assert mine is not None
            assert torch.equal(mine, its)
        assert refused.tolist() == [0, 0, 0]


def test_each_clause_alone() -> None:
    def of(tokens: list[int], parents: list[int] | None, scores: list[float], tier: Tier) -> Any:
        own = None if parents is None else torch.tensor([parents])
        draft = Draft(torch.tensor([tokens]), own, torch.tensor([scores], dtype=torch.float32))
        found, refused = sound(draft, tier, 10)
        return found.scores[0].tolist(), int(refused)

    dead = -torch.inf
    tree, chain = Tier(2, 2, 4), Tier(3, 1, 4)
    assert of([1, 2, 3], [0, 0, 1], [-1, -2, -3], tree) == ([-1, -2, -3], 0)
    assert of([1, 10, 3], [0, 0, 2], [-1, -2, -3], tree) == ([-1, dead, dead], 2)
    assert of([1, 1, 3], [0, 0, 1], [-1, -2, -3], tree) == ([-1, dead, -3], 1)
    assert of([1, 2, 3], [0, 1, 2], [-1, -2, -3], tree) == ([-1, -2, dead], 1)
    assert of([1, 2, 3], [0, 0, 3], [-1, -2, -3], tree) == ([-1, -2, dead], 1)
    assert of([1, 2, 3], [0, 0, 1], [-1, 2, -0.5], tree) == ([-1, 0, -1], 0)
    assert of([1, 2, 3], [0, 0, 1], [-1, float("nan"), -3], tree) == ([-1, dead, -3], 1)
    assert of([1, 2, 3], [0, 1, 1], [-1, -2, -3], chain) == ([-1, -2, dead], 1)
    assert of([1, -1, 3], None, [-1, -2, -3], chain) == ([-1, dead, dead], 2)
    assert of([1, 2, 3], None, [dead, -2, dead], chain) == ([dead, dead, dead], 1)
    with pytest.raises(ValueError, match=r"a draft's scores must be torch\.float32"):
        sound(Draft(torch.zeros(1, 3).long(), None, torch.zeros(1, 3).double()), chain, 10)


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
