"""What comes from outside in the middle of a call: Ctrl-C, a fork, a stream that nobody reads."""

import gc
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import overlap_spec
from overlap_spec import Engine, Grammar
from overlap_spec.drafters.ngram import NgramDrafter
from overlap_spec.engine import calls
from overlap_spec.errors import EngineUnavailable
from tests.support.tiers import few

PACKAGE = str(Path(overlap_spec.__file__).parent)
ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
DATE = Grammar.regex(r"\d{4}-\d\d-\d\d")


class Interrupting(NgramDrafter):
    """Presses Ctrl-C in the middle of a step, as often as it is told."""

    presses = 0

    def propose(self, histories: Any, tier: Any) -> Any:
        for _ in range(Interrupting.presses):
            signal.raise_signal(signal.SIGINT)
        Interrupting.presses = 0
        return super().propose(histories, tier)


def raise_inside(_: int, frame: FrameType | None) -> None:
    """As Python's own handler, but only in the engine: the test goes on."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            raise KeyboardInterrupt
        frame = frame.f_back


@contextmanager
def pressed(first_s: float, again_s: float) -> Iterator[None]:
    """Ctrl-C after so long, and where ``again_s`` is not 0 again and again until the end."""
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, raise_inside),
        signal.SIGALRM: signal.signal(
            signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT)
        ),
    }
    signal.setitimer(signal.ITIMER_REAL, first_s, again_s)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def build(tiny: dict[str, Any], **settings: Any) -> Engine:
    return Engine(**tiny, context_length=450, num_steps=3, **settings)


@pytest.mark.parametrize("overlap", few(("none", "double-sync", "once-sync"), "once-sync"))
def test_after_ctrl_c_at_any_moment_the_text_is_right(tiny: dict[str, Any], overlap: str) -> None:
    moments = random.Random(11)
    prompts = ["when", "go on", "and then"]
    grammars = [DATE, None, None]
    with build(tiny, overlap=overlap) as engine:
        want = [o.text for o in engine.generate(prompts, grammars, SHORT)]
        for number in range(24):
            again_s = moments.choice([0.0, 0.0005, 0.002])
            with pressed(moments.uniform(0.0005, 0.04), again_s):
                if number % 3:
                    engine.generate(prompts, grammars, ENDLESS)
                else:
                    for _ in engine.stream("go on", None, ENDLESS):
                        pass
            got = engine.generate(prompts, grammars, SHORT)
            assert [output.text for output in got] == want
            assert engine.snapshot()["running"] == engine.snapshot()["waiting"] == 0
        assert engine.snapshot()["pages_in_use"] == 0


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Python's own handler: a test that runs beside others may be told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
@pytest.mark.parametrize("presses", [1, 5])
def test_ctrl_c_in_a_step_waits_for_its_end(tiny: dict[str, Any], presses: int) -> None:
    with build(tiny, algorithm=f"{__name__}:Interrupting") as engine:
        want = engine.generate("go on", None, SHORT).text
        Interrupting.presses = presses
        with pytest.raises(KeyboardInterrupt):
            engine.generate("go on", None, ENDLESS)
        assert engine.generate("go on", None, SHORT).text == want
        assert engine.snapshot()["pages_in_use"] == 0


@pytest.mark.usefixtures("usual_ctrl_c")
def test_a_step_that_is_cut_short_ends_the_engine(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C does not wait for ever for a step."""
    monkeypatch.setattr(calls, "PATIENCE_S", 0.0)
    with build(tiny, algorithm=f"{__name__}:Interrupting") as engine:
        Interrupting.presses = 2
        with pytest.raises(KeyboardInterrupt):
            engine.generate("go on", None, ENDLESS)
        for call in (engine.generate, engine.stream, engine.submit):
            with pytest.raises(EngineUnavailable, match=r"cut short.*KeyboardInterrupt.*new one"):
                call("go on")
        with pytest.raises(EngineUnavailable, match="cut short"):
            engine.step()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.generate("go on")


def test_a_stream_that_nobody_reads_is_dropped(tiny: dict[str, Any]) -> None:
    with build(tiny, max_running_requests=2) as engine:
        for _ in range(20):
            engine.stream("go on", None, ENDLESS)
        kept = engine.stream("go on", None, SHORT)
        handle = engine.submit("and then", None, ENDLESS)
        engine.step()
        del handle
        gc.collect()
        assert engine.generate("when", DATE).finish_reason == "stop"
        assert sum(len(piece.token_ids) for piece in kept) == 12
        state = engine.snapshot()
        assert (state["running"], state["waiting"], state["pages_in_use"]) == (0, 0, 0)
        assert state["output_tokens"] < 60


FORK = """
import asyncio, os, sys, traceback
from overlap_spec import AsyncEngine, Engine
from overlap_spec.errors import EngineUnavailable

settings = {settings!r}

def refused(call):
    try:
        call()
    except EngineUnavailable as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("not refused")

def in_a_child(check):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        check()
        os._exit(7)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def blocking():
    with Engine(**settings) as engine:
        want = engine.generate("go", max_tokens=8).text
        stream = engine.stream("go", max_tokens=8)
        text = next(stream).text

        def check():
            for call in (engine.generate, engine.stream, engine.submit):
                refused(lambda: call("go"))
            refused(lambda: next(stream))
            refused(engine.step)
            engine.close()

        if (status := in_a_child(check)) != 7:
            return status
        assert text + "".join(piece.text for piece in stream) == want
        assert engine.generate("go", max_tokens=8).text == want

async def first(engine):
    async for piece in engine.stream("go", max_tokens=8):
        return piece

async def waiting():
    async with AsyncEngine(**settings) as engine:
        want = (await engine.generate("go", max_tokens=8)).text

        def check():
            # As a loop of the child's own would: this one is the parent's.
            asyncio.events._set_running_loop(None)
            refused(lambda: asyncio.run(engine.generate("go", max_tokens=8)))
            # Where a long prompt is tokenised.
            refused(lambda: asyncio.run(engine.preparation.run(str)))
            refused(lambda: asyncio.run(first(engine)))
            refused(lambda: asyncio.run(engine.snapshot()))
            asyncio.run(engine.close())

        if (status := in_a_child(check)) != 7:
            return status
        assert (await engine.generate("go", max_tokens=8)).text == want

sys.exit(blocking() or asyncio.run(waiting()))
"""


@pytest.mark.ci
def test_a_fork_is_refused_and_the_parent_goes_on(tiny: dict[str, Any]) -> None:
    settings = tiny | {"context_length": 200}
    script = FORK.format(settings=settings)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
