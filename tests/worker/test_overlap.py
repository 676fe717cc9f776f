"""The overlap scheduler under chaos: outputs equal the serial oracle's, and the laws hold."""

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import StepPlan
from overlap_spec.types import SamplingParams
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.passes import StepTensors
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.worker import Worker
from tests.support import chaos, checkpoints
from tests.support.held_graphs import change_traits
from tests.support.models import HYBRID, V3
from tests.support.tiers import few, pairs

KEPT = {"states": HYBRID, "latents": V3}
EVERYDAY = "once-sync", "tree", "crowded"


@pytest.mark.parametrize(
    ("mode", "tier", "room"),
    few(pairs(chaos.MODES, chaos.TIERS, chaos.ROOM, given=[EVERYDAY]), EVERYDAY),
)
def test_chaos_never_changes_outputs(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, mode: str, tier: str, room: str
) -> None:
    """Random batches of random requests, 17 seeds a case."""
    first, settings = chaos.settings_of(tier, room)
    before = set(threading.enumerate())
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, first)
    with oracle, chaos.build(tiny, overlap=mode, **settings) as engine:
        chaos.outputs_equal(oracle, engine, first)
        preemptions = engine.core.scheduler.preemptions
    assert (preemptions > 0) == (room == "crowded")
    # As a set: a thread of an earlier test may still be ending. So may one of this engine's.
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("kept", "mode", "tier", "room"),
    few(
        pairs(KEPT, chaos.MODES, chaos.TIERS, chaos.ROOM, given=[("states", *EVERYDAY)]),
        ("states", *EVERYDAY),
    ),
)
def test_chaos_never_changes_outputs_of_other_caches(
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: str,
    mode: str,
    tier: str,
    room: str,
) -> None:
    """As above, where some layers keep a state, or all keep latents, in the place of keys."""
    checkpoints.write_target(tmp_path, **KEPT[kept])
    chaos.hold_known({**tiny, "model": str(tmp_path)}, monkeypatch, mode, tier, room)


@pytest.mark.parametrize("mode", few(chaos.MODES, "once-sync"))
@pytest.mark.parametrize("max_tokens", [1, 7, 60])
def test_nothing_is_verified_for_requests_that_have_ended(
    tiny: dict[str, str], mode: str, max_tokens: int
) -> None:
    """Ended by length or by the grammar: each verify brought tokens, the prefill's included."""
    with chaos.build(tiny, overlap=mode, num_steps=3) as engine:
        grammar = Grammar.choice(["alpha", "alphabet"])
        for _ in range(2):
            out = engine.generate(
                "abc", grammar, SamplingParams(max_tokens=max_tokens, complete=False)
            )
        verified = [s for s in engine.timeline.spans() if s.name == "verify"]
    assert len(verified) == 2 * (1 + out.stats.verifies)
    assert engine.core.scheduler.idle


@pytest.mark.parametrize("room", few(chaos.ROOM, "roomy"))
@pytest.mark.parametrize("tier", few(chaos.TIERS, "tree"))
def test_verify_waits_for_no_results_on_a_gpu(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, tier: str, room: str
) -> None:
    """As a GPU's worker orders it, under chaos: a verify that no one wants changes nothing."""
    first, settings = chaos.settings_of(tier, room)
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, first)
    change_traits(monkeypatch, verifies_ahead=True)
    uploaded: list[int] = []
    verified: list[int] = []
    needless, read_late = 0, 0
    upload, verify, results, drop = Worker.upload, Worker.verify, Worker.results, Worker.drop

    def note_upload(worker: Worker, plan: StepPlan) -> InFlightStep:
        uploaded.append(plan.index)
        return upload(worker, plan)

    def note_verify(worker: Worker, step: InFlightStep) -> None:
        verified.append(step.plan.index)
        verify(worker, step)

    def note_results(worker: Worker, step: InFlightStep, *rest: Any) -> Any:
        nonlocal read_late
        # Whatever step is under way has been verified, as far as the host is concerned.
        assert verified[-1] == uploaded[-1]
        read_late += uploaded[-1] == step.plan.index + 1
        return results(worker, step, *rest)

    def note_drop(worker: Worker, step: InFlightStep) -> None:
        nonlocal needless
        needless += 1
        drop(worker, step)

    notes = (
        ("upload", note_upload),
        ("verify", note_verify),
        ("results", note_results),
        ("drop", note_drop),
    )
    for name, note in notes:
        monkeypatch.setattr(Worker, name, note)
    with oracle, chaos.build(tiny, **settings) as engine:
        chaos.outputs_equal(oracle, engine, first, 5)
    assert read_late > needless > 0


def test_a_step_that_nobody_wants_is_not_drafted(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host has given it up before its drafts begin."""
    queued, decided, drafted, dropped = deque[int](), [-1], list[int](), list[int]()
    told = threading.Condition()
    extend, draft = Phases.extend, Phases.draft

    def held(phases: Phases, *rest: Any) -> None:
        """Until the host has queued the next verify, or given the next step up."""
        extend(phases, *rest)
        number = queued.popleft()
        with told:
            assert told.wait_for(lambda: decided[-1] > number, 60)

    def noted(phase: Phases, step: StepTensors, *rest: Any) -> None:
        drafted.append(step.batch.plan.index)
        draft(phase, step, *rest)

    monkeypatch.setattr(Phases, "extend", held)
    monkeypatch.setattr(Phases, "draft", noted)
    verify, drop, extend_step = Worker.verify, Worker.drop, Worker.extend

    def decide(step: InFlightStep) -> None:
        with told:
            decided.append(step.plan.index)
            told.notify()

    def note_verify(worker: Worker, step: InFlightStep) -> None:
        verify(worker, step)
        decide(step)

    def note_drop(worker: Worker, step: InFlightStep) -> None:
        drop(worker, step)
        dropped.append(step.plan.index)
        decide(step)

    def note_extend(worker: Worker, step: InFlightStep) -> None:
        if step.plan.decode_rows:
            queued.append(step.plan.index)
        extend_step(worker, step)

    for name, note in (("verify", note_verify), ("drop", note_drop), ("extend", note_extend)):
        monkeypatch.setattr(Worker, name, note)
    with chaos.build(tiny, num_steps=3, adaptive="static", mask_deadline_ms=None) as engine:
        out = engine.generate("abc", Grammar.choice(["alpha beta", "gamma"]))
        assert out.finish_reason == "stop"
    assert len(dropped) == 1
    assert drafted == list(range(drafted[0], dropped[0]))
