"""Ranks that fail: nothing of a lost step is told, and none goes on alone."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.engine import Engine
from overlap_spec.engine import build as engine_build
from overlap_spec.errors import EngineUnavailable, NumericFault
from overlap_spec.grammar.spec import Grammar
from overlap_spec.parallel.group import Group
from overlap_spec.parallel.processes import Processes
from overlap_spec.steps import StepPlan
from overlap_spec.tiers import Budget, Tier
from overlap_spec.types import Request, SamplingParams
from overlap_spec.worker import build as build_module
from overlap_spec.worker import follower as follower_module
from overlap_spec.worker.batch import PlanUpload, Staging
from overlap_spec.worker.build import Room, build_worker
from overlap_spec.worker.follower import Spans, follow
from overlap_spec.worker.in_flight import Buffers, InFlightStep
from overlap_spec.worker.lead import LeadWorker
from overlap_spec.worker.messages import encode_calls, pack_decision, take_decision
from overlap_spec.worker.passes import StepTensors
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.streams import InlineStream, InlineStreams, Value
from overlap_spec.worker.tables import SamplingFeatures
from overlap_spec.worker.worker import Worker
from tests.support.chaos import build
from tests.support.drafters import Echo
from tests.support.tiers import few


class Kept(InlineStream):
    """Keeps the spans of its work until they are asked for, as a GPU's does."""

    spans: ClassVar[list[str]] = []

    def run(self, label: str, work: Callable[..., Any], *args: Any) -> Value[Any]:
        self.spans.append(label)
        return super().run(label, work, *args)


class Noting(InlineStreams):
    """Whose spans are kept until they are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = Kept("compute")

    def note(self) -> None:
        Kept.spans.clear()


class Lost:
    """The other ranks' processes, one of which is gone from some moment on."""

    pids = ()
    on_loss: Callable[[], None]

    def __init__(self) -> None:
        self.gone = False

    def check(self) -> None:
        if self.gone:
            raise EngineUnavailable("rank 1 was killed")

    def close(self, _: Callable[[], None]) -> None: ...


@pytest.mark.parametrize("overlap", ["none", "once-sync"])
def test_nothing_is_told_of_a_step_in_which_a_rank_was_lost(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Sums that wait for it are let go of, and end with whatever there was."""
    lost = Lost()
    calls = {name: lambda *_: None for name in ("send", "abort", "close")}
    group = SimpleNamespace(key=bytes(32), **calls)

    def lead(config: Any, *rest: Any) -> Worker:
        worker = build_worker(config, *rest)
        return LeadWorker(
            worker.phases,
            worker.traits,
            worker.streams,
            config,
            rest[-1],
            cast("Group", group),
            cast("Processes", lost),
        )

    monkeypatch.setattr(engine_build, "build_worker", lead)
    engine = build(tiny, overlap=overlap, graphs=False, algorithm="none")
    handle = engine.submit("abc", None, {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0})
    while handle.pushed_tokens < 5:
        engine.step()
    plain, accept = handle.pushed_tokens, Phases.accept

    def losing(phases: Phases, *rest: Any) -> Any:
        lost.gone = True
        return accept(phases, *rest)

    monkeypatch.setattr(Phases, "accept", losing)
    with pytest.raises(EngineUnavailable, match="rank 1 was killed"):
        list(engine.pieces(handle))
    # In once-sync the step before the lost one is told.
    assert handle.pushed_tokens <= plain + (overlap == "once-sync")
    engine.close()


class FailsInRank1(Echo):
    """Raises from its third draft on, in one rank alone."""

    recorded: ClassVar[bool] = False

    def __init__(self, target: Any, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self.norms = [p for name, p in target.named_parameters() if "norm" in name]
        self.rank, self.drafts = target.config.shard.rank, 0

    @classmethod
    def build(cls, _config: Any, target: Any, tables: Any, _make_cache: Any) -> FailsInRank1:
        return cls(target, len(tables.roots), tables.roots.device)

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        self.drafts += 1
        draft = super().draft(roots, tier)
        return self.wrong(draft) if self.rank == 1 and self.drafts > 2 else draft

    def wrong(self, draft: Draft) -> Draft:
        raise ValueError(f"in rank 1 alone, of {len(draft.tokens)} rows")


class StraysInRank1(FailsInRank1):
    """Drafts what rank 0 does not."""

    def wrong(self, draft: Draft) -> Draft:
        return draft._replace(tokens=draft.tokens + 1)


class SpoilsRank1(FailsInRank1):
    """Makes of rank 1's part of the target one whose sums are no numbers."""

    def wrong(self, draft: Draft) -> Draft:
        for norm in self.norms:
            norm.fill_(torch.nan)
        return draft


def ranks(tiny: dict[str, Any], drafter: type[FailsInRank1]) -> Engine:
    settings: dict[str, Any] = {"graphs": False, "num_steps": 3, "adaptive": "static"}
    name = f"{__name__}:{drafter.__name__}"
    return build(tiny, tensor_parallel_size=2, algorithm=name, **settings)


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafter", [FailsInRank1, StraysInRank1])
def test_a_drafter_that_fails_in_one_rank_ends_the_engine(
    tiny: dict[str, Any], drafter: type[FailsInRank1]
) -> None:
    engine = ranks(tiny, drafter)
    with pytest.raises(EngineUnavailable, match="rank 1 ended with exit status 1"):
        engine.generate("abc", Grammar.regex("[a-z]{60}"), {"max_tokens": 60})
    engine.close()


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_sums_of_garbage_end_the_requests_and_nothing_else(tiny: dict[str, Any]) -> None:
    with ranks(tiny, SpoilsRank1) as engine:
        grammars = [None, Grammar.regex("[a-z]{60}")]
        asked = {"max_tokens": 60, "ignore_eos": True}
        for _ in range(2):
            for output in engine.generate(["abc"] * 2, grammars, asked):
                assert output.error == str(NumericFault())


def a_step(tokens: list[int]) -> InFlightStep:
    """A step over one tree whose request has a grammar, read."""
    streams, tier = InlineStreams(), Tier(2, 1, 3)
    buffers = Buffers(tier, 1, 1, streams, torch.device("cpu"))
    plan = StepPlan(0, Budget(tier), (0,), (), (7,), (True,), 9, ())
    step = InFlightStep(plan, buffers, streams.event(), True, StepTensors(SamplingFeatures()))
    step.tensors.batch = PlanUpload(1, 1, int, torch.device("cpu"))(plan, Staging())
    buffers.links[:9] = torch.tensor([*tokens, 1, 2, -1, -1, -1, -1])
    streams.copy.record(step.events.tree_on_host)
    return step


def test_a_decision_over_other_trees_is_refused() -> None:
    own, same, other = (a_step(tokens) for tokens in ([5, 6, 7], [5, 6, 7], [5, 6, 8]))
    own.read_trees()
    own.buffers.masks.host[:3] = torch.tensor([[1], [2], [4]])
    own.buffers.runs.host[1:4] = 9
    own.buffers.limits.host.fill_(2)
    for step in (same, other):
        left = deque(pack_decision(own, True, [True]))
        receive = lambda tensor, left=left: tensor.copy_(left.popleft())  # noqa: E731
        if step is other:
            with pytest.raises(RuntimeError, match="other trees than rank 0"):
                take_decision(step, receive)
            continue
        assert take_decision(step, receive) == (True, [True])
        for name in ("masks", "limits", "runs"):
            assert torch.equal(getattr(step.buffers, name).host, getattr(own.buffers, name).host)
    (dropped,) = pack_decision(own, False)
    assert take_decision(other, lambda tensor: tensor.copy_(dropped)) == (False, [False])


class NoPasses(Phases):
    """Computes nothing."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.draft = lambda *_, **__: None  # type: ignore[assignment]

    def verify(self, _: StepTensors) -> None: ...

    def accept(self, _: StepTensors) -> None: ...

    def extend(self, _: StepTensors) -> None: ...


class Steps:
    """A group whose rank 0 tells one step again and again, and looks at what there is then."""

    shard = SimpleNamespace(rank=1, size=2)
    key = bytes(32)

    def __init__(self, steps: int, look: Callable[[], tuple[int, ...]]) -> None:
        plan = StepPlan(0, Budget(Tier(0, 1, 1)), (0,), (), (7,), (False,), 9, ())
        (self.step,) = encode_calls(
            [("upload", (plan,)), ("draft", (None,)), ("verify", ())], self.key
        )
        (self.end,) = encode_calls([("close", ())], self.key)
        self.left, self.look, self.every = steps, look, steps // 10
        self.seen: list[tuple[int, ...]] = []

    def receive(self, tensor: Tensor, _: int = 0) -> None:
        if tensor.dtype == torch.int32:
            tensor.fill_(1)
            self.left -= 1
            if self.left % self.every == 0:
                self.seen.append(self.look())
        else:
            tensor.copy_(self.step if self.left else self.end)


def followed(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, steps: int
) -> list[tuple[int, ...]]:
    """Objects, spans and handles after every tenth of so many steps of a follower."""
    monkeypatch.setattr(build_module, "Phases", NoPasses)
    monkeypatch.setattr(follower_module, "KEPT_SPANS", 64)
    streams, spans = Noting(), Spans()

    def look() -> tuple[int, ...]:
        gc.collect()
        return len(gc.get_objects()), len(Kept.spans), len(os.listdir("/proc/self/fd"))

    config = EngineConfig(**{**tiny, "algorithm": "none", "graphs": False, "overlap": "none"})
    config = replace(config, max_running_requests=2, context_length=64, max_total_tokens=128)
    worker = build_worker(config, Room(3, 6), streams, spans.record)
    worker.assign(0, Request(7, (5,), SamplingParams(), None, 9, frozenset({0}), 0, 0), [])
    group = Steps(steps, look)
    follow(worker, cast("Group", group), spans)
    Kept.spans.clear()
    return group.seen


def grows(seen: list[tuple[int, ...]]) -> bool:
    """Whether there is more of anything after all steps than after a fifth of them."""
    return any(late > early + 50 for early, late in zip(seen[1], seen[-1], strict=True))


@pytest.mark.parametrize("steps", few((2_000, 20_000), 2_000))
def test_a_follower_keeps_nothing_of_its_steps(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    seen = followed(tiny, monkeypatch, steps)
    assert len(seen) == 10
    assert not grows(seen), seen
