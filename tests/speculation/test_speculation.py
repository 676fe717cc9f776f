"""The published length policy: hand-computed traces, presets, config files, snapshots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.speculation.policy import LengthPolicy, StaticPolicy, static_tier
from overlap_spec.speculation.presets import (
    POLICY_NAMES,
    PRESETS,
    load_policy,
    policy_of,
    read_config,
)
from overlap_spec.speculation.tiers import EmaSlot, SlotSettings
from overlap_spec.tiers import Tier
from tests.support.policies import told, view

OFF = Tier(0, 1, 1)


def chain(steps: int) -> Tier:
    return static_tier(steps, 1, None)


def sharp(*candidates: int, start: int, **settings: Any) -> EmaSlot:
    """A slot that decides at every verify on that verify alone."""
    at_once = {"ema_alpha": 1.0, "update_interval": 1, "warmup_batches": 0}
    return EmaSlot(SlotSettings(candidates, **{**at_once, **settings}), start)


def walk(slot: EmaSlot, *accepted: Sequence[int]) -> list[int]:
    """Active steps after each verify, drafted with what was active."""
    steps = []
    for runs in accepted:
        slot.observe(slot.steps, runs)
        steps.append(slot.steps)
    return steps


def feed(policy: LengthPolicy, batch: int, accepted: int, times: int) -> list[int]:
    steps = []
    for _ in range(times):
        tier = policy.choose(view(batch)).tier
        policy.observe(told(batch, tier, [min(accepted, tier.steps)] * batch))
        steps.append(tier.steps)
    return steps


def slots_of(policy: LengthPolicy) -> dict[int, dict[str, Any]]:
    return {slot["min_batch_size"]: slot for slot in policy.snapshot()["slots"]}


# Where it starts, and when it decides.


def test_starts_at_launch_steps_or_the_middle_with_a_neutral_ema() -> None:
    at_launch = EmaSlot(SlotSettings((1, 3, 7)), 7)
    assert (at_launch.steps, at_launch.ema) == (7, 6.0)
    elsewhere = EmaSlot(SlotSettings((7, 1, 3, 3)), 5)
    assert (elsewhere.candidates, elsewhere.steps, elsewhere.ema) == ((1, 3, 7), 3, 2.0)
    assert EmaSlot(SlotSettings((1, 3, 5, 7)), 2).steps == 5


@pytest.mark.parametrize("name", ["default", "aggressive", "with_off", "auto"])
def test_no_batch_takes_a_tier_beyond_its_limit(name: str) -> None:
    """Nor is a limit higher than it need be."""
    policy = load_policy(name, 5, 1, None)
    limits = {tier: policy.largest_batch(tier) for tier in policy.tiers}
    seen: dict[Tier, int] = {}
    for batch in (1, 2, 7, 8, 20, 31, 32, 63, 64, 127, 128, 200):
        for accepted in (0, 7):
            for _ in range(60):
                tier = policy.choose(view(batch)).tier
                policy.observe(told(batch, tier, [min(accepted, tier.steps)] * batch))
                seen[tier] = max(batch, seen.get(tier, 0))
    for tier, most in seen.items():
        assert most <= (limits[tier] or 200)
    if name != "auto":
        assert {t: limit or 200 for t, limit in limits.items()} == seen


def test_ema_is_of_the_batch_mean() -> None:
    slot = EmaSlot(SlotSettings((1, 3, 7)), 3)
    slot.observe(3, [3, 0, 3, 2])
    assert slot.ema == pytest.approx(0.8 * 2 + 0.2 * 2)
    slot.observe(3, [1, 0])
    assert slot.ema == pytest.approx(0.8 * 2.0 + 0.2 * 0.5)


def test_defaults_decide_at_verify_15_then_every_5() -> None:
    """From 2.0 with 3 accepted: 3 - 0.8^n, over 2.5 from n = 4 on; the move waits for 10 + 5."""
    policy = load_policy("default", 3, 1, None)
    assert feed(policy, 1, 3, 16) == [3] * 15 + [7]
    # Then nothing accepted: (3 - 0.8^16) · 0.8^4 = 1.22 <= 2.25 at verify 20, one tier down.
    assert feed(policy, 1, 0, 6) == [7] * 4 + [3] * 2
    assert slots_of(policy)[1]["ema"] == pytest.approx((3 - 0.8**16) * 0.8**6)
    # (3 - 0.8^16) · 0.8^9 = 0.40 > 0.25 at verify 25, and · 0.8^14 = 0.13 at verify 30.
    assert feed(policy, 1, 0, 9) == [3] * 8 + [1]


# Thresholds: down at <= previous - 0.5 + down, up at > current - 0.5 + up.


@pytest.mark.parametrize(
    ("start", "accepted", "after"),
    [
        (7, [2, 2, 2, 3], 3),  # 2.25 = (3 - 0.5) - 0.25: down at the threshold
        (7, [2, 2, 3, 3], 7),  # 2.5 is over it
        (3, [0, 0, 0, 1], 1),  # 0.25 = (1 - 0.5) - 0.25
        (3, [0, 0, 1], 3),
        (3, [2, 3], 3),  # 2.5 = 3 - 0.5: not up at the threshold
        (3, [2, 3, 3], 7),
        (1, [0, 1], 1),
        (1, [0, 1, 1], 3),
    ],
)
def test_default_thresholds(start: int, accepted: list[int], after: int) -> None:
    assert walk(sharp(1, 3, 7, start=start), accepted) == [after]


# The ceiling: max(1, ceil(ema · coeff)), never on a move up.


def test_ceiling_caps_a_tier_that_stays() -> None:
    assert walk(sharp(1, 3, 7, start=7, ceiling_coeff=2.0), [3, 3]) == [3]  # ceiling 6
    assert walk(sharp(1, 3, 7, start=7, ceiling_coeff=2.0), [3, 4]) == [7]  # ceiling 7
    assert walk(sharp(1, 3, 7, start=7, ceiling_coeff=1.0), [0]) == [1]  # ceiling at least 1


def test_ceiling_does_not_stop_a_move_up_and_so_bounces() -> None:
    slot = sharp(1, 3, start=1, ceiling_coeff=1.2)
    assert walk(slot, [1], [1], [1], [1]) == [3, 1, 3, 1]


# Tier 0.


def test_off_is_entered_at_half_and_left_by_a_probe_at_the_next_decision() -> None:
    policy = load_policy("with-off", 1, 1, None)
    # From ema 0 at tier 1 with nothing accepted: off at verify 15, on at 20, off at 25.
    assert feed(policy, 8, 0, 30) == [1] * 15 + [0] * 5 + [1] * 5 + [0] * 5
    slot = slots_of(policy)[8]
    assert (slot["ema"], slot["switches"], slot["count"]) == (0.0, 4, 30)


def test_a_slot_that_starts_off_probes_with_a_neutral_ema() -> None:
    slot = sharp(0, 3, start=0)
    assert slot.ema == -1.0
    assert walk(slot, [0]) == [3]
    assert slot.ema == 2.0


def test_a_slot_with_nothing_but_off_stays() -> None:
    policy = load_policy("with-off", 3, 1, None)
    assert set(feed(policy, 64, 0, 50)) == {0}
    assert policy.choose(view(64)).tier == OFF


# Late results.


def test_late_result_that_drafted_counts_when_off_by_now() -> None:
    slot = sharp(0, 1, start=1, ema_alpha=0.5, down_hysteresis=0.0, update_interval=2)
    assert walk(slot, [0], [0]) == [1, 0]
    slot.observe(1, [1])  # its step was drafted before the switch
    assert (slot.steps, slot.ema) == (0, 0.5)


def test_empty_and_foreign_results_are_passed_over() -> None:
    policy = load_policy("default", 3, 1, None)
    before = policy.snapshot()
    policy.observe(told(1, chain(3), []))
    policy.observe(told(1, OFF, [0]))  # a step that the engine did not draft for
    policy.observe(told(8, chain(7), [7] * 8))
    policy.observe(told(1, Tier(3, 2, 4), [3]))
    assert policy.snapshot() == before


# Slots, tiers, presets.


def test_slots_are_lower_bounds_and_independent() -> None:
    policy = load_policy("default", 7, 1, None)
    feed(policy, 7, 0, 100)
    assert [policy.choose(view(size)).tier.steps for size in (1, 7, 8, 31, 32, 500)] == [
        1,
        1,
        3,
        3,
        1,
        1,
    ]
    counts = {bound: slot["count"] for bound, slot in slots_of(policy).items()}
    assert counts == {1: 100, 8: 0, 32: 0}


# Slot: candidate steps, and what is not SGLang's default of a slot.
PUBLISHED: dict[str, dict[int, tuple[tuple[int, ...], dict[str, float]]]] = {
    "default": {1: ((1, 3, 7), {}), 8: ((1, 3), {"down_hysteresis": 0.0}), 32: ((1,), {})},
    "aggressive": {1: ((1, 3, 7), {}), 8: ((1, 3, 7), {"ceiling_coeff": 3.0}),
        64: ((1, 3), {"ceiling_coeff": 1.67}), 128: ((1, 3), {"ceiling_coeff": 1.2})},
    "with_off": {1: ((1, 3, 5, 7), {}), 8: ((0, 1, 3), {"down_hysteresis": 0.0}),
        32: ((0, 1), {"down_hysteresis": 0.0}), 64: ((0,), {"down_hysteresis": 0.0})},
}  # fmt: skip
EVERY = {
    "ema_alpha": 0.2, "update_interval": 5, "warmup_batches": 10, "down_hysteresis": -0.25,
    "up_hysteresis": 0.0, "ceiling_coeff": 0.0,
}  # fmt: skip


def test_every_parameter_of_every_preset() -> None:
    found = {
        name: {bound: asdict(slot) for bound, slot in slots.items()}
        for name, slots in PRESETS.items()
    }
    assert found == {
        name: {
            bound: {"candidate_steps": steps, **EVERY, **own}
            for bound, (steps, own) in slots.items()
        }
        for name, slots in PUBLISHED.items()
    }
    for name in PUBLISHED:
        spelled = load_policy(name.upper().replace("_", "-"), 3, 1, 4)
        told = {bound: slot["candidate_steps"] for bound, slot in slots_of(spelled).items()}
        assert told == {bound: list(steps) for bound, (steps, _) in PUBLISHED[name].items()}


@pytest.mark.parametrize("setting", ["num_steps", "eagle_topk", "num_draft_tokens"])
@pytest.mark.parametrize(
    "policy", ["adaspec", "AdaSpec-Minus", "off", "bench.baselines:ThresholdPolicy"]
)
def test_a_setting_that_the_policy_ignores_is_refused(policy: str, setting: str) -> None:
    policy_of(EngineConfig(adaptive=policy))
    with pytest.raises(ConfigError, match=rf"^{setting}: the length policy '{policy}'"):
        policy_of(EngineConfig(adaptive=policy, **{setting: 4}))


def test_a_chain_that_is_adaptive_verifies_what_it_drafts_or_says_so() -> None:
    """As many nodes as the launch chain has change nothing; others would be ignored."""
    policy_of(EngineConfig(adaptive="default", num_steps=3, num_draft_tokens=4))
    with pytest.raises(ConfigError, match=r"^num_draft_tokens: the chains of 'default'"):
        policy_of(EngineConfig(adaptive="default", num_steps=3, num_draft_tokens=3))


def test_tree_tiers_are_bounded_by_the_launch_nodes() -> None:
    policy = load_policy("with-off", 3, 4, 32)
    assert policy.tiers == (
        OFF, Tier(1, 4, 5), Tier(3, 4, 32), Tier(5, 4, 32), Tier(7, 4, 32),
    )  # fmt: skip
    assert load_policy("default", 3, 2, 10).tiers == (Tier(1, 2, 3), Tier(3, 2, 10), Tier(7, 2, 10))


def test_static() -> None:
    policy = load_policy("Static", 5, 4, 16)
    assert isinstance(policy, StaticPolicy)
    tier = Tier(5, 4, 16)
    assert policy.tiers == (tier,)
    policy.observe(told(3, tier, [0, 0, 0]))
    assert policy.choose(view(3)).tier == tier
    assert policy.snapshot()["count"] == 1
    assert load_policy("static", 5, 1, 4).choose(view(1)).tier == Tier(5, 1, 4)
    assert load_policy("static", 0, 1, None).choose(view(1)).tier == OFF


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_snapshot_is_plain_and_has_one_shape(name: str) -> None:
    policy = load_policy(name, 3, 1, None)
    feed(policy, 1, 2, 40)
    data = policy.snapshot()
    assert json.loads(json.dumps(data)) == data
    assert set(data) >= {"policy", "count", "switches", "active", "slots"}
    assert {"steps", "top_k", "nodes", "reason"} <= set(data["active"])
    assert (data["policy"], data["count"]) == (name, 40)
    figures = ["ema", "count", "switches"]
    for slot in data["slots"]:
        assert list(slot) == [
            "min_batch_size", "steps", "top_k", "nodes", "candidate_steps", *figures,
        ]  # fmt: skip


# Config files.


def test_the_published_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "adaptive_spec.json"
    path.write_text(
        json.dumps(
            {
                "ema_alpha": 0.3,
                "update_interval": 4,
                "warmup_batches": 0,
                "8": {"candidate_steps": [3, 1], "up_hysteresis": 0.5, "ceiling_coeff": 2},
                "1": {"candidate_steps": [1, 5], "down_hysteresis": -0.5},
            }
        )
    )
    assert read_config(str(path)) == {
        1: SlotSettings((1, 5), 0.3, 4, 0, down_hysteresis=-0.5),
        8: SlotSettings((3, 1), 0.3, 4, 0, up_hysteresis=0.5, ceiling_coeff=2),
    }
    policy = load_policy(str(path), 5, 1, None)
    assert policy.snapshot()["policy"] == str(path)
    assert policy.tiers == (chain(1), chain(3), chain(5))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "line 1"),
        ("[1]", "list"),
        ("{}", "slot"),
        ('{"ema_alpha": 0.2}', "no slot"),
        ('{"ema": 1, "1": {"candidate_steps": [1]}}', "'ema'"),
        ('{"one": {"candidate_steps": [1]}}', "'one'"),
        ('{"01": {"candidate_steps": [1]}}', "'01'"),
        ('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [3]}}', "'1' stands twice"),
        ('{"candidate_steps": [1, 3]}', "candidate_steps"),
        ('{"1": [1, 3]}', "slot '1'"),
        ('{"1": {}}', "slot '1': candidate_steps is missing"),
        ('{"1": {"candidate_steps": []}}', "slot '1': candidate_steps"),
        ('{"1": {"candidate_steps": [1, -1]}}', "slot '1': candidate_steps"),
        ('{"8": {"candidate_steps": [1], "up": 1}}', "slot '8': unknown key 'up'"),
        ('{"8": {"candidate_steps": [1], "down_hysteresis": 1e999}}', "slot '8': down_hysteresis"),
        ('{"8": {"candidate_steps": [1], "ceiling_coeff": -1}}', "slot '8': ceiling_coeff"),
        ('{"ema_alpha": 0, "1": {"candidate_steps": [1]}}', "ema_alpha"),
        ('{"update_interval": 0, "1": {"candidate_steps": [1]}}', "update_interval"),
        ('{"warmup_batches": null, "1": {"candidate_steps": [1]}}', "warmup_batches"),
    ],
)
def test_config_errors_name_the_key(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(str(path), 3, 1, None)
    assert names in str(caught.value)
    assert "broken.json" in str(caught.value)


class Own(StaticPolicy):
    """A user's own policy: one step less than the launch."""

    def __init__(self, launch: Tier) -> None:
        super().__init__(chain(launch.steps - 1), "own")


def test_a_policy_of_ones_own() -> None:
    policy = load_policy(f"{__name__}:Own", 3, 1, None)
    assert policy.tiers == (chain(2),)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no.such.module:Class", "No module named 'no"),
        ("json:NoSuchClass", "NoSuchClass is no LengthPolicy of json"),
        ("json:JSONDecoder", "JSONDecoder is no LengthPolicy of json"),
    ],
)
def test_a_class_that_is_no_policy(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_policy(name, 3, 1, None)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["agressive", "guarded", "threshold", "specinfer"])
def test_an_unknown_name_is_told_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=r"auto, .*with-off, package\.module:Class.*No such file"):
        load_policy(name, 3, 1, None)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable file"):
        load_policy(str(tmp_path), 3, 1, None)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.json"):
        load_policy(str(binary), 3, 1, None)
