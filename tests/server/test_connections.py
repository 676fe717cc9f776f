"""Connections cost a bounded time and number, whatever their clients do or leave out."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import time
from collections.abc import Iterable, Iterator

import httpx
import pytest

from overlap_spec.errors import ConfigError
from overlap_spec.server.connections import most_connections
from overlap_spec.server.run import bind
from overlap_spec.server.settings import ServerSettings
from tests.support.serving import FIXED, Server, raw, rest, wait_for
from tests.support.skips import needs_weights
from tests.support.tiers import few

LIMIT = 24
pytestmark = needs_weights


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = {
        "--max-connections": str(LIMIT), "--header-timeout-s": "1", "--body-timeout-s": "1.5",
        "--idle-timeout-s": "1",
    }  # fmt: skip
    made = Server(*FIXED, *(word for pair in flags.items() for word in pair))
    yield made
    made.kill()


def head(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *fields, "\r\n"]).encode()


def drip(client: socket.socket, parts: Iterable[bytes], pause_s: float) -> None:
    """Send one after the other; ConnectionError once the server has closed."""
    for part in parts:
        client.sendall(part)
        time.sleep(pause_s)


def took_s(client: socket.socket) -> tuple[bytes, float]:
    """What comes until the server closes, and how long that was: at least what it waits."""
    start = time.monotonic()
    found = rest(client)
    return found, time.monotonic() - start


@pytest.mark.parametrize(
    "said",
    few([b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b"], b"GET /hea"),
)
def test_a_head_that_does_not_come_is_closed(server: Server, said: bytes) -> None:
    with raw(server.url, said) as client:
        found, seconds = took_s(client)
    assert found.startswith(b"HTTP/1.1 408")
    assert b"header_timeout_s" in found
    assert seconds > 0.5


@pytest.mark.ci
def test_a_head_in_drops_is_closed(server: Server) -> None:
    said = b"GET /health HTTP/1.1\r\n" + b"X-Long: a\r\n" * 10
    with raw(server.url) as client, pytest.raises(ConnectionError):
        drip(client, [bytes([byte]) for byte in said], 0.1)


@pytest.mark.ci
def test_a_second_head_has_the_deadline_too(server: Server) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with raw(server.url, ask) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HT")
        found = rest(client)
    assert b"HTTP/1.1 408" in found


def test_a_body_that_does_not_come_is_closed(server: Server) -> None:
    said = head("/generate", "Content-Type: application/json", "Content-Length: 100")
    with raw(server.url, said + b'{"text"') as client:
        found, seconds = took_s(client)
    assert b"408" in found.splitlines()[0]
    assert b"body_timeout_s" in found
    assert seconds > 1


@pytest.mark.ci
def test_the_rest_of_a_refused_body_is_not_read_for_ever(server: Server) -> None:
    said = head("/generate", "Transfer-Encoding: chunked").replace(b"localhost", b"evil.example")
    with raw(server.url, said) as client, pytest.raises(ConnectionError):
        drip(client, itertools.repeat(b"400\r\n" + b"x" * 1024 + b"\r\n"), 0.05)


def test_an_early_answer_leaves_the_connection_open(server: Server) -> None:
    body = json.dumps({"text": "hi"}).encode()
    fields = f"Content-Length: {len(body)}"
    evil = head("/generate", fields).replace(b"localhost", b"evil.example")
    with raw(server.url, evil) as client:
        found = b""
        while not found.endswith(b"}}"):
            found += client.recv(65536)
        assert found.startswith(b"HTTP/1.1 403")
        client.sendall(body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed(server: Server) -> None:
    with raw(server.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        found, seconds = took_s(client)
    assert b"HTTP/1.1 200" in found
    assert seconds > 0.5


def test_a_body_in_chunks_of_a_byte_is_refused(server: Server) -> None:
    with raw(server.url, head("/generate", "Transfer-Encoding: chunked")) as client:
        with contextlib.suppress(OSError):
            client.sendall(b"1\r\n[\r\n" * 100_000)
        assert rest(client).startswith(b"HTTP/1.1 400")


def test_a_body_in_ordinary_chunks_is_read(server: Server) -> None:
    text = json.dumps({"prompt": "word " * 20_000}).encode()
    parts = (text[at : at + 100] for at in range(0, len(text), 100))
    json_type = {"Content-Type": "application/json"}
    reply = httpx.post(server.url + "/tokenize", content=parts, headers=json_type, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] > 1000


def test_long_heads_are_refused(server: Server) -> None:
    many = [f"X-{number}: {'a' * 100}" for number in range(1000)]
    with raw(server.url) as client:
        with contextlib.suppress(OSError):
            client.sendall(head("/generate", *many))
        assert rest(client).startswith(b"HTTP/1.1 4")


def test_idle_connections_make_room_for_requests(server: Server) -> None:
    with httpx.Client() as client, contextlib.ExitStack() as stack:
        assert client.get(server.url + "/health").status_code == 200
        for number in range(3 * LIMIT):
            stack.enter_context(raw(server.url))
            # A connection that is used is not the one that goes.
            if number % 8 == 0:
                assert client.get(server.url + "/health").status_code == 200
    with contextlib.ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(raw(server.url))
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert stack.enter_context(raw(server.url, ask)).recv(65536).startswith(b"HTTP/1.1 200")
    assert server.metric("connections_refused_total") >= 2 * LIMIT


def test_more_requests_than_connections_are_refused(server: Server) -> None:
    said = head("/generate", "Content-Type: application/json", "Content-Length: 100") + b"{"
    before = server.metric("connections_refused_total")
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(raw(server.url, said))
        time.sleep(0.3)
        # One that says nothing, and one that asks.
        for asks in (b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with raw(server.url, asks) as client:
                found = rest(client)
            assert found.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in found
    wait_for(lambda: httpx.get(server.url + "/health").status_code == 200, 10)
    wait_for(lambda: server.metric("connections_refused_total") >= before + 2, 10)


def test_the_descriptor_limit_is_raised() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("the system allows too few")
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert most_connections(ServerSettings(max_connections=700)) == 700
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1400
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_a_taken_port_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}: "):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="nonexistent"):
        bind("host.nonexistent.invalid", 1)
