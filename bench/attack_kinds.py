"""The attacks of :mod:`bench.attack`: what is slow to read, what takes others' part, and what takes
memory. The attackers come from an address of their own, as each holder of the server waits for
itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

# Of Linux's loopback, which is a network.
ATTACKER = "127.0.0.2"
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
LONG_TEXT = "hello world, this is " * 250_000
# How long a client waits for an answer, and one that takes memory.
WAITS_S, PATIENCE_S = 90.0, 600.0
numbers = itertools.count()
Body = dict[str, Any]
Attack = Callable[[httpx.AsyncClient, str], Awaitable[int]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str, limit: int = 2**16) -> Streams:
    """An attacker's connection to the server, which reads so many bytes ahead."""
    where, local = urlsplit(url), (ATTACKER, 0)
    return await asyncio.open_connection(where.hostname, where.port, local_addr=local, limit=limit)


def attacking_client(most: int, waits_s: float = WAITS_S) -> httpx.AsyncClient:
    """An attacker's client with at most so many connections."""
    limits = httpx.Limits(max_connections=most)
    transport = httpx.AsyncHTTPTransport(local_address=ATTACKER, limits=limits)
    return httpx.AsyncClient(transport=transport, timeout=waits_s)


def asked(schema: Body, **more: Any) -> Body:
    """A chat under a schema that no other one equals."""
    own = schema | {"$comment": f"number {next(numbers)}"}
    form = {"type": "json_schema", "json_schema": {"schema": own}}
    return {"messages": HI, "max_tokens": 4, "response_format": form, **more}


def slow_enum(count: int) -> Body:
    """A schema that is slow to read."""
    return {"$schema": DRAFT_4, "enum": [i if i % 2 else {"a": i} for i in range(count)]}


def request(path: str, content: bytes, length: int | None = None) -> bytes:
    """A POST as it goes over the wire, whose body is, or is said to be, so long."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


def post(path: str, body: Any, at_once: int = 1) -> Attack:
    """The highest status of some equal requests; ``body``: JSON, or its text."""
    content = body if isinstance(body, str) else json.dumps(body)

    async def one(client: httpx.AsyncClient, url: str) -> int:
        replies = await asyncio.gather(
            *(client.post(url + path, content=content, headers=JSON) for _ in range(at_once))
        )
        return max(reply.status_code for reply in replies)

    return one


def patient(path: str, make: Callable[[], Sequence[Body]]) -> Attack:
    """The highest status of requests one after another, which may take their time."""

    async def one(_: httpx.AsyncClient, url: str) -> int:
        async with attacking_client(1, PATIENCE_S) as client:
            return max([(await client.post(url + path, json=b)).status_code for b in make()])

    return one


def held(count: int, said: bytes, seconds: float, per_second: int = 0) -> Attack:
    """Connections that say this and then neither ask nor read, and more of them meanwhile; 0:
    nothing is answered."""

    async def one(_: httpx.AsyncClient, url: str) -> int:
        writers = []

        async def open_one() -> None:
            _, writer = await connect(url, limit=4096)
            writer.write(said)
            writers.append(writer)

        for _number in range(count):
            await open_one()
        for _number in range(round(per_second * seconds)):
            await open_one()
            await asyncio.sleep(1 / per_second)
        if not per_second:
            await asyncio.sleep(seconds)
        for writer in writers:
            writer.transport.abort()
        return 0

    return one


def answered(count: int, said: bytes) -> Attack:
    """Connections that say this as quickly as it is taken; the highest status of their first
    answers, 0 where a connection ends without one."""

    async def status(url: str) -> int:
        reader, writer = await connect(url)
        writer.write(said)
        try:
            line = await reader.readline()
        except OSError:
            line = b""
        writer.transport.abort()
        return int(line.split()[1]) if line else 0

    async def one(_: httpx.AsyncClient, url: str) -> int:
        return max(await asyncio.gather(*(status(url) for _ in range(count))))

    return one


async def flood(where: str, bodies: Sequence[Body], beside: Awaitable[int]) -> int:
    """Ask with all bodies at once, and leave when what is done beside it is done: its result."""
    async with attacking_client(len(bodies)) as client:
        asks = [asyncio.ensure_future(client.post(where, json=body)) for body in bodies]
        found = await beside
        for each in asks:
            each.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
    return found


async def full_queue(_: httpx.AsyncClient, url: str) -> int:
    """More outputs than may wait; their client leaves after a while."""
    body = {"prompt": "a", "n": 128, "max_tokens": 200, "ignore_eos": True}
    return await flood(url + TEXT, [body] * 9, asyncio.sleep(2.0, 0))


async def foreign_host(client: httpx.AsyncClient, url: str) -> int:
    """A request by a name that a page chose."""
    return (await client.get(url + "/v1/models", headers={"host": "evil.example"})).status_code


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
        async with httpx.AsyncClient(timeout=WAITS_S) as client:
            for _ in range(times):
                await asyncio.sleep(1)
                many = {f"field_{i}": {"enum": [f"value_{i}"]} for i in range(60)}
                body = asked({"type": "object", "properties": many})
                start = time.monotonic()
                reply = await client.post(url + CHAT, json=body)
                self.worst_ms = max(self.worst_ms, 1e3 * (time.monotonic() - start))
                status = max(status, reply.status_code)
        return status

    def beside(self, schema: Body, count: int) -> Attack:
        """Ask while an attacker asks under so many schemas like this one."""

        async def one(_: httpx.AsyncClient, url: str) -> int:
            bodies = [asked(schema) for _ in range(count)]
            return await flood(url + CHAT, bodies, self.ask(url, 3))

        return one


def attacks(good: GoodSchemas) -> dict[str, Attack]:
    """Every attack by its name; each gives the status that it was answered with."""
    form = {"type": "json_schema", "json_schema": {"schema": slow_enum(20_000)}}
    short = {"type": "json_schema", "json_schema": {"schema": slow_enum(450)}}
    call = {"name": "f", "arguments": json.dumps({"a": LONG_TEXT})}
    said = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    prompts = {"text": [LONG_TEXT[:16_000]] * 64, "sampling_params": {"max_new_tokens": 1}}
    logprobs = {"text": "a", "return_logprob": True, "top_logprobs_num": 20}
    streamed = logprobs | {"sampling_params": _long(2000), "stream": True}
    choice = {"choice": [json.dumps(number) for number in range(4000)], "probabilities": True}
    weighed = {"messages": HI, "n": 128, "structured_outputs": choice, "max_tokens": 8}
    slow = [{"pattern": "^[ab]*a[ab]{10}$"}, {"pattern": "^[ab]*b[ab]{8}$"}]
    chunks = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks += b"1\r\n[\r\n" * 200_000 + b"0\r\n\r\n"
    one = request("/tokenize", b'{"prompt":"a"}')
    return {
        "wrong_items": post(TEXT, '{"prompt":[' + "null," * 200_000 + "null]}"),
        "a_million_values": post(TEXT, '{"prompt":[' + "null," * 10**6 + "null]}"),
        "unknown_fields": post(CHAT, {"messages": HI} | {f"unknown{i}": i for i in range(100_000)}),
        "tokenize": post("/tokenize", {"prompt": LONG_TEXT}),
        "tokenize_a_megabyte": post("/tokenize", {"prompt": LONG_TEXT[: 2**20]}),
        "long_arguments": post(CHAT, {"messages": [*HI, said]}, 12),
        "choices": post(GENERATE, {"text": ["a"] * 20_000, "sampling_params": {"n": 128}}),
        "slow_schema": post(CHAT, {"messages": HI, "response_format": form}, 4),
        "long_pattern": post(CHAT, {"messages": HI, "regex": "(a|b)?" * 60_000}),
        "stalled_bodies": held(30, request("/tokenize", b"x" * (7 * 2**20), 8 * 2**20), 3.0),
        "unread_streams": held(3, request(GENERATE, json.dumps(streamed).encode()), 3.0),
        "foreign_host": foreign_host,
        "long_prompts": post(GENERATE, prompts, 4),
        "short_slow_schema": post(CHAT, {"messages": HI, "response_format": short}, 8),
        "many_logprobs": post(GENERATE, _many_logprobs(logprobs)),
        "streamed_logprobs": post(GENERATE, streamed),
        "small_chunks": answered(4, chunks),
        # More than the server keeps open, which ask for nothing; heads that stop in the middle;
        # bodies of which one byte comes, then new ones all the time; bodies where no key is needed.
        "idle_connections": held(1200, b"", 3.0),
        "slow_heads": held(200, b"GET /health HTTP/1.1\r\nHost: local", 3.0),
        "small_bodies": held(1040, request(GENERATE, b"{", 100), 3.0, per_second=40),
        "open_bodies": held(10, request("/health", b"x" * 7_000_000, 8_000_000), 2.0),
        "full_queue": full_queue,
        "weighed_choices": post(CHAT, weighed),
        "at_once": answered(1, one * (52_000 // len(one))),
        "slow_compiles": good.beside({"type": "string", "allOf": slow}, 60),
        "slow_reading": good.beside(slow_enum(8_000), 40),
    }


def _long(tokens: int) -> Body:
    return {"max_new_tokens": tokens, "ignore_eos": True}


def _many_logprobs(logprobs: Body) -> Body:
    return logprobs | {"return_text_in_logprobs": True, "sampling_params": _long(400) | {"n": 16}}


def memory_attacks() -> dict[str, Attack]:
    """Those that take the engine's memory, by their names."""
    doubled = "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60))
    forced = {"structured_outputs": {"grammar": f'{doubled}a60 ::= "a"'}}
    short = {"messages": HI, "max_tokens": 64}
    logprobs = {"text": "a", "return_logprob": True, "top_logprobs_num": 20}

    def lexer_states() -> list[Body]:
        """Small regexes, each with its own states, under long random texts."""
        part = r"([a-z ]*[aeiou][a-z ]{20})([a-z ]*[bcd][a-z ]{21})[a-z ]*"
        more = {"messages": HI, "max_tokens": 400, "temperature": 1.5}
        return [more | {"regex": f"w{next(numbers)}{part}"} for _ in range(34)]

    def large_enums() -> list[Body]:
        """Schemas whose masks take long lists of states."""
        texts = [f"{number * 7919 % 10**6:06d} text" for number in range(5000)]
        return [asked({"enum": [f"{next(numbers)}", *texts]}, max_tokens=16) for _ in range(4)]

    def new_prompts() -> list[Body]:
        """Prompts that nobody asks with again."""
        first = next(numbers)
        texts = [f"{first} {number} " + "hello world " * 300 for number in range(64)]
        return [{"text": texts, "sampling_params": {"max_new_tokens": 1}}]

    long_name = {"text": "a", "rid": "r" * 8_000_000, "sampling_params": {"n": 128}}
    return {
        "doubled_rules": patient(CHAT, lambda: [short | forced]),
        "repeated": patient(CHAT, lambda: [short | {"regex": "a{2147483647}"}]),
        "long_names": patient(GENERATE, lambda: [long_name]),
        "lexer_states": patient(CHAT, lexer_states),
        "large_enums": patient(CHAT, large_enums),
        "new_prompts": patient(GENERATE, new_prompts),
        "logprobs": patient(GENERATE, lambda: [_many_logprobs(logprobs)]),
    }
