"""Engines of several ranks: the same text as of one, and their end when a rank is lost."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec import Engine, Grammar, SamplingParams
from overlap_spec.async_engine import AsyncEngine
from overlap_spec.errors import ConfigError, EngineUnavailable
from overlap_spec.parallel import group
from overlap_spec.worker.messages import decode_calls, decode_spans, encode_calls, encode_spans
from tests.support import chaos, dflash
from tests.support.chaos import build, equal, settings_of
from tests.support.serving import wait_for

# Several processes that load: a busy machine may take long.
pytestmark = pytest.mark.timeout(900)
DATE = Grammar.regex(r"\d{4}-\d\d-\d\d")
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "row": {"algorithm": "slots,suffix,eagle3"},
    "draft-model": {"algorithm": "draft_model", "draft": "target", **TREE},
    "block": {"algorithm": "dflash", "draft": "dflash", **TREE},
    "adaptive": {"adaptive": "default", **TREE},
    "tries": {"tries": True, "num_steps": 3},
    "serial": {"overlap": "none", "num_steps": 3},
}


def ended(pids: list[int]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def pids(engine: Engine) -> list[int]:
    found: list[int] = engine.snapshot()["rank_pids"]
    return found


def mixed() -> list[chaos.Ask]:
    """Long enough to pre-empt each other in a small cache; one is aborted."""
    common: dict[str, Any] = {"max_tokens": 40, "seed": 3, "complete": False}
    greedy = SamplingParams(temperature=0.0, **common)
    warm = SamplingParams(temperature=0.8, top_p=0.9, **common)
    choosy = SamplingParams(
        temperature=0.8, presence_penalty=1.0, logit_bias={97: 2.0}, logprobs=2, **common
    )
    text = "abc xyz 0123 abc xyz 0123 abc"
    return [
        chaos.Ask(text, None, greedy, None),
        chaos.Ask(text[3:], None, warm, None),
        chaos.Ask("name", Grammar.json_schema(chaos.PERSON), warm, None),
        chaos.Ask("pick", Grammar.choice(["alpha", "beta", "alphabet"]), greedy, None),
        chaos.Ask(text[5:], None, choosy, None),
        chaos.Ask(text[7:], Grammar.regex("[a-f]{30}"), choosy, 5),
    ]


def rank_1_is_in_the_timeline(engine: Engine) -> None:
    """Each step that rank 0 decided was verified there, and accepted once it had been told."""
    assert not any(span.lane.startswith("rank") for span in engine.timeline.spans())
    engine.gather_spans()
    spans = {
        (span.lane, span.name, span.step): span
        for span in engine.timeline.spans()
        if span.name in ("verify", "decision", "accept")
    }
    told = {step: span for (lane, _, step), span in spans.items() if lane == "tell"}
    assert len(told) > 10
    for step, sent in told.items():
        taken = spans["rank 1 told", "decision", step]
        assert sent.start_ns < taken.end_ns
        accepted = spans.get(("rank 1 compute", "accept", step))
        if accepted is not None:
            assert spans["rank 1 compute", "verify", step].end_ns <= accepted.start_ns
            assert taken.end_ns <= accepted.start_ns
    assert sum(name == "accept" and lane[:4] == "rank" for lane, name, _ in spans) > 10
    # Those that were taken are not taken again; what ended meanwhile is.
    engine.gather_spans()
    taken_all = [(s.lane, s.name, s.step, s.start_ns) for s in engine.timeline.spans()]
    assert len(set(taken_all)) == len(taken_all)


def test_text_of_two_ranks_is_that_of_one(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees under chaos in rank 0, recorded, in a cache so small that requests pre-empt."""
    first, settings = settings_of("tree", "crowded")
    before = set(threading.enumerate())
    chaos.start(monkeypatch, first)
    with (
        build(tiny, overlap="none", algorithm="none") as oracle,
        build(tiny, tensor_parallel_size=2, **settings) as engine,
    ):
        (other,) = pids(engine)
        equal(oracle, engine, mixed())
        assert engine.core.scheduler.preemptions > 0
        assert engine.core.worker.recordings.count > 0
        rank_1_is_in_the_timeline(engine)
    assert ended([other])
    wait_for(lambda: set(threading.enumerate()) <= before)


@pytest.mark.ci
def test_a_rank_of_four_that_dies_ends_the_engine_with_one_error(tiny: dict[str, str]) -> None:
    """Before that, the text is that of one rank; of four, two share each head of keys."""
    settings: dict[str, Any] = {"mask_deadline_ms": None, "graphs": False}
    with build(tiny, overlap="none", algorithm="none", **settings) as oracle:
        engine = build(tiny, tensor_parallel_size=4, num_steps=3, **settings)
        equal(oracle, engine, mixed())
    others = pids(engine)
    stream = engine.stream("abc", None, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    os.kill(others[1], signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="rank 2 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineUnavailable, match="rank 2 was killed by SIGKILL"):
        engine.generate("abc")
    engine.close()
    assert ended(others)


@pytest.mark.ci
def test_the_server_starts_an_engine_again_whose_rank_died(tiny: dict[str, Any]) -> None:
    """Also where nothing runs: it is seen before the next request."""

    async def work() -> None:
        settings: dict[str, Any] = {"context_length": 160}
        async with AsyncEngine(**tiny, tensor_parallel_size=2, **settings) as engine:
            state = await engine.snapshot()
            os.kill(state["rank_pids"][0], signal.SIGKILL)
            while engine.restarts == 0 or engine.health != "ready":
                await asyncio.sleep(0.05)
            output = await engine.generate("when", DATE)
            assert output.finish_reason == "stop"
            again = await engine.snapshot()
            assert engine.restarts == 1
        assert ended([state["pid"], *state["rank_pids"]])
        wait_for(lambda: ended([again["pid"], *again["rank_pids"]]), 60)

    asyncio.run(work())


SCRIPT = """
import asyncio, json, os, sys, time
from overlap_spec import AsyncEngine, Grammar

async def main():
    settings = json.loads(sys.argv[1])
    async with AsyncEngine(**settings, tensor_parallel_size=2, graphs=False) as engine:
        await engine.generate("abc", Grammar.regex("a"))
        state = await engine.snapshot()
        workers = state["compiler"]["executor"]["fork_server_pid"]
        print(json.dumps([state["pid"], *state["rank_pids"], workers]), flush=True)
        time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a parent's end")
def test_no_stopped_process_outlives_the_front(tiny: dict[str, str]) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps({**tiny, "grammar_isolated": True})]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        left = json.loads(front.stdout.readline())
        assert len(set(left)) == 3
        for pid in left:
            os.kill(pid, signal.SIGSTOP)
        front.kill()
    try:
        wait_for(lambda: ended(left))
    finally:
        for pid in [pid for pid in left if not ended([pid])]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.ci
def test_a_rank_outlives_the_thread_that_made_the_engine(tiny: dict[str, str]) -> None:
    made: list[Engine] = []
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "graphs": False}
    thread = threading.Thread(target=lambda: made.append(build(tiny, **settings)))
    thread.start()
    thread.join()
    (engine,) = made
    assert len(engine.generate("abc", None, {"max_tokens": 2}).token_ids) == 2
    engine.close()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_ranks_send_runs_nothing_that_rank_0_has_not_signed(tmp_path: Path) -> None:
    """Whoever reaches a rank's port, or has taken a rank over, can send any bytes."""

    def sent(tensors: list[Tensor]) -> Any:
        left = iter(tensors)
        return lambda into: into.copy_(next(left))

    key, other, folder = b"k" * 32, b"o" * 32, tmp_path / "run"
    calls = [("prepare", (Evil(folder),)), ("rest", ("x" * 10_000,))]
    with pytest.raises(RuntimeError, match="not signed"):
        decode_calls(sent(encode_calls(calls, other)), key)
    raw = pickle.dumps(calls)
    block = torch.zeros(4096 * 4, dtype=torch.uint8)
    block[:8] = torch.frombuffer(bytearray(len(raw).to_bytes(8, "little")), dtype=torch.uint8)
    block[8 : 8 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    parts = [block[:4096], block[4096 : 8 + len(raw)]]
    with pytest.raises(RuntimeError, match="not signed"):
        decode_calls(sent(parts), key)
    with pytest.raises(ValueError, match="no spans"):
        decode_spans(sent(parts))
    assert not folder.exists()
    assert decode_calls(sent(encode_calls(calls[1:], key)), key) == calls[1:]
    spans = [("compute", "verify", 2**62, 2**62 + 1, index) for index in range(500)]
    assert decode_spans(sent(encode_spans(spans))) == spans


def test_a_number_of_ranks_that_does_not_fit_is_told_before_any_starts(
    tiny: dict[str, str],
) -> None:
    for size, told in ((3, "num_attention_heads, 4"), (0, "an integer >= 1")):
        with pytest.raises(ConfigError, match=told):
            build(tiny, tensor_parallel_size=size)


@pytest.fixture(scope="module")
def plain(tiny: dict[str, str]) -> Iterator[Engine]:
    with build(
        tiny, overlap="none", algorithm="none", mask_deadline_ms=None, graphs=False
    ) as engine:
        yield engine


@pytest.mark.ci
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_gives_the_text_of_one_rank(
    tiny: dict[str, str], plain: Engine, tmp_path: Path, variant: str
) -> None:
    settings = {**VARIANTS[variant], "mask_deadline_ms": None, "graphs": False}
    if settings.get("draft") == "target":
        settings["draft"] = tiny["model"]
    if settings.get("draft") == "dflash":
        dflash.write(tmp_path / "dflash", dflash.LAYOUTS["z-lab"])
        settings["draft"] = str(tmp_path / "dflash")
    with build(tiny, tensor_parallel_size=2, **settings) as engine:
        equal(plain, engine, mixed())
        again = [replace(ask, prompt=ask.prompt[::-1]) for ask in mixed()]
        equal(plain, engine, again)


@pytest.mark.ci
def test_a_rank_that_stalls_ends_the_engine(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STALL", timedelta(seconds=5))
    engine = build(tiny, tensor_parallel_size=2, graphs=False)
    engine.generate("abc", None, {"max_tokens": 2})
    (pid,) = pids(engine)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match="rank 0 failed"):
        engine.generate("abc", None, {"max_tokens": 20})
    engine.close()
    assert ended([pid])


TORCHRUN = """
import json, sys
from overlap_spec import Engine

with Engine(**json.loads(sys.argv[1])) as engine:
    output = engine.generate("abc", None, {"max_tokens": 12, "temperature": 0.0})
print(json.dumps(output.token_ids))
"""


@pytest.mark.ci
def test_ranks_that_torchrun_starts(tiny: dict[str, str], plain: Engine, tmp_path: Path) -> None:
    """A script that makes an engine goes on in rank 0 alone."""
    want = plain.generate("abc", None, {"max_tokens": 12, "temperature": 0.0})
    (tmp_path / "script.py").write_text(TORCHRUN)
    settings = {**tiny, "graphs": False, "context_length": 160}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = [
        subprocess.run(
            [*command, str(tmp_path / "script.py"), json.dumps({**settings, **more})],
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            timeout=280,
        )
        for more in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4})
    ]
    assert ran[0].returncode == 0, ran[0].stderr
    assert ran[0].stdout.splitlines() == [json.dumps(want.token_ids)]
    assert ran[1].returncode != 0
    assert "tensor_parallel_size 4: torchrun has started 2 processes" in ran[1].stderr
