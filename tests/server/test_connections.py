"""Connections cost a bounded time and number, whatever their clients do or leave out; what they say
is read in one way or refused, and probes are always answered."""

import contextlib
import itertools
import json
import resource
import socket
import time
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from overlap_spec.errors import ConfigError
from overlap_spec.server.connections import most_connections
from overlap_spec.server.run import bind
from overlap_spec.server.settings import ServerSettings
from tests.support.serving import FIXED, Server, raw, rest, shared_server, wait_for
from tests.support.tiers import few

LIMIT = 24


@pytest.fixture(scope="module", params=few(["own"]))
def server() -> Iterator[Server]:
    flags = {
        "--max-connections": str(LIMIT), "--header-timeout-s": "1", "--body-timeout-s": "3",
        "--idle-timeout-s": "1", "--request-timeout-s": "1",
    }  # fmt: skip
    made = Server(*FIXED, *(word for pair in flags.items() for word in pair))
    yield made
    made.kill()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = "Content-Type: application/json"


def head(path: str, *fields: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", *fields, "\r\n"]
    return "\r\n".join(lines).encode()


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
    with raw(server.url, HEALTH) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HT")
        found = rest(client)
    assert b"HTTP/1.1 408" in found


def test_a_body_that_does_not_come_is_closed(server: Server) -> None:
    said = head("/generate", JSON, "Content-Length: 100")
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
        client.sendall(body + HEALTH)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed(server: Server) -> None:
    with raw(server.url, HEALTH) as client:
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
        assert stack.enter_context(raw(server.url, HEALTH)).recv(65536).startswith(b"HTTP/1.1 200")
    assert server.metric("connections_refused_total") >= 2 * LIMIT


def test_more_requests_than_connections_are_refused(server: Server) -> None:
    said = head("/generate", JSON, "Content-Length: 100") + b"{"
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


CHUNKED = "Transfer-Encoding: chunked"
# Behind each of them stands a request that another reading would see.
SMUGGLING = {
    "both lengths": head("/tokenize", "Content-Length: 5", CHUNKED) + b"0\r\n\r\n",
    "both lengths, chunked first": head("/tokenize", CHUNKED, "Content-Length: 5") + b"0\r\n\r\n",
    "two lengths": head("/tokenize", "Content-Length: 2", "Content-Length: 2") + b"{}",
    "unequal lengths": head("/tokenize", "Content-Length: 2", "Content-Length: 3") + b"{}",
    "a list of lengths": head("/tokenize", "Content-Length: 2, 2") + b"{}",
    "a signed length": head("/tokenize", "Content-Length: +2") + b"{}",
    "a spaced length": head("/tokenize", "Content-Length: 0 2") + b"{}",
    "two encodings": head("/tokenize", CHUNKED, CHUNKED) + b"0\r\n\r\n",
    "an encoding twice": head("/tokenize", "Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n",
    "an unknown encoding": head("/tokenize", "Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    "an encoding behind a tab": head("/tokenize", "Transfer-Encoding:\x0bchunked") + b"0\r\n\r\n",
    "chunks of HTTP/1.0": head("/tokenize", CHUNKED, version="1.0") + b"0\r\n\r\n",
    "space before the colon": head("/tokenize", "Content-Length : 2") + b"{}",
    "a folded field": head("/tokenize", "X-A: b", " Content-Length: 2") + b"{}",
    "a field folded by a tab": head("/tokenize", "X-A: b", "\tc") + b"{}",
    "a bare line feed": head("/tokenize", "X-A: b\nContent-Length: 2") + b"{}",
    "line feeds alone": b"GET /version HTTP/1.1\nHost: localhost\n\n",
    "a bare carriage return": head("/tokenize", "X-A: b\rContent-Length: 2") + b"{}",
    "a line feed before the body": head("/tokenize", "X-A: b")[:-2] + b"\n",
    "a null": head("/tokenize", "X-A: b\0c") + b"{}",
    "no field": head("/tokenize", "no field") + b"{}",
    "two hosts": head("/tokenize", "Host: evil.example") + b"{}",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "an empty line first": b"\n" + HEALTH,
    "a chunk's size with a sign": head("/tokenize", CHUNKED) + b"+2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size with 0x": head("/tokenize", CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size behind a space": head("/tokenize", CHUNKED) + b" 2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size before a space": head("/tokenize", CHUNKED) + b"2 \r\n{}\r\n0\r\n\r\n",
    "a chunk's size on a bare line": head("/tokenize", CHUNKED) + b"2\n{}\r\n0\r\n\r\n",
    "an extension with a bare line": head("/tokenize", CHUNKED) + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "an extension with a bare return": head("/tokenize", CHUNKED) + b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "a chunk that goes on": head("/tokenize", CHUNKED) + b"2\r\n{}xx0\r\n\r\n",
    "a chunk on a bare line": head("/tokenize", CHUNKED) + b"2\r\n{}\n0\r\n\r\n",
    "a huge chunk": head("/tokenize", CHUNKED) + b"f" * 17 + b"\r\n",
    "a trailer on a bare line": head("/tokenize", CHUNKED) + b"2\r\n{}\r\n0\r\nX-A: b\n\r\n",
    "a folded trailer": head("/tokenize", CHUNKED) + b"2\r\n{}\r\n0\r\nX-A: b\r\n c\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_what_can_be_misread_is_refused(server: Server, name: str) -> None:
    with raw(server.url, SMUGGLING[name] + HEALTH) as client:
        found = rest(client)
    assert found.startswith(b"HTTP/1.1 400 ")
    # Nothing behind it is answered.
    assert found.count(b"HTTP/1.1 ") == 1


def test_chunks_and_trailers_as_the_standard_has_them_are_read(server: Server) -> None:
    body = b'{"prompt": "a"}'
    chunks = b"%x;name=value\r\n%s\r\n0\r\nX-Trailer: b\r\n\r\n" % (len(body), body)
    with raw(server.url, head("/tokenize", CHUNKED, JSON) + chunks) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_encoded_body_is_refused(server: Server) -> None:
    for encoding, status in (("gzip", 415), ("identity", 200)):
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        reply = httpx.post(server.url + "/tokenize", content=b'{"prompt":"a"}', headers=headers)
        assert reply.status_code == status, reply.text


@pytest.mark.parametrize(
    "line", ["POST /health", "POST /", "GET /health", "OPTIONS /generate", "GET /v1/models"]
)
@pytest.mark.parametrize("length", ["Content-Length: 7000000", CHUNKED])
def test_no_body_is_read_where_none_is_expected(server: Server, line: str, length: str) -> None:
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    # The answer does not wait for the body, which never comes.
    with raw(server.url, head) as client:
        found = b""
        while not found.endswith(b"}}"):
            found += client.recv(65536)
    assert found.startswith(b"HTTP/1.1 413")
    assert b"takes no body" in found


def test_requests_that_come_at_once_are_all_answered(server: Server) -> None:
    body = json.dumps({"prompt": "word " * 200}).encode()
    one = head("/tokenize", f"Content-Length: {len(body)}", JSON) + body
    count = 52_000 // len(one) + 1
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with raw(server.url, one * count + last) as client:
        found = rest(client)
    assert found.count(b"HTTP/1.1 200") == count + 1


@contextlib.contextmanager
def busy(server: Server, count: int) -> Iterator[None]:
    """Connections that each wait for the rest of a body."""
    said = head("/generate", JSON, "Content-Length: 100") + b"{"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(raw(server.url, said))
        yield


def test_probes_find_room_where_there_is_none(server: Server) -> None:
    with busy(server, 4 * LIMIT):
        for path in ("/health", "/ping"):
            assert httpx.get(server.url + path, timeout=20).status_code == 200
        assert httpx.get(server.url + "/version", timeout=20).status_code == 503
    wait_for(lambda: httpx.get(server.url + "/version").status_code == 200, 40)


def test_a_holder_with_few_connections_finds_room(server: Server) -> None:
    # Loopback is a network of addresses.
    where = urlsplit(server.url)
    with busy(server, LIMIT), socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.settimeout(20)
        other.connect((where.hostname, where.port))
        other.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert rest(other).startswith(b"HTTP/1.1 200")


def aborted_by_its_address(server: Server) -> int:
    """How many requests a client reaches that began one under another forwarded address."""
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {"text": "a", "rid": "mine", "stream": True, "sampling_params": sampling}
    forwarded = {"x-forwarded-for": "192.0.2.7"}
    url = server.url + "/generate"
    with httpx.stream("POST", url, json=body, headers=forwarded, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        count: int = server.post("/abort_request", {"rid": "mine"}).json()["aborted"]
    return count


@pytest.mark.ci
def test_a_forwarded_address_is_believed_from_a_trusted_proxy_alone() -> None:
    assert aborted_by_its_address(shared_server()) == 1
    behind = Server(*FIXED, "--trusted-proxy", "127.0.0.0/8")
    try:
        assert aborted_by_its_address(behind) == 0
    finally:
        behind.kill()


def test_a_proxy_is_an_address() -> None:
    with pytest.raises(ConfigError, match=r"trusted_proxies: .*'proxy.example'"):
        ServerSettings(trusted_proxies=("proxy.example",))


@pytest.mark.ci
def test_few_descriptors_are_told_once_and_serve() -> None:
    few = (64, 64)
    made = Server(*FIXED, prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
    try:
        before = len(made.log)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(raw(made.url))
            assert httpx.get(made.url + "/health", timeout=20).status_code == 200
        said = made.log[before:]
        assert b"Traceback" not in said
        assert said.count(b"\n") < 10
    finally:
        made.kill()


@pytest.mark.ci
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_stream_that_runs_out_of_time_says_so_in_its_own_words(server: Server, path: str) -> None:
    bodies = {
        "/v1/responses": {"input": "hi", "max_output_tokens": 3000},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000},
    }
    *_, last = server.events(path, bodies[path] | {"ignore_eos": True})
    if path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
    else:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "timeout"
