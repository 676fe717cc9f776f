"""Ranks that fail: nothing of a lost step is told, and none goes on alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.engine import build as engine_build
from overlap_spec.errors import EngineUnavailable
from overlap_spec.parallel.group import Group
from overlap_spec.parallel.processes import Processes
from overlap_spec.tiers import Tier
from overlap_spec.worker.build import build_worker
from overlap_spec.worker.follower import Spans, follow
from overlap_spec.worker.lead import LeadWorker
from overlap_spec.worker.messages import Call, encode_calls
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.streams import InlineStream, InlineStreams, Value
from overlap_spec.worker.worker import Worker
from tests.support.chaos import build
from tests.support.drafters import Echo


class Kept(InlineStream):
    """Keeps the spans of its work until they are asked for, as a GPU's does."""

    spans: ClassVar[list[str]] = []

    def run(self, label: str, work: Callable[..., Any], *args: Any) -> Value[Any]:
        self.spans.append(label)
        return super().run(label, work, *args)


class Noting(InlineStreams):
    """Remembers the most spans that were ever kept."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.most = Kept("compute"), 0

    def note(self) -> None:
        self.most = max(self.most, len(Kept.spans))
        Kept.spans.clear()


class Told:
    """A group whose rank 0 tells the same again and again, and then the end."""

    shard = SimpleNamespace(rank=1, size=2)
    key = bytes(32)

    def __init__(self, call: Call, times: int) -> None:
        rounds: list[list[Call]] = [[call]] * times + [[("close", ())]]
        self.left = deque(tensor for calls in rounds for tensor in encode_calls(calls, self.key))

    def receive(self, tensor: Tensor, _: int = 0) -> None:
        tensor.copy_(self.left.popleft())


def test_a_follower_keeps_no_spans() -> None:
    streams = Noting()
    worker = SimpleNamespace(
        streams=streams,
        rest=lambda: streams.compute.run("work", int),
        close=lambda: None,
    )
    follow(cast("Worker", worker), cast("Group", Told(("rest", ()), 200)), Spans())
    assert streams.most == 1
    assert Kept.spans == []


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
            worker.runner,
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

    def __init__(self, rank: int, rows: int, device: torch.device) -> None:
        super().__init__(rows, device)
        self.rank, self.drafts = rank, 0

    @classmethod
    def build(cls, _config: Any, target: Any, tables: Any, _make_cache: Any) -> FailsInRank1:
        return cls(target.config.shard.rank, len(tables.roots), tables.roots.device)

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        self.drafts += 1
        if self.rank == 1 and self.drafts > 2:
            raise ValueError("in rank 1 alone")
        return super().draft(roots, tier)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_drafter_that_fails_in_one_rank_ends_the_engine(tiny: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"graphs": False, "num_steps": 3, "adaptive": "static"}
    engine = build(tiny, tensor_parallel_size=2, algorithm=f"{__name__}:FailsInRank1", **settings)
    with pytest.raises(EngineUnavailable, match="rank 1 ended with exit status 1"):
        engine.generate("abc", None, {"max_tokens": 60, "ignore_eos": True})
    engine.close()
