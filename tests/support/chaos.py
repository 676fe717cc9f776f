"""Random requests through engines whose streams have random delays, held to a serial oracle."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.engine import build as engine_build
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Output, SamplingParams
from overlap_spec.worker.streams import Streams
from tests.support.drafters import Knows
from tests.support.streams import ChaosStream, ThreadStreams

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


MODES = ("once-sync", "double-sync", "none")
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


def start(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Engines made from now on have streams with random delays."""

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
        equal(oracle, engine, random_asks(seed))


def equal(oracle: Engine, engine: Engine, asks: list[Ask]) -> None:
    wanted = run(oracle, [replace(ask, abort_step=None) for ask in asks])
    for ask, want, got in zip(asks, wanted, run(engine, asks), strict=True):
        if got.finish_reason == "abort":
            assert want.token_ids[: len(got.token_ids)] == got.token_ids, ask
            continue
        assert (got.text, got.token_ids) == (want.text, want.token_ids), ask
        assert (got.finish_reason, got.stop_match) == (want.finish_reason, want.stop_match), ask
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def hold_known(
    target: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str, tier: str, room: str
) -> None:
    """8 random batches, drafted for by who knows the answers, so that many drafts are accepted."""
    first, settings = settings_of(tier, room)
    answers: list[Sequence[int]] = []
    if tier != "plain":
        settings["algorithm"] = Knows(answers)
    oracle, plainly = build(target, overlap="none", algorithm="none"), run

    def noted(engine: Engine, asks: list[Ask]) -> list[Output]:
        outputs = plainly(engine, asks)
        if engine is oracle:
            answers.extend(output.token_ids for output in outputs)
        return outputs

    monkeypatch.setattr("tests.support.chaos.run", noted)
    start(monkeypatch, first)
    with oracle, build(target, overlap=mode, **settings) as engine:
        outputs_equal(oracle, engine, first, 8)
        # Where there is little room a batch may preempt; each kind of target has a test that does.
        assert room == "crowded" or not engine.core.scheduler.preemptions
