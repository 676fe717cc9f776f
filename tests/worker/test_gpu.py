"""The engine on a GPU: chaos on CUDA streams, the CPU's text, few replays, and no waits."""

import random
from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.engine import build as engine_build
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import SamplingParams
from overlap_spec.worker.cuda import CudaStreams
from overlap_spec.worker.graphs import CudaGraph
from tests.support.chaos import GRAMMARS, ROOM, TIERS, build, outputs_equal, settings_of

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000


class ChaosCudaStreams(CudaStreams):
    """The device idles at random before and after each piece of work."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("cuda"), lambda *_: None)
        for stream in (self.compute, self.prefill, self.plan, self.copy):
            stream.run = self._delayed(stream.run, random.Random(f"{stream.name}-{seed}"))

    @staticmethod
    def _delayed(run: Any, rng: random.Random) -> Any:
        def idle() -> None:
            torch.cuda._sleep(int(CYCLES * max(0.0, rng.uniform(-1.0, 1.0))))

        def delayed(label: str, work: Any, *args: Any) -> Any:
            if label == "record":
                return run(label, work, *args)
            run("idle", idle)
            value = run(label, work, *args)
            run("idle", idle)
            return value

        return delayed


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("mode", ["once-sync", "double-sync", "none"])
def test_chaos_on_cuda_never_changes_outputs(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, mode: str, tier: str, room: str
) -> None:
    """As on the CPU's threads, with random batches each."""
    first, settings = settings_of(tier, room)
    common: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    oracle = build(tiny, overlap="none", algorithm="none", **common)
    monkeypatch.setattr(engine_build, "build_streams", lambda *_: ChaosCudaStreams(first))
    with oracle, build(tiny, overlap=mode, **settings, **common) as engine:
        outputs_equal(oracle, engine, first)


@pytest.mark.parametrize("topk", [1, 4])
def test_greedy_text_is_the_cpus(topk: int) -> None:
    prompts = [f"Repeat: the train to platform {n} is {n * 7} minutes late." for n in range(6)]
    grammars = [None, Grammar.json_object(), *GRAMMARS[1:]]
    texts = []
    for device in ("cpu", "cuda"):
        with Engine(device=device, dtype="float32", eagle_topk=topk) as engine:
            outputs = engine.generate(prompts, grammars[:6], {"max_tokens": 48, "temperature": 0})
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1]


def ask_all(engine: Engine) -> list[Any]:
    """Requests for whatever a step can be asked for, queued."""
    grammar = Grammar.regex(r"[a-f]{3}-\d{1,9}")
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
        {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {5: 2.0}, "min_tokens": 2},
        {"temperature": 0.0, "logprobs": 3},
    ]
    return [
        engine.submit(f"prompt {n}", grammar if n % 2 else None, SamplingParams(max_tokens=24, **s))
        for n, s in enumerate([*samplings, *samplings])
    ]


def finish(engine: Engine, tickets: list[Any]) -> None:
    while any(ticket.output is None for ticket in tickets):
        engine.step()


@pytest.mark.parametrize("topk", [1, 3])
def test_a_step_never_waits_for_the_device(tiny: dict[str, Any], topk: int) -> None:
    """But for the tree, which is an event's: whatever a step asks for."""
    settings = {"num_steps": 3, "eagle_topk": topk}
    with Engine(**tiny, device="cuda", **settings) as engine:
        for mode in ("default", "error"):
            tickets = ask_all(engine)
            torch.cuda.set_sync_debug_mode(mode)
            try:
                finish(engine, tickets)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert [ticket.output.error for ticket in tickets] == [None] * len(tickets)
            engine.release(tickets)


def test_a_step_replays_four_graphs(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[CudaGraph] = []
    replay = CudaGraph.__call__

    def counted(graph: CudaGraph, *inputs: torch.Tensor) -> Any:
        calls.append(graph)
        return replay(graph, *inputs)

    with Engine(**tiny, device="cuda", num_steps=3) as engine:
        # Each batch size is recorded when it first comes.
        handles = ask_all(engine)
        finish(engine, handles)
        engine.release(handles)
        assert engine.snapshot()["graph_bytes"] > 0
        monkeypatch.setattr(CudaGraph, "__call__", counted)
        tickets = ask_all(engine)
        finish(engine, tickets)
        spans = engine.timeline.spans()
        engine.release(tickets)
    steps = {span.step for span in spans if span.name == "extend"}
    assert 0 < len(calls) <= 4 * len(steps)


def test_the_timeline_has_the_devices_spans(tiny: dict[str, Any]) -> None:
    with Engine(**tiny, device="cuda", num_steps=3) as engine:
        engine.generate("abc", Grammar.regex("[a-c]{20}"), {"max_tokens": 24})
        torch.cuda.synchronize()
        engine.core.worker.streams.note()
        spans = [span for span in engine.timeline.spans() if span.lane == "compute"]
    names = {span.name for span in spans}
    assert {"draft", "verify", "accept", "extend"} <= names
    verifies = sorted(span for span in spans if span.name == "verify")
    assert all(span.end_ns > span.start_ns for span in verifies)
    for step in {span.step for span in verifies}:
        mine = {span.name: span for span in spans if span.step == step}
        # The host's clock is held to the device's between the two: by 6 µs, as was seen.
        assert mine["draft"].end_ns <= mine["verify"].start_ns + 20_000
