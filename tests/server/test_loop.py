"""Nothing that a client sends holds the event loop, and what does would be seen."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from overlap_spec.ipc import messages as m
from overlap_spec.ipc.request_handle import AsyncRequestHandle
from overlap_spec.ipc.server import MOST_VALUES, in_parts
from overlap_spec.server.events import PART_BYTES, InParts, sse, written
from overlap_spec.server.loop_turns import Buckets, Turnstile, TurnTimes, timed_loop
from overlap_spec.server.sglang import GenerateBody, SGLangFormatter
from overlap_spec.stats import RequestStats
from overlap_spec.types import Delta, Output, Request, SamplingParams, TokenLogprobs
from tests.support.serving import MOST_TURN_S, Server
from tests.support.tiers import few

CHAT = "/v1/chat/completions"
LONG = "hello world, this is " * 250_000


@pytest.mark.clock
def test_a_turn_that_computes_is_seen_and_one_that_waits_is_not() -> None:
    turns = TurnTimes()

    async def work() -> None:
        turns.reset()
        await asyncio.sleep(0.2)
        assert turns.worst_s < 0.05
        end = time.thread_time() + 0.12
        while time.thread_time() < end:
            pass
        await asyncio.sleep(0)
        time.sleep(0.3)
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=timed_loop(turns)) as runner:
        runner.run(work())
    assert 0.1 < turns.worst_s < 0.25
    assert turns.worst_wall_s > 0.29
    assert sum(turns.took.counts) > 3


@pytest.mark.clock
def test_large_pieces_of_work_share_no_turn() -> None:
    turns = TurnTimes()

    async def piece(turnstile: Turnstile) -> None:
        await turnstile()
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    async def work() -> None:
        turnstile = Turnstile()
        await asyncio.gather(*(piece(turnstile) for _ in range(10)))

    with asyncio.Runner(loop_factory=timed_loop(turns)) as runner:
        runner.run(work())
    assert turns.worst_s < 0.04


def test_events_are_written_in_parts() -> None:
    long = {"text": "a" * 5 * PART_BYTES}
    body = json.dumps(long, separators=(",", ":")).encode()
    in_parts = InParts([body[:10], body[10:200_000], body[200_000:]])
    for event in (long, in_parts):
        pieces = list(sse(event))
        assert b"".join(pieces) == b"data: " + body + b"\n\n"
    assert len(pieces) == 3
    assert list(sse(InParts([b"{", b"}"]))) == [b"data: {}\n\n"]


@pytest.mark.ci
def test_long_streams_with_logprobs_hold_no_turn() -> None:
    """Tokens of a long context: one event has 26 MB."""
    tokens, turns = 80_000, TurnTimes()
    request = Request(7, (1,), SamplingParams(), None, 1, frozenset(), 0, 0)
    handle = AsyncRequestHandle(request, lambda _: None)
    entry = TokenLogprobs(-1.25, ((1, -1.25),) * 20)
    body = GenerateBody(text="a", stream=True, return_logprob=True, top_logprobs_num=20)
    formatter = SGLangFormatter(None, body, ["id"], True)  # type: ignore[arg-type]
    sizes: list[int] = []

    async def feed() -> None:
        for token in range(tokens):
            handle.push(Delta("a", (token,), (entry,)))
            await asyncio.sleep(0)
        handle.push(Delta("", (), (), "length"))
        handle.end(Output("a" * tokens, (1,) * tokens, "length", RequestStats()), None)

    async def work() -> list[bytes]:
        handle.limit_unread(2**30)
        feeding = asyncio.create_task(feed())
        turns.reset()
        parts: list[bytes] = []
        async for event in formatter.events([handle]):
            parts = [part async for part in written(event)]
            sizes.append(sum(map(len, parts)))
        await feeding
        return parts

    with asyncio.Runner(loop_factory=timed_loop(turns)) as runner:
        last = b"".join(runner.run(work()))
    assert turns.worst_s < MOST_TURN_S
    assert sizes[-1] > 24_000_000
    assert sum(sizes) < 25 * sizes[-1] + 8192 * 2**10
    event = json.loads(last.removeprefix(b"data: "))
    meta = event["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == [[-1.25, token, None] for token in range(tokens)]
    assert len(meta["output_top_logprobs"]) == tokens
    assert meta["output_top_logprobs"][-1] == [[-1.25, 1, None]] * 20


def test_buckets_count_many_as_one_by_one() -> None:
    one_by_one, at_once = Buckets((1, 2, 4)), Buckets((1, 2, 4))
    values = [0.5, 1, 1.5, 2, 3, 4, 5, 100]
    for value in values:
        one_by_one.add(value)
    at_once.add_all(values)
    at_once.add_all([])
    assert at_once.counts == one_by_one.counts == [2, 2, 2, 2]
    assert at_once.sum == one_by_one.sum == sum(values)
    at_once.add(1.5, 3)
    assert at_once.counts == [2, 5, 2, 2]


def test_outputs_go_in_parts_and_in_order() -> None:
    entry = TokenLogprobs(-1.0, ((1, -1.0),) * 20)
    delta = Delta("a", (1,), (entry,))
    outputs = m.EngineOutputs(queued=[1, 2])
    outputs.deltas = [m.RequestDelta(number, delta) for number in range(1000)]
    output = Output("a", (1,) * 500, "stop", RequestStats())
    outputs.finished = [m.FinishedRequest(number, output, None) for number in range(20)]
    parts = list(in_parts(outputs))
    assert len(parts) > 5
    assert parts[0].queued == [1, 2]
    assert [each for part in parts for each in part.deltas] == outputs.deltas
    assert [each for part in parts for each in part.finished] == outputs.finished
    for part in parts:
        values = sum(21 + 1 for _ in part.deltas) + 500 * len(part.finished)
        assert values <= MOST_VALUES + 500
    assert list(in_parts(m.EngineOutputs())) == []


def _bodies() -> dict[str, tuple[str, Any, int]]:
    """By name: the path, the body, and how many at once."""
    user = [{"role": "user", "content": "hi"}]
    call = {"name": "f", "arguments": json.dumps({"a": LONG})}
    said = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    enum = [i if i % 2 else {"a": i} for i in range(450)]
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "enum": enum}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "n": 8}
    logprobs = {"text": "a", "sampling_params": sampling, "return_logprob": True}
    logprobs |= {"top_logprobs_num": 20, "return_text_in_logprobs": True}
    prompts = {"text": [LONG[:16_000]] * 64, "sampling_params": {"max_new_tokens": 1}}
    return {
        "large bodies": (CHAT, {"messages": [*user, said]}, 12),
        "many fields": (CHAT, {"messages": user} | {f"x{i}": i for i in range(80_000)}, 2),
        "a short slow schema": (CHAT, {"messages": user, "response_format": form}, 4),
        "long prompts": ("/generate", prompts, 4),
        "long replies": ("/generate", logprobs, 1),
    }


@pytest.mark.parametrize("name", few(_bodies(), "a short slow schema"))
def test_no_request_holds_the_loop(server: Server, name: str) -> None:
    path, body, at_once = _bodies()[name]
    content = json.dumps(body)

    before = server.long_turns()
    with ThreadPoolExecutor(at_once) as pool:
        replies = pool.map(lambda _: server.post(path, content), range(at_once))
        statuses = {reply.status_code for reply in replies}
    assert statuses <= {200, 400, 413, 429}
    assert server.long_turns() == before
