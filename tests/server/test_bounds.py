"""One client's large or odd request holds up nobody else: refused at once, or done elsewhere."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import httpx
import pytest
from pydantic import FailFast

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.errors import RequestFailed
from overlap_spec.server import admin, chat, completions, messages, responses, sglang
from overlap_spec.server.keys import Keys
from overlap_spec.server.middleware import MOST_VALUES, GuardMiddleware
from overlap_spec.server.protocol import Strict
from overlap_spec.server.settings import ServerSettings
from overlap_spec.types import Delta, Request, SamplingParams
from tests.support.serving import Server, error_of, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
# Far over what a bounded reply needs on a machine with six other busy processes.
SOON_S = 10.0


class Probe:
    """Asks for /health again and again; ``worst_s`` is the longest that it waited."""

    def __init__(self, server: Server) -> None:
        self.worst_s = 0.0
        self._url, self._end = server.url + "/health", threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._end.is_set():
                start = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    client.get(self._url)
                self.worst_s = max(self.worst_s, time.monotonic() - start)
                time.sleep(0.01)

    def end(self) -> None:
        self._end.set()


@contextlib.contextmanager
def probed(server: Server) -> Iterator[Probe]:
    """Checks that /health answers all along the block."""
    probe = Probe(server)
    thread = threading.Thread(target=probe.run)
    thread.start()
    try:
        yield probe
        time.sleep(0.1)
    finally:
        probe.end()
        thread.join(60)
    assert probe.worst_s < SOON_S


def quick(server: Server, path: str, content: str | bytes, status: int = 400) -> dict[str, Any]:
    """The error of a body that must be refused soon."""
    with probed(server):
        start = time.monotonic()
        error = error_of(server.post(path, content), status)
        assert time.monotonic() - start < SOON_S
    return error


def test_many_wrong_items_give_one_error(server: Server) -> None:
    count = MOST_VALUES // 2
    nulls = '{"prompt":[' + "null," * count + "null]}"
    assert quick(server, TEXT, nulls)["param"].startswith("prompt")
    mixed = '{"prompt":[1,' + '"a",' * count + "1]}"
    quick(server, TEXT, mixed)
    messages = '{"messages":[' + "7," * count + "7]}"
    assert quick(server, CHAT, messages)["param"] == "messages[0]"


def test_too_many_values_are_refused_unread(server: Server) -> None:
    nulls = '{"prompt":[' + "null," * 10**6 + "null]}"
    assert "values" in quick(server, TEXT, nulls, 413)["message"]
    lists = '{"prompt":[' + "[]," * 10**6 + "[]]}"
    quick(server, TEXT, lists, 413)


def test_the_first_unknown_field_is_refused(server: Server) -> None:
    many = {f"unknown{i}": i for i in range(50_000)}
    error = quick(server, CHAT, json.dumps({"messages": HI} | many))
    assert (error["param"], error["message"]) == ("unknown0", "unknown0: unknown field")
    bias = {f"wrong{i}": "x" for i in range(50_000)}
    assert quick(server, CHAT, json.dumps({"messages": HI, "logit_bias": bias}))
    long = {"x" * 2**20: 1}
    assert len(quick(server, CHAT, json.dumps({"messages": HI} | long))["message"]) < 5000


def test_choices_are_counted_before_anything_is_made_of_them(server: Server) -> None:
    texts = ["a"] * 4000
    body: dict[str, Any] = {"text": texts, "sampling_params": {"n": 128, "max_new_tokens": 1}}
    assert quick(server, "/generate", json.dumps(body))["param"] == "n"
    body = {"prompt": texts, "n": 128, "max_tokens": 1, "echo": True}
    assert quick(server, TEXT, json.dumps(body))["param"] == "n"
    quick(server, "/generate", json.dumps({"text": ["a"] * 20_000}))


def test_texts_are_measured_before_they_are_tokenised(server: Server) -> None:
    long = "hello world, this is " * 250_000
    assert "characters" in quick(server, "/tokenize", json.dumps({"prompt": long}))["message"]
    chat = json.dumps({"messages": [{"role": "user", "content": long}]})
    quick(server, "/tokenize", chat)
    assert "shorten" in quick(server, CHAT, chat)["message"]
    quick(server, TEXT, json.dumps({"prompt": long}))
    quick(server, "/generate", json.dumps({"text": ["a", long]}))
    arguments = json.dumps({"a": long})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]}
    quick(server, CHAT, json.dumps({"messages": [*HI, said]}))
    parts = [{"type": "text", "text": long[: 2**19]}] * 8
    quick(server, CHAT, json.dumps({"messages": [{"role": "user", "content": parts}]}))


def test_long_texts_are_tokenised_beside_the_loop(server: Server) -> None:
    long = json.dumps({"prompt": "hello world, this is " * 49_000})
    with probed(server):
        reply = server.post("/tokenize", long)
        assert reply.json()["count"] > 100_000
        tokens = reply.json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens[: 2**17]}).status_code == 200


def slow_schema(length: int) -> dict[str, Any]:
    """Draft 4 wants an enum's values to differ, and each is compared with all others."""
    values: list[Any] = [i if i % 2 else {"a": i} for i in range(length)]
    return {"$schema": "http://json-schema.org/draft-04/schema#", "enum": values}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.ci
def test_a_slow_schema_holds_up_no_other(server: Server) -> None:
    slow = {"messages": HI, "max_tokens": 1} | response_format(slow_schema(20_000))
    properties = {f"property_{i}": {"enum": [f"value_{i}"]} for i in range(120)}
    good = {"messages": HI, "max_tokens": 1} | response_format({"properties": properties})
    assert len(json.dumps(good)) > 4096
    with probed(server):
        asked = [server.later(CHAT, slow) for _ in range(4)]
        time.sleep(0.2)
        start = time.monotonic()
        assert server.post(CHAT, good).status_code == 200
        assert time.monotonic() - start < 2 * SOON_S
        replies = [each.result(60) for each in asked]
    assert {reply.status_code for reply in replies} <= {400, 429}
    assert any("cannot be read" in reply.text for reply in replies)


def test_a_client_that_leaves_ends_the_reading_of_its_schema(server: Server) -> None:
    slow = {"messages": HI, "max_tokens": 1} | response_format(slow_schema(20_000))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=slow, timeout=2)
    wait_for(lambda: not busy_readers(server), 30)


def busy_readers(server: Server) -> list[int]:
    """Reader processes of the server that compute now."""
    before = reader_ticks(server)
    time.sleep(0.3)
    after = reader_ticks(server)
    return [pid for pid, ticks in after.items() if ticks > before.get(pid, 0) + 2]


def reader_ticks(server: Server) -> dict[int, int]:
    """Ticks of CPU that each worker that reads the server's grammars has used."""
    found = {}
    for pid in server.readers():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            found[pid] = int(stat.rpartition(")")[2].split()[11])
    return found


@contextlib.contextmanager
def unread(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """A stream whose client sends its request and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body | {"stream": True}).encode()
    with socket.socket() as client:
        # Little room on the way, so that the server soon has to wait.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


@pytest.mark.ci
def test_streams_that_nobody_reads_end_and_hold_up_nobody(server: Server) -> None:
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {
        "text": "a", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20,
        "return_text_in_logprobs": True,
    }  # fmt: skip
    with probed(server), contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(unread(server, body))
        wait_for(lambda: server.state()["running"] > 0)
        wait_for(lambda: server.state()["running"] == 0, 90)
        stack.close()
    server.settle()


async def _read_too_late() -> None:
    aborted: list[int] = []
    request = Request(7, (1,), SamplingParams(), None, 1, frozenset(), 0, 0)
    handle = AsyncRequestHandle(request, aborted.append)
    handle.limit_unread(10_000)
    for token in range(1000):
        handle.push(Delta("a", (token,)))
    assert aborted == [7]
    assert not handle.deltas
    with pytest.raises(RequestFailed, match="not read"):
        await anext(handle)


def test_unread_output_is_bounded() -> None:
    asyncio.run(_read_too_late())


@pytest.mark.ci
def test_a_stopped_engine_is_seen(server: Server) -> None:
    pid = server.state()["pid"]
    assert server.get("/health").status_code == 200
    assert server.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
    time.sleep(2)
    assert server.metric("engine_silence_seconds") < SOON_S
    os.kill(pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert server.metric("engine_up") == 1
        assert time.monotonic() - start < SOON_S
        wait_for(lambda: server.get("/health").status_code == 503, 60)
        assert server.get("/health").json()["status"] == "silent"
        start = time.monotonic()
        assert server.metric("engine_up") == 0
        assert server.metric("kv_pages") > 0
        assert 0 < server.metric("kv_touched_bytes") <= server.metric("kv_bytes")
        assert server.get("/server_info").json()["state"] is None
        assert time.monotonic() - start < SOON_S
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: server.get("/health").status_code == 200, 60)
    assert server.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
    assert 10**6 < server.metric("front_resident_bytes") < 400 * 2**20


def test_only_names_of_this_machine_reach_a_loopback_server(server: Server) -> None:
    port = server.url.rsplit(":")[-1]
    for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}", f"LOCALHOST:{port}"):
        assert httpx.get(server.url + "/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        for path in ("/health", "/v1/models", "/"):
            reply = httpx.get(server.url + path, headers={"host": host})
            assert error_of(reply, 403)["code"] == "host_not_allowed"


@contextlib.asynccontextmanager
async def guarded(app: Any, settings: ServerSettings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application behind the guard, which counts no body at the end."""
    guard = GuardMiddleware(app, settings, Keys(settings), lambda _: None)
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert guard.bodies.total == 0


async def body(size: int, stalls_s: float = 0.0) -> AsyncIterator[bytes]:
    """One whose length is not told before."""
    await asyncio.sleep(stalls_s)
    yield b"x" * size


BEGIN = {"type": "http.response.start", "status": 200, "headers": []}
ENDED = {"type": "http.response.body"}


async def _call(
    settings: ServerSettings, bodies: list[int], host: str = "localhost", key: str = ""
) -> list[int]:
    """Statuses of requests whose bodies are in flight together."""
    entered = asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await entered.wait()
        await send(BEGIN)
        await send(ENDED)

    async with guarded(app, settings) as client:
        headers = {"host": host, "authorization": f"Bearer {key}"}
        asked = [client.post("/generate", content=body(n), headers=headers) for n in bodies]
        tasks = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0.05)
        entered.set()
        return sorted(reply.status_code for reply in await asyncio.gather(*tasks))


def test_bodies_in_flight_are_bounded_together() -> None:
    # The process of the tests may have more memory than a front.
    settings = ServerSettings(max_body_bytes=2048, max_bodies_bytes=5000, max_front_bytes=2**40)
    assert asyncio.run(_call(settings, [2000] * 4)) == [200, 200, 429, 429]
    assert asyncio.run(_call(settings, [3000, 100])) == [200, 413]


async def _beside_a_stream(started: bool) -> int:
    """The status of a request beside one whose answer goes on, and has begun or not."""
    settings = ServerSettings(max_body_bytes=2048, max_bodies_bytes=3000, max_front_bytes=2**40)
    under_way, end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        is_first = scope["path"] == "/first"
        if started or not is_first:
            await send(BEGIN)
        if is_first:
            under_way.set()
            await end.wait()
        if is_first and not started:
            await send(BEGIN)
        await send(ENDED)

    async with guarded(app, settings) as client:
        first = asyncio.ensure_future(client.post("/first", content=body(2000)))
        await under_way.wait()
        second = await client.post("/second", content=body(2000))
        end.set()
        await first
    return second.status_code


def test_a_stream_that_has_begun_holds_its_body_no_longer() -> None:
    assert asyncio.run(_beside_a_stream(started=False)) == 429
    assert asyncio.run(_beside_a_stream(started=True)) == 200


def test_a_front_over_its_memory_refuses_all_but_one() -> None:
    settings = ServerSettings(max_front_bytes=2**20)
    assert asyncio.run(_call(settings, [100] * 3)) == [200, 503, 503]
    assert asyncio.run(_call(settings, [100])) == [200]
    settings = ServerSettings(max_front_bytes=2**40)
    assert asyncio.run(_call(settings, [100] * 3)) == [200] * 3


def test_a_request_without_a_key_is_refused() -> None:
    settings = ServerSettings(api_key="anna", max_front_bytes=2**40)
    found = [asyncio.run(_call(settings, [1], key=key)) for key in ("", "bert", "anna")]
    assert found == [[401], [401], [200]]


def test_allowed_hosts() -> None:
    settings = ServerSettings(allowed_hosts=("Model.example",))
    assert asyncio.run(_call(settings, [1], "model.example:80")) == [200]
    assert asyncio.run(_call(settings, [1], "other.example")) == [403]
    assert asyncio.run(_call(ServerSettings(host="0.0.0.0"), [1], "other.example")) == [200]


def test_a_body_that_stalls_is_refused() -> None:
    async def call() -> int:
        settings = ServerSettings(body_timeout_s=0.1, max_front_bytes=2**40)
        async with guarded(None, settings) as client:
            return (await client.post("/generate", content=body(1, stalls_s=60))).status_code

    assert asyncio.run(call()) == 408


def lists_of(annotation: Any, fails_fast: bool = False) -> Iterator[tuple[Any, bool]]:
    """Every list in a type, and whether it stops at its first error."""
    if get_origin(annotation) is Annotated:
        inner, *about = get_args(annotation)
        marks = [mark for one in about for mark in getattr(one, "metadata", [one])]
        yield from lists_of(inner, any(isinstance(mark, FailFast) for mark in marks))
        return
    if get_origin(annotation) is list:
        yield annotation, fails_fast
    for inner in get_args(annotation):
        yield from lists_of(inner)


def test_every_list_of_a_body_fails_fast() -> None:
    bodies = [
        each
        for module in (admin, chat, completions, messages, responses, sglang)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Strict)
    ]
    seen = 0
    for body in bodies:
        for name, field in body.model_fields.items():
            own = any(isinstance(one, FailFast) for one in field.metadata)
            for found, fails_fast in lists_of(field.annotation, own):
                seen += 1
                # A list of anything has no wrong item.
                assert fails_fast or found == list[Any], f"{body.__name__}.{name}"
    assert seen > 10
