"""What a client says is read in one way or refused, and probes are always answered."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from overlap_spec.errors import ConfigError
from overlap_spec.server.settings import ServerSettings
from tests.support.serving import FIXED, Server, raw, rest, wait_for
from tests.support.skips import needs_weights

LIMIT = 24
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROBES = re.compile(rb"probes on (http://\S+)")
pytestmark = needs_weights


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(*FIXED, "--max-connections", str(LIMIT), "--probe-port", "0")
    yield made
    made.kill()


def post(*fields: str, path: str = "/tokenize", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", *fields, "", ""]
    return "\r\n".join(lines).encode()


CHUNKED = "Transfer-Encoding: chunked"
# Behind each of them stands a request that another reading would see.
SMUGGLING = {
    "both lengths": post("Content-Length: 5", CHUNKED) + b"0\r\n\r\n",
    "both lengths, chunked first": post(CHUNKED, "Content-Length: 5") + b"0\r\n\r\n",
    "two lengths": post("Content-Length: 2", "Content-Length: 2") + b"{}",
    "unequal lengths": post("Content-Length: 2", "Content-Length: 3") + b"{}",
    "a list of lengths": post("Content-Length: 2, 2") + b"{}",
    "a signed length": post("Content-Length: +2") + b"{}",
    "a spaced length": post("Content-Length: 0 2") + b"{}",
    "two encodings": post(CHUNKED, CHUNKED) + b"0\r\n\r\n",
    "an encoding twice": post("Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n",
    "an unknown encoding": post("Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    "an encoding behind a tab": post("Transfer-Encoding:\x0bchunked") + b"0\r\n\r\n",
    "chunks of HTTP/1.0": post(CHUNKED, version="1.0") + b"0\r\n\r\n",
    "space before the colon": post("Content-Length : 2") + b"{}",
    "a folded field": post("X-A: b", " Content-Length: 2") + b"{}",
    "a field folded by a tab": post("X-A: b", "\tc") + b"{}",
    "a bare line feed": post("X-A: b\nContent-Length: 2") + b"{}",
    "line feeds alone": b"GET /version HTTP/1.1\nHost: localhost\n\n",
    "a bare carriage return": post("X-A: b\rContent-Length: 2") + b"{}",
    "a line feed before the body": post("X-A: b")[:-2] + b"\n",
    "a null": post("X-A: b\0c") + b"{}",
    "no field": post("no field") + b"{}",
    "two hosts": post("Host: evil.example") + b"{}",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "an empty line first": b"\n" + HEALTH,
    "a chunk's size with a sign": post(CHUNKED) + b"+2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size with 0x": post(CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size behind a space": post(CHUNKED) + b" 2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size before a space": post(CHUNKED) + b"2 \r\n{}\r\n0\r\n\r\n",
    "a chunk's size on a bare line": post(CHUNKED) + b"2\n{}\r\n0\r\n\r\n",
    "an extension with a bare line": post(CHUNKED) + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "an extension with a bare return": post(CHUNKED) + b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "a chunk that goes on": post(CHUNKED) + b"2\r\n{}xx0\r\n\r\n",
    "a chunk on a bare line": post(CHUNKED) + b"2\r\n{}\n0\r\n\r\n",
    "a huge chunk": post(CHUNKED) + b"f" * 17 + b"\r\n",
    "a trailer on a bare line": post(CHUNKED) + b"2\r\n{}\r\n0\r\nX-A: b\n\r\n",
    "a folded trailer": post(CHUNKED) + b"2\r\n{}\r\n0\r\nX-A: b\r\n c\r\n\r\n",
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
    with raw(server.url, post(CHUNKED, "Content-Type: application/json") + chunks) as client:
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
    one = post(f"Content-Length: {len(body)}", "Content-Type: application/json") + body
    count = 52_000 // len(one) + 1
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with raw(server.url, one * count + last) as client:
        found = rest(client)
    assert found.count(b"HTTP/1.1 200") == count + 1


@contextlib.contextmanager
def busy(server: Server, count: int) -> Iterator[None]:
    """Connections that each wait for the rest of a body."""
    said = post("Content-Type: application/json", "Content-Length: 100", path="/generate") + b"{"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(raw(server.url, said))
        yield


def test_probes_find_room_where_there_is_none(server: Server) -> None:
    listens = PROBES.search(server.log)
    assert listens
    probes = listens[1].decode()
    with busy(server, 4 * LIMIT):
        for path in ("/health", "/ping"):
            for url in (server.url, probes):
                assert httpx.get(url + path, timeout=20).status_code == 200
        assert httpx.get(server.url + "/version", timeout=20).status_code == 503
    assert httpx.get(probes + "/version").status_code == 404
    assert httpx.post(probes + "/generate", json={"text": "a"}).status_code == 404
    wait_for(lambda: httpx.get(server.url + "/version").status_code == 200, 40)


@pytest.mark.ci
def test_silent_connections_leave_room_for_probes_on_their_port(server: Server) -> None:
    listens = PROBES.search(server.log)
    assert listens
    probes = listens[1].decode()
    with contextlib.ExitStack() as stack:
        for _ in range(4 * LIMIT):
            stack.enter_context(raw(probes))
        assert httpx.get(probes + "/health", timeout=20).status_code == 200


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
def test_a_forwarded_address_is_believed_from_a_trusted_proxy_alone(server: Server) -> None:
    assert aborted_by_its_address(server) == 1
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
