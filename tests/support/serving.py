"""Real server processes for tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

START_S = 90.0
# Ray starts half a dozen processes of its own first.
CLUSTER_START_S = 300.0
# Of processor time in one turn of the front's loop. The aim is 50 ms: a slow machine takes some
# more, and a turn that reads or writes a large body whole takes seconds.
MOST_TURN_S = 0.25
# For servers of which a test wants something else: one draft length has few passes to record, where
# lengths that change have 2 s of processor time at each start.
FIXED = ("--adaptive", "static")
LISTENS = re.compile(rb"serving on (https?://\S+)")

# No answer by chance has this shape.
PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"zyx": {"type": "integer"}, "wvu": {"type": "boolean"}},
    "required": ["zyx", "wvu"],
    "additionalProperties": False,
}


def children(pid: int) -> list[int]:
    """The children of a process, whichever thread has started them."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found


def _forks_workers(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"isolation.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Server:
    """``overlap-spec serve`` on a free port.

    Args:
        more: Environment variables that it gets besides.
        log_file: Takes what it writes, instead of a pipe.
        prepare: Called in its process before it starts.

    Attributes:
        url: Where it listens.
        headers: Sent with every request.
        log: What it has written so far.
    """

    def __init__(
        self,
        *flags: str,
        more: dict[str, str] | None = None,
        log_file: Path | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0", *flags]
        # A matcher that a busy machine delays must not fail a test.
        command += ["--mask-deadline-ms", "5000"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
        with log_file.open("ab") if log_file else contextlib.nullcontext() as file:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=file or subprocess.PIPE,
                env=environment,
                preexec_fn=prepare,
            )
        self.log = b""
        self.headers: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, args=(log_file,), daemon=True)
        self._reader.start()
        start_s = CLUSTER_START_S if "--replicas" in flags else START_S
        wait_for(lambda: LISTENS.search(self.log) or self.process.poll() is not None, start_s)
        found = LISTENS.search(self.log)
        assert found, self.log.decode()
        self.url = found[1].decode()

    @classmethod
    def at(cls, url: str) -> Server:
        """One that runs already, and that somebody else ends."""
        made = cls.__new__(cls)
        made.url, made.headers = url, {}
        return made

    def _read(self, log_file: Path | None) -> None:
        if log_file is not None:
            while self.process.poll() is None:
                self.log = log_file.read_bytes()
                time.sleep(0.05)
            return
        assert self.process.stderr is not None
        while chunk := self.process.stderr.readline():
            self.log += chunk

    def get(self, path: str, **more: Any) -> httpx.Response:
        """A GET of a route."""
        return httpx.get(self.url + path, timeout=60, headers=self.headers, **more)

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        """A POST of plain data, or of text or bytes as they are."""
        url, headers = self.url + path, self.headers if headers is None else headers
        if isinstance(body, str | bytes):
            headers = {"Content-Type": "application/json"} | headers
            return httpx.post(url, content=body, timeout=60, headers=headers, **more)
        return httpx.post(url, json=body, timeout=60, headers=headers, **more)

    def later(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Future[httpx.Response]:
        """A POST that is under way in a thread of its own."""
        return ThreadPoolExecutor(1).submit(self.post, path, body, headers)

    def ask(self, path: str, body: Any) -> Any:
        """The answer to a POST that has one."""
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream that has begun; where they have names, these are their types."""
        reply = self.post(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        blocks = [block.splitlines() for block in reply.text.strip().split("\n\n")]
        if len(blocks[0]) == 1:
            assert blocks.pop() == ["data: [DONE]"]
        events = [json.loads(block[-1].removeprefix("data: ")) for block in blocks]
        for event, (*named, _) in zip(events, blocks, strict=True):
            assert not named or named == [f"event: {event['type']}"]
        return events

    def state(self) -> dict[str, Any]:
        """The engine's state as of now."""
        state: dict[str, Any] = self.get("/server_info").json()["state"]
        return state

    def metric(self, name: str) -> float:
        """A figure of `/metrics`, as it stands there behind the prefix."""
        start = f"overlap_spec:{name} "
        lines = self.get("/metrics").text.splitlines()
        return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))

    def long_turns(self) -> float:
        """How many turns of its loop have taken over half a second of processor time."""
        # Both from one page: there are new turns all the time.
        start, page = "overlap_spec:front_turn_seconds_", self.get("/metrics").text
        turns = [line.split() for line in page.splitlines() if line.startswith(start)]
        told = {name.removeprefix(start): float(value) for name, value in turns}
        return told["count"] - told['bucket{le="0.5"}']

    def readers(self) -> list[int]:
        """The workers that read grammars for the front, those of the engine left out."""
        forks = [pid for pid in children(self.process.pid) if _forks_workers(pid)]
        return [worker for pid in forks for worker in children(pid)]

    def settle(self) -> None:
        """Wait until nothing runs, and check that no page is left over."""
        wait_for(lambda: self.state()["open"] == 0 and self.state()["running"] == 0)
        assert self.state()["pages_in_use"] == 0
        assert self.state()["matchers"] == 0

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def raw(url: str, said: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has said something."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as client:
        client.sendall(said)
        yield client


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            found += part
    return found


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; AssertionError where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@functools.cache
def shared_server(*flags: str) -> Server:
    """The one server of the embedded model with these flags, for all tests that only use it.

    The variable OVERLAP_SPEC_TEST_URL names one without flags that runs already:
    `tests/cluster/test_ray.py` runs the same tests through its replicas.
    """
    url = os.environ.get("OVERLAP_SPEC_TEST_URL")
    if url and not flags:
        return Server.at(url)
    server = Server(*flags)
    # Ended with a word, so that processes that it started end with it.
    atexit.register(server.terminate)
    return server
