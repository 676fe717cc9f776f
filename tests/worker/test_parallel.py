"""Engines of several ranks: the same text as of one, and their end when a rank is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from overlap_spec import Engine, Grammar, SamplingParams
from overlap_spec.async_engine import AsyncEngine
from overlap_spec.errors import ConfigError, EngineUnavailable
from tests.support.serving import wait_for
from tests.worker.test_overlap import build, chaos, outputs_equal, settings_of

DATE = Grammar.regex(r"\d{4}-\d\d-\d\d")


def ended(pids: list[int]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def pids(engine: Engine) -> list[int]:
    found: list[int] = engine.snapshot()["rank_pids"]
    return found


@pytest.mark.parametrize(
    ("size", "tier", "room", "mode"),
    [
        (2, "tree", "crowded", "once-sync"),
        (4, "chain", "roomy", "double-sync"),
    ],
)
def test_text_is_that_of_one_rank(
    tiny: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    tier: str,
    room: str,
    mode: str,
) -> None:
    """Random batches with grammars, seeds, penalties, aborts and pre-emption, under chaos in
    rank 0; of 4 ranks two share each head of keys."""
    first, settings = settings_of(tier, room)
    before = set(threading.enumerate())
    chaos(monkeypatch, first)
    with (
        build(tiny, overlap="none", algorithm="none") as oracle,
        build(tiny, overlap=mode, tensor_parallel_size=size, **settings) as engine,
    ):
        others = pids(engine)
        assert len(others) == size - 1
        outputs_equal(oracle, engine, first, 6)
        assert (engine.core.scheduler.preemptions > 0) == (room == "crowded")
    assert ended(others)
    assert set(threading.enumerate()) <= before


def test_a_rank_that_dies_ends_the_engine_with_one_error(tiny: dict[str, str]) -> None:
    engine = build(tiny, tensor_parallel_size=2)
    (pid,) = pids(engine)
    stream = engine.stream("abc", None, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="rank 1 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineUnavailable, match="rank 1 was killed by SIGKILL"):
        engine.generate("abc")
    engine.close()
    assert ended([pid])


def test_the_server_starts_an_engine_again_whose_rank_died(tiny: dict[str, Any]) -> None:
    """Also where nothing runs: it is seen before the next request."""

    async def work() -> None:
        async with AsyncEngine(**tiny, tensor_parallel_size=2, context_length=160) as engine:
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


def test_a_number_of_ranks_that_does_not_fit_is_told_before_any_starts(
    tiny: dict[str, str],
) -> None:
    for size, told in ((3, "num_attention_heads, 4"), (0, "an integer >= 1")):
        with pytest.raises(ConfigError, match=told):
            build(tiny, tensor_parallel_size=size)
