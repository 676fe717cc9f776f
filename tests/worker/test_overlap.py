"""The overlap scheduler under chaos: outputs equal the serial oracle's, and the laws hold."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.engine import build as engine_build
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import StepPlan
from overlap_spec.types import Output, SamplingParams
from overlap_spec.worker import worker as worker_module
from overlap_spec.worker.batch import Batch
from overlap_spec.worker.in_flight import InFlightStep
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.streams import Streams
from overlap_spec.worker.worker import Worker
from tests.support.streams import ChaosStream, ThreadStreams
from tests.support.tiers import few

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
GRAMMARS = [
    None,
    Grammar.json_schema(PERSON),
    Grammar.regex(r"[a-f]{3}-\d{1,4}"),
    Grammar.choice(["alpha", "beta", "alphabet"]),
    Grammar.ebnf('root ::= "(" root ")" | [x-z]+'),
]


@dataclass(frozen=True)
class Ask:
    """One request of a random batch, and the step after which it is aborted, if it is."""

    prompt: str
    grammar: Grammar | None
    sampling: SamplingParams
    abort_step: int | None


def random_asks(seed: int) -> list[Ask]:
    rng = random.Random(seed)
    asks = []
    for _ in range(rng.randint(1, 6)):
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 40),
            complete=False,
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=rng.randint(0, 10**9),
            stop=rng.choice([(), ("a",), ("\x05", "zz")]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            min_tokens=rng.choice([0, 0, 1]),
            logprobs=rng.choice([None, None, 2]),
        )
        prompt = "".join(rng.choice("abcxyz 0123") for _ in range(rng.randint(1, 60)))
        abort_step = rng.randint(0, 8) if rng.random() < 0.15 else None
        asks.append(Ask(prompt, rng.choice(GRAMMARS), sampling, abort_step))
    return asks


def run(engine: Engine, asks: list[Ask]) -> list[Output]:
    """All requests through one engine, with aborts between steps; checks the laws after each."""
    tickets = [engine.submit(a.prompt, a.grammar, a.sampling) for a in asks]
    steps = 0
    while any(ticket.output is None for ticket in tickets):
        for ticket, ask in zip(tickets, asks, strict=True):
            if ask.abort_step == steps and ticket.output is None:
                engine.abort(ticket)
        engine.step()
        check_laws(engine)
        steps += 1
        assert steps < 5_000
    outputs = [ticket.output for ticket in tickets]
    engine.release(tickets)
    allocator = engine.core.scheduler.allocator
    assert allocator.in_use == 0
    assert allocator.free_count == allocator.total
    assert engine.core.scheduler.idle
    assert not engine.core.grammar.matchers
    assert not engine.output_processor.open()
    return [output for output in outputs if output is not None]


def check_laws(engine: Engine) -> None:
    """Laws 1 and 6, between steps: every matcher holds its request's kept tokens, exactly."""
    scheduler = engine.core.scheduler
    allocator = scheduler.allocator
    assert allocator.in_use + allocator.free_count == allocator.total
    held = {page for s in scheduler.running for page in s.pages}
    held |= {node.page for s in scheduler.running for node in s.path}
    assert len(held) == allocator.in_use
    for sequence in scheduler.running:
        matcher = engine.core.grammar.matchers.get(sequence.request.id)
        if matcher is not None:
            assert matcher.accepted_tokens == len(sequence.output_ids)
        assert sequence.stats.output_tokens == len(sequence.output_ids)


TIERS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "none"},
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 9},
}
ROOM: dict[str, dict[str, Any]] = {
    "roomy": {},
    # A few hundred tokens of cache: running requests preempt each other.
    "crowded": {"page_size": 4, "chunked_prefill_size": 23},
}


def build(tiny: dict[str, str], **settings: Any) -> Engine:
    """Lengths that go by what was accepted alone: drafts that pay or not are the same each run."""
    small = {"context_length": 160, "max_running_requests": 4, "adaptive": "default"}
    return Engine(**{**tiny, **small, **settings})


def chaos(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def streams(*_: Any) -> Streams:
        return ThreadStreams(lambda name: ChaosStream(name, seed, 0.0005))

    monkeypatch.setattr(engine_build, "build_streams", streams)


def settings_of(tier: str, room: str) -> tuple[int, dict[str, Any]]:
    """The first seed of a tier in a room, and the engine's settings."""
    settings = {**TIERS[tier], **ROOM[room], "mask_deadline_ms": None}
    if room == "crowded":
        settings["max_total_tokens"] = 160 if tier == "tree" else 140
    return 1000 * (list(TIERS).index(tier) * 2 + list(ROOM).index(room)), settings


def outputs_equal(oracle: Engine, engine: Engine, first: int, count: int = 17) -> None:
    """Random batches through both, the laws held and the outputs the same."""
    for seed in range(first, first + count):
        asks = random_asks(seed)
        wanted = run(oracle, [replace(ask, abort_step=None) for ask in asks])
        for ask, want, got in zip(asks, wanted, run(engine, asks), strict=True):
            if got.finish_reason == "abort":
                assert want.token_ids[: len(got.token_ids)] == got.token_ids
                continue
            assert ask.abort_step is None or got.finish_reason == want.finish_reason
            assert (got.text, got.token_ids) == (want.text, want.token_ids), (seed, ask)
            assert got.finish_reason == want.finish_reason
            assert got.stop_match == want.stop_match
            assert len(got.logprobs) == len(want.logprobs)
            for a, b in zip(got.logprobs, want.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("room", few(ROOM, "crowded"))
@pytest.mark.parametrize("tier", few(TIERS, "tree"))
@pytest.mark.parametrize("mode", few(("once-sync", "double-sync", "none"), "once-sync"))
def test_chaos_never_changes_outputs(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, mode: str, tier: str, room: str
) -> None:
    """17 random batches of random requests each, so 306 seeds over all parameters."""
    first, settings = settings_of(tier, room)
    before = set(threading.enumerate())
    oracle = build(tiny, overlap="none", algorithm="none")
    chaos(monkeypatch, first)
    with oracle, build(tiny, overlap=mode, **settings) as engine:
        outputs_equal(oracle, engine, first)
        preemptions = engine.core.scheduler.preemptions
    assert (preemptions > 0) == (room == "crowded")
    # As a set: a thread of an earlier test may still be ending.
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("mode", ["once-sync", "double-sync", "none"])
@pytest.mark.parametrize("max_tokens", [1, 7, 60])
def test_nothing_is_verified_for_requests_that_have_ended(
    tiny: dict[str, str], mode: str, max_tokens: int
) -> None:
    """Ended by length or by the grammar: each verify brought tokens, the prefill's included."""
    with build(tiny, overlap=mode, num_steps=3) as engine:
        grammar = Grammar.choice(["alpha", "alphabet"])
        for _ in range(2):
            out = engine.generate(
                "abc", grammar, SamplingParams(max_tokens=max_tokens, complete=False)
            )
        verified = [s for s in engine.timeline.spans() if s.name == "verify"]
    assert len(verified) == 2 * (1 + out.stats.verifies)
    assert engine.core.scheduler.idle


@pytest.mark.parametrize("room", few(ROOM, "roomy"))
@pytest.mark.parametrize("tier", few(TIERS, "tree"))
def test_verify_waits_for_no_results_on_a_gpu(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, tier: str, room: str
) -> None:
    """As a GPU's worker orders it, under chaos: a verify that no one wants changes nothing."""
    first, settings = settings_of(tier, room)
    oracle = build(tiny, overlap="none", algorithm="none")
    chaos(monkeypatch, first)
    traits = worker_module.traits_of
    monkeypatch.setattr(
        worker_module, "traits_of", lambda runner: replace(traits(runner), verifies_ahead=True)
    )
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
    with oracle, build(tiny, **settings) as engine:
        outputs_equal(oracle, engine, first, 5)
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

    def noted(phases: Phases, batch: Batch, *rest: Any) -> Any:
        drafted.append(batch.plan.index)
        return draft(phases, batch, *rest)

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
    with build(tiny, num_steps=3, adaptive="static", mask_deadline_ms=None) as engine:
        out = engine.generate("abc", Grammar.choice(["alpha beta", "gamma"]))
        assert out.finish_reason == "stop"
    assert len(dropped) == 1
    assert drafted == list(range(drafted[0], dropped[0]))
