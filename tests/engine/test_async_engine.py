"""The asyncio face: the engine in a process of its own gives what the engine in this one gives."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel, Field

from overlap_spec import AsyncEngine, Engine, Generator, Grammar, SamplingParams
from overlap_spec.errors import EngineUnavailable, GrammarError, InvalidRequest, QueueFull
from overlap_spec.ipc import messages
from overlap_spec.ipc.client import EngineClient
from overlap_spec.types import Request, Verdict

DATE = Grammar.regex(r"\d{4}-\d\d-\d\d")
LONG = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)


class Digit(BaseModel):
    digit: int = Field(ge=0, le=9)


ONE = Grammar.json_schema(Digit)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str], runner: asyncio.Runner) -> Iterator[AsyncEngine]:
    # One draft length has little to record, at each start of its process.
    made = AsyncEngine(
        **tiny, context_length=200, num_steps=3,
        max_running_requests=4, max_queued_requests=4,
    )  # fmt: skip
    runner.run(made.start())
    yield made
    runner.run(made.close())


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, Any]) -> Any:
    return runner.run(asyncio.wait_for(work, 90))


async def idle(engine: AsyncEngine) -> dict[str, Any]:
    """The engine's state, once nothing is left of any request."""
    while True:
        state = await engine.snapshot()
        if not (state["open"] or state["running"] or state["waiting"]):
            return state
        await asyncio.sleep(0.01)


async def check_idle(engine: AsyncEngine) -> None:
    state = await idle(engine)
    assert (state["pages_in_use"], state["matchers"], len(engine.open_requests)) == (0, 0, 0)


def test_it_gives_what_the_engine_gives(
    engine: AsyncEngine, runner: asyncio.Runner, tiny: dict[str, str]
) -> None:
    prompts = ["when", "who", [{"role": "user", "content": "count"}]]
    grammars = [DATE, None, Grammar.choice(["me", "you"])]
    samplings = [None, SamplingParams(max_tokens=30, logprobs=2), {"temperature": 0.9, "seed": 5}]
    with Engine(**tiny, context_length=200, num_steps=3) as here:
        want = here.generate(prompts, grammars, samplings)
        ids = here.tokenizer.encode("raw text")
        raw = [here.generate(p, DATE, raw=True).text for p in ("raw text", ids)]
    got = run(runner, engine.generate(prompts, grammars, samplings))
    for a, b in zip(got, want, strict=True):
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        assert (a.parsed, a.stop_match, len(a.logprobs)) == (
            b.parsed, b.stop_match, len(b.logprobs),
        )  # fmt: skip
    assert raw == [run(runner, engine.generate(p, DATE, raw=True)).text for p in ("raw text", ids)]
    run(runner, check_idle(engine))


def test_types_numbers_of_outputs_and_what_is_told_cross_over(
    engine: AsyncEngine, runner: asyncio.Runner
) -> None:
    twins: dict[str, Any] = {"type": "array", "minItems": 2, "uniqueItems": True, "items": False}
    twins["prefixItems"] = [{"type": "string", "maxLength": 0}] * 2
    loose = Grammar.json_schema(twins, best_effort=True)

    async def work() -> None:
        one = await engine.generate("go", Digit, temperature=0.0)
        assert isinstance(one.parsed, Digit)
        pairs = await engine.generate(["go", "on"], {"enum": [1, 2]}, n=2, seed=5)
        assert {output.parsed for pair in pairs for output in pair} <= {1, 2}
        values = await Generator(engine, {"enum": [1, 2]})(["go", "on"], n=2, seed=5)
        assert values == [[output.parsed for output in pair] for pair in pairs]
        output = await engine.generate("go", loose)
        assert output.verdict == Verdict(False, "$: ['', ''] has non-unique elements")
        deltas = [delta async for delta in engine.stream("go", {"enum": [5], "format": "sku"})]
        assert "".join(delta.text for delta in deltas) == "5"
        assert "format 'sku' is not known" in deltas[-1].warnings[0]
        with pytest.raises(InvalidRequest, match="did you mean 'max_tokens'"):
            await engine.generate("go", max_token=3)  # type: ignore[call-overload]

    run(runner, work())


def test_streams_run_side_by_side(engine: AsyncEngine, runner: asyncio.Runner) -> None:
    async def one(prompt: str) -> list[Any]:
        return [delta async for delta in engine.stream(prompt, None, LONG)]

    async def all_of_them() -> list[list[Any]]:
        return await asyncio.gather(*[one("a"), one("b"), one("a")])

    first, second, third = run(runner, all_of_them())
    texts = ["".join(delta.text for delta in deltas) for deltas in (first, second, third)]
    assert texts[0] == texts[2] != texts[1]
    assert len(first) > 10
    assert [delta.finish_reason for delta in first[-2:]] == [None, "length"]
    assert sum(len(delta.token_ids) for delta in second) == 150


def test_leaving_or_cancelling_aborts(engine: AsyncEngine, runner: asyncio.Runner) -> None:
    async def leave() -> None:
        async for _ in engine.stream("go", None, LONG):
            break
        await check_idle(engine)

    async def cancel() -> None:
        tasks = [asyncio.create_task(engine.generate("go", g, LONG)) for g in (None, None, ONE)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(d, asyncio.CancelledError) for d in done[:2])
        steps = (await engine.snapshot())["steps"]
        await check_idle(engine)
        # What was under way when the word came, and one step behind it; not what was left to do.
        assert (await engine.snapshot())["steps"] - steps <= 4

    run(runner, leave())
    run(runner, cancel())


def test_aborting_gives_what_there_is(engine: AsyncEngine, runner: asyncio.Runner) -> None:
    async def work() -> None:
        handle = await engine.submit(await engine.prepare("go", None, LONG))
        await anext(handle)
        handle.abort()
        output = await handle.finish()
        assert output.finish_reason == "abort"
        assert 1 <= len(output.token_ids) < 150
        handle.abort()
        await check_idle(engine)

    run(runner, work())


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"prompt": "x" * 500}, InvalidRequest, "leaves no room"),
        ({"prompt": "x", "grammar": Grammar.ebnf("root ::= (")}, GrammarError, "root|EBNF|ebnf"),
        ({"prompt": "\ud800"}, InvalidRequest, "not valid Unicode"),
    ],
)
def test_bad_requests_are_refused_here_and_there(
    engine: AsyncEngine,
    runner: asyncio.Runner,
    arguments: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    with pytest.raises(kind, match=words):
        run(runner, engine.generate(**arguments))
    assert run(runner, engine.generate("next", DATE)).finish_reason == "stop"
    run(runner, check_idle(engine))


def test_the_queue_has_an_end(engine: AsyncEngine, runner: asyncio.Runner) -> None:
    async def work() -> None:
        request = await engine.prepare("go", None, LONG)
        handles = [engine.send(request) for _ in range(8)]
        with pytest.raises(QueueFull, match="8 requests are open"):
            engine.send(request)
        for handle in handles:
            await handle.queued()
        assert (await engine.snapshot())["open"] == 8
        for handle in handles:
            handle.abort()
        await check_idle(engine)
        (await engine.submit(request)).abort()
        await check_idle(engine)

    run(runner, work())


def test_a_dead_process_fails_its_requests_and_comes_back(
    engine: AsyncEngine, runner: asyncio.Runner
) -> None:
    async def work() -> None:
        pid = (await engine.snapshot())["pid"]
        task = asyncio.create_task(engine.generate(["go", "on"], None, LONG))
        asked = asyncio.create_task(engine.snapshot())
        while len(engine.open_requests) < 2:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        done = await asyncio.gather(task, asked, return_exceptions=True)
        assert isinstance(done[0], EngineUnavailable)
        assert engine.health == "restarting"
        with pytest.raises(EngineUnavailable, match="restarting"):
            await engine.generate("x")
        while engine.health != "ready":
            await asyncio.sleep(0.05)
        assert engine.restarts == 1
        assert (await engine.generate("when", DATE)).finish_reason == "stop"
        await check_idle(engine)

    run(runner, work())


@pytest.mark.ci
def test_an_engine_that_stalls_is_started_again(
    engine: AsyncEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        pid = (await engine.snapshot())["pid"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="stopped while"):
            await engine.generate("x", None, LONG)
        monkeypatch.undo()
        while engine.health != "ready":
            await asyncio.sleep(0.05)
        assert (await engine.snapshot())["pid"] != pid

    monkeypatch.setattr(engine, "_stall_timeout_s", 0.5)
    # Let the wait that began under the longer time end first.
    run(runner, engine.generate("x", None, {"max_tokens": 2}))
    run(runner, work())


def test_what_was_not_started_says_how(runner: asyncio.Runner) -> None:
    with pytest.raises(EngineUnavailable, match="async with"):
        run(runner, AsyncEngine().generate("x"))


@pytest.mark.ci
def test_a_long_folder_for_temporary_files_is_no_fault(
    tiny: dict[str, str], runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def work() -> None:
        async with AsyncEngine(**tiny, context_length=200) as engine:
            assert (await engine.generate("when", DATE)).finish_reason == "stop"

    run(runner, work())


def test_messages_come_back_as_they_were() -> None:
    sampling = SamplingParams(logit_bias={3: 1.0}, stop=["a"], top_k=3, seed=-(2**63))
    request = Request(1, (1, 2), sampling, None, 5, frozenset([1]), 2**61, 7)
    start = messages.AddRequest(request, DATE)
    assert messages.decode_to_server(messages.encode(start)) == start


async def end_as_a_message_comes() -> bool:
    client = EngineClient({}, 60.0)
    arriving: list[asyncio.Future[messages.EngineOutputs]] = []

    class Talking:
        async def receive(self) -> messages.EngineOutputs:
            arriving.append(asyncio.get_running_loop().create_future())
            return await arriving[-1]

    started = asyncio.get_running_loop().create_future()
    receiver = asyncio.create_task(client._receive(cast("Any", Talking()), started))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    arriving[-1].set_result(messages.EngineOutputs())
    receiver.cancel()
    await asyncio.wait({receiver}, timeout=1.0)
    return receiver.cancelled()


def test_a_message_does_not_hold_up_the_end() -> None:
    assert asyncio.run(end_as_a_message_comes())


def test_a_closed_engine_takes_no_requests(engine: AsyncEngine, runner: asyncio.Runner) -> None:
    """The last of those that share the engine."""

    async def work() -> None:
        generator = Generator(engine, DATE)
        task = asyncio.create_task(engine.generate("go", None, LONG))
        while not engine.open_requests:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineUnavailable, match="was closed while"):
            await task
        for call in (
            lambda: engine.generate("go"),
            lambda: anext(engine.stream("go")),
            lambda: generator("go"),
            engine.snapshot,
        ):
            with pytest.raises(EngineUnavailable, match="the engine is closed"):
                await call()
        assert engine.health == "closed"
        await engine.close()

    run(runner, work())
