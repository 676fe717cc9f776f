"""The attacks of :mod:`bench.attack`: what is slow to read, what takes others' part, clients that
leave, and bodies that are almost valid. The attackers come from an address of their own, as each
holder of the server waits for itself."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
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
# How long a client waits for an answer; how long one that leaves stays, and, at most, for an event.
WAITS_S, STAY_S, PATIENCE_S = 90.0, 0.3, 20.0
numbers = itertools.count()
Body = dict[str, Any]
Attack = Callable[[httpx.AsyncClient, str], Awaitable[int]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str, limit: int = 2**16) -> Streams:
    """An attacker's connection to the server, which reads so many bytes ahead."""
    where, local = urlsplit(url), (ATTACKER, 0)
    return await asyncio.open_connection(where.hostname, where.port, local_addr=local, limit=limit)


def attacking_client(most: int) -> httpx.AsyncClient:
    """An attacker's client with at most so many connections."""
    limits = httpx.Limits(max_connections=most)
    transport = httpx.AsyncHTTPTransport(local_address=ATTACKER, limits=limits)
    return httpx.AsyncClient(transport=transport, timeout=WAITS_S)


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
    many = logprobs | {"return_text_in_logprobs": True, "sampling_params": _long(400) | {"n": 16}}
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
        "many_logprobs": post(GENERATE, many),
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


# Clients that leave


def _asking(path: str, body: Body) -> bytes:
    return request(path, json.dumps(body).encode())


async def in_the_head(streams: Streams) -> None:
    """The head of a request has not ended."""
    streams[1].write(b"POST /generate HTTP/1.1\r\nHost: local")


async def in_the_body(streams: Streams) -> None:
    """Half of a body has come."""
    streams[1].write(request("/tokenize", b'{"prompt":"' + b"a" * 2**19, 2**20))


async def at_once(streams: Streams) -> None:
    """The request has come, and maybe nothing was done."""
    streams[1].write(_asking("/generate", {"text": "a", "sampling_params": _long(2000)}))
    await streams[1].drain()


async def before_the_answer(streams: Streams) -> None:
    """The engine works on a whole answer."""
    streams[1].write(_asking("/generate", {"text": "a", "sampling_params": _long(2000) | {"n": 2}}))
    await asyncio.sleep(STAY_S)


async def in_a_stream(streams: Streams) -> None:
    """Some events of a stream were read."""
    streams[1].write(
        _asking("/generate", {"text": "a", "stream": True, "sampling_params": _long(2000)})
    )
    async with asyncio.timeout(PATIENCE_S):
        await streams[0].readuntil(b"data: ")


async def without_reading(streams: Streams) -> None:
    """A stream with log-probabilities of which nothing was read."""
    body = {"text": "a", "stream": True, "sampling_params": _long(2000), "return_logprob": True}
    streams[1].write(_asking("/generate", body | {"top_logprobs_num": 20}))
    await asyncio.sleep(STAY_S)


async def while_it_compiles(streams: Streams) -> None:
    """The grammar is new, and is read or compiled."""
    properties = {f"property_{i}": {"type": "string"} for i in range(60)}
    streams[1].write(_asking(CHAT, asked({"properties": properties})))
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


# Bodies that are almost valid

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": HI, "max_tokens": 4, "temperature": 0, "seed": 1, "n": 2}),
    (CHAT, {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": HI, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"messages": HI, "max_tokens": 4, "stream": True, "stop": ["a", "b"]}),
    (
        CHAT,
        {
            "messages": [{"role": "system", "content": "Be brief."}, *HI],
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
    (CHAT, {"messages": HI, "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 4, "logit_bias": {"5": 1.5}, "echo": True}),
    (TEXT, {"prompt": [1, 2, 3], "max_tokens": 4, "regex": "[a-c]{2,5}"}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "ebnf": 'root ::= "a"'}}),
    ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 4}, "rid": "x"}),
    (
        "/v1/responses",
        {
            "input": [*HI, {"type": "function_call_output", "call_id": "1", "output": "a"}],
            "instructions": "Be brief.",
            "max_output_tokens": 4,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 4,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 4,
            "system": "Be brief.",
            "stop_sequences": ["b"],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": True}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/abort_request", {"rid": "nobody"}),
)
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 2**63, 2**80, 0.5, "", "\ud800", "\x00", "ü" * 300, [], {}, [[]],
    [None], {"": None}, {"$ref": "#"}, "(" * 50, "[a-z]{1,9999}" * 9, "root ::= root", "{}",
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"enum": list(range(300))},
    {"pattern": "(a*)*b"}, {"maxLength": 10**9}, {"minItems": 10**9},
)  # fmt: skip
# Field of each route that bounds an answer, the most that a changed body may ask for, and what it
# asks for in place of more.
LIMITS = {
    CHAT: "max_tokens",
    TEXT: "max_tokens",
    "/generate": "max_new_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
MOST_TOKENS, FEW_TOKENS = 64, 4
# One in so many is padded to sizes up to the limit of a body.
LARGE_EVERY, LARGEST = 50, 8 * 2**20


def mutations(rng: Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Valid bodies with some changes each: a path and a body."""
    for number in range(count):
        path, valid = rng.choice(VALID)
        body = copy.deepcopy(valid)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(rng, body)
        _keep_short(path, body)
        content = json.dumps(body).encode()
        if rng.random() < 0.15:
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(rng.randrange(4)) + content[at + 1 :]
        if number % LARGE_EVERY == LARGE_EVERY - 1:
            content = _padded(rng, path, body)
        yield path, content


def _keep_short(path: str, body: dict[str, Any]) -> None:
    """Where a change left a valid body that asks for thousands of tokens, ask for few: long answers
    are a load like other users', which is measured by itself."""
    place: Any = body
    if path == "/generate":
        if body.get("sampling_params") is None:
            body["sampling_params"] = {}
        place = body["sampling_params"]
    key = LIMITS.get(path)
    if key is None or not isinstance(place, dict):
        return
    asked = place.get(key)
    if asked is None or (isinstance(asked, int) and asked > MOST_TOKENS):
        place[key] = FEW_TOKENS


def _change(rng: Random, body: Any) -> None:
    """Change one thing at a random place of a tree."""
    place = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.3:
            break
        place = place[key]
    kind = rng.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[f"x{rng.randrange(100)}"] = rng.choice(JUNK)
    elif kind == 2 and isinstance(place[key], str):
        place[key] = place[key] * rng.choice((0, 10, 1000))
    elif kind == 3:
        place[key] = [place[key]] * rng.choice((0, 2, 200))
    elif kind == 4:
        place[key] = {"a": place[key]}
    else:
        place[key] = rng.choice(JUNK)


def _padded(rng: Random, path: str, body: dict[str, Any]) -> bytes:
    size = rng.randrange(2**18, LARGEST - 2**16)
    if path == "/detokenize":
        return json.dumps({"tokens": [1] * (size // 3)}).encode()
    return json.dumps(body | {"user" if path == CHAT else "prompt": "pad " * (size // 4)}).encode()
