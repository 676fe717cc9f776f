"""Clients that leave, at every stage of a request; part of :mod:`bench.attack`."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONG = {"max_new_tokens": 2000, "ignore_eos": True}
# How long a client waits before it leaves, and, at most, for its first event.
STAY_S, PATIENCE_S = 0.3, 20.0
numbers = itertools.count()


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def in_the_head(streams: Streams) -> None:
    """The head of a request has not ended."""
    streams[1].write(b"POST /generate HTTP/1.1\r\nHost: local")


async def in_the_body(streams: Streams) -> None:
    """Half of a body has come."""
    streams[1].write(_request("/tokenize", {"prompt": "a" * 2**20})[: 2**19])


async def at_once(streams: Streams) -> None:
    """The request has come, and maybe nothing was done."""
    streams[1].write(_request("/generate", {"text": "a", "sampling_params": LONG}))
    await streams[1].drain()


async def before_the_answer(streams: Streams) -> None:
    """The engine works on a whole answer."""
    streams[1].write(_request("/generate", {"text": "a", "sampling_params": LONG | {"n": 2}}))
    await asyncio.sleep(STAY_S)


async def in_a_stream(streams: Streams) -> None:
    """Some events of a stream were read."""
    streams[1].write(_request("/generate", {"text": "a", "stream": True, "sampling_params": LONG}))
    async with asyncio.timeout(PATIENCE_S):
        await streams[0].readuntil(b"data: ")


async def without_reading(streams: Streams) -> None:
    """A stream with log-probabilities of which nothing was read."""
    body = {"text": "a", "stream": True, "sampling_params": LONG, "return_logprob": True}
    streams[1].write(_request("/generate", body | {"top_logprobs_num": 20}))
    await asyncio.sleep(STAY_S)


async def while_it_compiles(streams: Streams) -> None:
    """The grammar is new, and is read or compiled."""
    number = next(numbers)
    properties = {f"property_{number}_{i}": {"type": "string"} for i in range(60)}
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}
    hi = [{"role": "user", "content": "hi"}]
    streams[1].write(_request("/v1/chat/completions", {"messages": hi, "response_format": form}))
    await asyncio.sleep(STAY_S / 10)


STAGES: dict[str, Callable[[Streams], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        in_the_head, in_the_body, at_once, before_the_answer, in_a_stream, without_reading,
        while_it_compiles,
    )
}  # fmt: skip


async def disconnects(url: str, per_minute: float, seconds: float) -> Counter[str]:
    """Send so many clients a minute that leave, one stage after another; how many left when.

    A server that closed first, or gave no event in time, counts as ``refused``.
    """
    where = urlsplit(url)
    done: Counter[str] = Counter()

    async def one(name: str) -> None:
        try:
            streams = await asyncio.open_connection(where.hostname, where.port, limit=2**16)
            try:
                await STAGES[name](streams)
            finally:
                streams[1].transport.abort()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            name = "refused"
        done[name] += 1

    start = time.monotonic()
    names = itertools.cycle(STAGES)
    async with asyncio.TaskGroup() as group:
        for number in range(round(per_minute * seconds / 60)):
            await asyncio.sleep(max(0.0, start + number * 60 / per_minute - time.monotonic()))
            group.create_task(one(next(names)))
    return done
