"""Attacks that take what others need: connections, bodies, compiles, the queue, the step; part of
:mod:`bench.attack`.

The attackers come from an address of their own, as each holder of the server waits for itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

# Of Linux's loopback, which is a network.
ATTACKER = "127.0.0.2"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMAS, SLOW_SCHEMAS, QUEUED = 60, 40, 9
# One-byte bodies, then connections a second and for how long.
BODIES, RATE, RATE_S = 1040, 40, 3.0
STALLED_S, SILENT_S = 2.0, 3.0
numbers = itertools.count()
Attack = Callable[[httpx.AsyncClient, str], Awaitable[int]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str, **more: Any) -> Streams:
    """An attacker's connection to the server."""
    where = urlsplit(url)
    local = (ATTACKER, 0)
    return await asyncio.open_connection(where.hostname, where.port, local_addr=local, **more)


def attacking_client(most: int, patience_s: float = 90) -> httpx.AsyncClient:
    """An attacker's client with at most so many connections, which waits so long for an answer."""
    limits = httpx.Limits(max_connections=most)
    transport = httpx.AsyncHTTPTransport(local_address=ATTACKER, limits=limits)
    return httpx.AsyncClient(transport=transport, timeout=patience_s)


def asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chat under a schema that no other one equals."""
    own = schema | {"$comment": f"number {next(numbers)}"}
    form = {"type": "json_schema", "json_schema": {"schema": own}}
    return {"messages": HI, "max_tokens": 4, "response_format": form, **more}


class GoodSchemas:
    """Another client's new schemas beside a flood.

    Attributes:
        worst_ms: The slowest answer to one.
    """

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def ask(self, url: str, times: int) -> int:
        """Ask with some new schemas, one after another; the highest status."""
        status = 0
        async with httpx.AsyncClient(timeout=90) as client:
            for _ in range(times):
                await asyncio.sleep(1)
                many = {f"field_{i}": {"enum": [f"value_{i}"]} for i in range(60)}
                body = asked({"type": "object", "properties": many})
                start = time.monotonic()
                reply = await client.post(url + CHAT, json=body)
                self.worst_ms = max(self.worst_ms, 1e3 * (time.monotonic() - start))
                status = max(status, reply.status_code)
        return status

    async def beside(self, url: str, bodies: list[dict[str, Any]]) -> int:
        """Ask while an attacker asks with all of ``bodies`` at once, who leaves then."""
        async with attacking_client(len(bodies)) as client:
            flood = [asyncio.ensure_future(client.post(url + CHAT, json=body)) for body in bodies]
            status = await self.ask(url, 3)
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        return status

    async def compiles(self, _: httpx.AsyncClient, url: str) -> int:
        """Small schemas that take long to compile."""
        parts = [{"pattern": "^[ab]*a[ab]{10}$"}, {"pattern": "^[ab]*b[ab]{8}$"}]
        schema = {"type": "string", "allOf": parts}
        return await self.beside(url, [asked(schema) for _ in range(SCHEMAS)])

    async def reader(self, _: httpx.AsyncClient, url: str) -> int:
        """Schemas that take long to read."""
        values = [i if i % 2 else {"a": i} for i in range(8_000)]
        schema = {"$schema": "http://json-schema.org/draft-04/schema#", "enum": values}
        return await self.beside(url, [asked(schema) for _ in range(SLOW_SCHEMAS)])


async def idle_connections(_: httpx.AsyncClient, url: str) -> int:
    """More connections than the server keeps open, which ask for nothing."""
    await _silent(url, 1200, b"")
    return 0


async def slow_heads(_: httpx.AsyncClient, url: str) -> int:
    """Requests whose heads stop in the middle."""
    await _silent(url, 200, b"GET /health HTTP/1.1\r\nHost: local")
    return 0


async def _silent(url: str, count: int, said: bytes) -> None:
    writers = []
    for _ in range(count):
        _, writer = await connect(url)
        writer.write(said)
        writers.append(writer)
    await asyncio.sleep(SILENT_S)
    for writer in writers:
        writer.transport.abort()


async def small_bodies(_: httpx.AsyncClient, url: str) -> int:
    """Bodies of which one byte comes, and then new connections all the time."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    writers: list[asyncio.StreamWriter] = []
    for _number in range(BODIES):
        writers.append((await connect(url))[1])
        writers[-1].write(head.encode())
    for _number in range(round(RATE * RATE_S)):
        writers.append((await connect(url))[1])
        writers[-1].write(head.encode())
        await asyncio.sleep(1 / RATE)
    for writer in writers:
        writer.transport.abort()
    return 0


async def open_bodies(_: httpx.AsyncClient, url: str) -> int:
    """Bodies on a path that needs no key."""
    head = "POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
    writers = []
    for _number in range(10):
        writers.append((await connect(url))[1])
        writers[-1].write(head.encode() + b"x" * 7_000_000)
    await asyncio.sleep(STALLED_S)
    for writer in writers:
        writer.transport.abort()
    return 0


async def full_queue(_: httpx.AsyncClient, url: str) -> int:
    """More outputs than may wait; their client leaves after a while."""
    body = {"prompt": "a", "n": 128, "max_tokens": 200, "ignore_eos": True}
    async with attacking_client(QUEUED) as client:
        flood = [asyncio.ensure_future(client.post(url + TEXT, json=body)) for _ in range(QUEUED)]
        await asyncio.sleep(STALLED_S)
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    return 0


async def weighed_choices(client: httpx.AsyncClient, url: str) -> int:
    """A choice of many texts, which are weighed for many outputs."""
    texts = [json.dumps(number) for number in range(4000)]
    choice = {"choice": texts, "probabilities": True}
    body = {"messages": HI, "n": 128, "structured_outputs": choice, "max_tokens": 8}
    return (await client.post(url + CHAT, json=body)).status_code


async def at_once(_: httpx.AsyncClient, url: str) -> int:
    """Requests one behind the other, without waiting for answers."""
    one = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
        + b'{"prompt":"a"}'
    )
    reader, writer = await connect(url)
    writer.write(one * (52_000 // len(one)))
    line = await reader.readline()
    writer.transport.abort()
    return int(line.split()[1])


def shares_attacks(good: GoodSchemas) -> dict[str, Attack]:
    """These attacks by their names."""
    return {
        "idle_connections": idle_connections,
        "slow_heads": slow_heads,
        "small_bodies": small_bodies,
        "open_bodies": open_bodies,
        "full_queue": full_queue,
        "weighed_choices": weighed_choices,
        "at_once": at_once,
        "slow_compiles": good.compiles,
        "slow_reading": good.reader,
    }
