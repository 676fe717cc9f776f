"""Two replicas on Ray Serve: what clients see while one is killed, all are replaced, all end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Server, wait_for

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
pytestmark = [
    pytest.mark.ci,
    # Ray starts a dozen processes, which a busy machine delays.
    pytest.mark.timeout(900),
]
CHAT = "/v1/chat/completions"
FLAGS = (
    "--replicas",
    "2",
    "--cpus-per-replica",
    "0.5",
    "--max-running-requests",
    "4",
    "--drain-timeout-s",
    "60",
)
# "HOST:PORT PID": a Ray cluster that runs already, on this machine alone, and its raylet's process.
GIVEN = os.environ.get("OVERLAP_SPEC_TEST_RAY", "").split()
if GIVEN:
    FLAGS += ("--ray-address", GIVEN[0])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = ("Maria Lopez", "Tom Baker", "Ada Brandt", "Umar Rogers", "Linda Hansen", "Eli Weber")
ROOT = Path(__file__).parents[2]
CLIENTS = [f"tests/server/test_{name}.py" for name in ("openai", "responses", "messages")]
# Those of them that start servers of their own.
ELSEWHERE = ("context_that_is_full", "key_is_taken_from_either_header")
SERVES = re.compile(r"^ray::Serve|^ray::Proxy|overlap_spec")
ENGINE = re.compile(r"^ray::ServeReplica:\S+:engines")


def ask(number: int, **more: Any) -> dict[str, Any]:
    text = f"{PEOPLE[number % len(PEOPLE)]} is {20 + number % len(PEOPLE)} years old."
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON, "strict": True}}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "response_format": form, "temperature": 0.0, **more}


def children(pid: int) -> dict[int, str]:
    """All processes below one: id → command line."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, tasks.read_text().split()):
                found |= {child: _command(child)} | children(child)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def below(server: Server) -> dict[int, str]:
    """The processes of a server: id → command line."""
    found = children(int(GIVEN[1]) if GIVEN else server.process.pid)
    return {p: command for p, command in found.items() if not GIVEN or SERVES.search(command)}


def engines(server: Server) -> list[int]:
    """Process ids of the replicas with an engine."""
    found = below(server)
    return [pid for pid, command in found.items() if ENGINE.search(command)]


def ready(server: Server) -> set[str]:
    """Names of the replicas that accept requests."""
    with contextlib.suppress(httpx.HTTPError):
        told = server.get("/health").json()["replicas"]
        return {name for name, each in told.items() if each["status"] == "ready"}
    return set()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(*FLAGS, "--admin-api-key", "root")
    processes = below(made)
    yield made
    assert made.terminate() == 0
    wait_for(lambda: not any(alive(pid) for pid in processes), 60)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Load:
    """Clients that ask until they are told to stop; what each got.

    Attributes:
        counts: Statuses, ``whole`` and ``broken`` streams, ``dropped`` connections, and how.
        wrong: Answers that are not those of a server that nobody disturbs.
    """

    def __init__(self, server: Server, expected: list[str], clients: int = 6) -> None:
        self.server, self.expected = server, expected
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = clients

    def __enter__(self) -> Load:
        self._work = [self._pool.submit(self._client, number) for number in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._work:
            each.result()

    def more(self, count: int) -> None:
        """Wait for so many more whole answers."""
        until = self.counts["whole"] + self.counts["200"] + count
        wait_for(lambda: self.counts["whole"] + self.counts["200"] >= until, 300)

    def _client(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not self._stop.is_set():
                number += 1
                (self._streamed if number % 2 else self._plain)(client, number)

    def _plain(self, client: httpx.Client, number: int) -> None:
        try:
            reply = client.post(self.server.url + CHAT, json=ask(number))
        except httpx.HTTPError as error:
            self.counts[f"dropped: {error!r}"] += 1
            return
        self.counts[str(reply.status_code)] += 1
        if reply.status_code == 200:
            self._check(number, reply.json()["choices"][0]["message"]["content"])
        else:
            time.sleep(0.2)

    def _streamed(self, client: httpx.Client, number: int) -> None:
        text, done, failed = "", False, False
        url = self.server.url + CHAT
        try:
            with client.stream("POST", url, json=ask(number, stream=True)) as reply:
                if reply.status_code != 200:
                    self.counts[str(reply.status_code)] += 1
                    return
                for line in reply.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        done = True
                    elif line:
                        event = json.loads(data)
                        failed = failed or "error" in event
                        for choice in event.get("choices", ()):
                            text += choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            self.counts[f"dropped: {error!r}"] += 1
            return
        self.counts["whole" if done and not failed else "broken"] += 1
        if failed or not done:
            # What came before the error is the beginning of the answer.
            if not self.expected[number % len(PEOPLE)].startswith(text):
                self.wrong.append(text)
        else:
            self._check(number, text)

    def _check(self, number: int, text: str) -> None:
        if text != self.expected[number % len(PEOPLE)]:
            self.wrong.append(text)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """The undisturbed answers."""
    found = []
    for number in range(len(PEOPLE)):
        message = server.post(CHAT, ask(number)).json()["choices"][0]["message"]
        assert set(json.loads(message["content"])) == {"name", "age"}
        found.append(message["content"])
    return found


def test_both_replicas_answer_and_are_one_server(server: Server, expected: list[str]) -> None:
    assert len(expected) == len(PEOPLE)
    assert len(ready(server)) == 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: server.post(CHAT, ask(n, max_tokens=40)), range(16)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-replica"] for reply in replies} == ready(server)
    page = server.get("/metrics").text
    for name in [*ready(server), "front"]:
        assert f'replica="{name}"' in page
    info = server.get("/server_info").json()
    assert set(info["replicas"]) == ready(server)
    flushed = httpx.post(
        f"{server.url}/flush_cache", headers={"Authorization": "Bearer root"}, timeout=60
    )
    assert flushed.json()["flushed_pages"] > 0


def test_clients_get_what_one_engine_gives_them(server: Server) -> None:
    """The server's own tests, through OpenAI's and Anthropic's clients and others."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *CLIENTS, "-k", f"not ({' or '.join(ELSEWHERE)})"],
        cwd=ROOT,
        env={**os.environ, "OVERLAP_SPEC_TEST_URL": server.url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    print(done.stdout)


def test_a_client_that_leaves_frees_its_engine(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as reply:
        assert reply.status_code == 200
        # Held on to: a generator that nobody holds closes the connection.
        lines = reply.iter_lines()
        next(lines)
        wait_for(lambda: server.get("/server_info").json()["open_requests"] == 1, 60)

    def settled() -> bool:
        states = server.get("/server_info").json()["replicas"].values()
        return all(state["open"] == 0 and state["pages_in_use"] == 0 for state in states)

    wait_for(settled, 60)


def test_abort_reaches_the_replica_that_has_the_request(server: Server) -> None:
    body = {
        "text": "hi",
        "rid": "mine",
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
    }
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.post, "/generate", body)
        abort: Callable[[], int] = lambda: server.post("/abort_request", {"rid": "mine"}).json()[  # noqa: E731
            "aborted"
        ]
        wait_for(lambda: abort() == 1, 60)
        assert under_way.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_replica_that_is_killed_costs_no_wrong_answer(
    server: Server, expected: list[str], record_property: Callable[[str, object], None]
) -> None:
    before = ready(server)
    with Load(server, expected) as load:
        load.more(12)
        victim = engines(server)[0]
        orphans = children(victim)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(ready(server)) == 2 and ready(server) != before, 300)
        record_property("recovered_s", round(time.monotonic() - killed, 1))
        load.more(12)
    record_property("counts", dict(load.counts))
    print(f"recovered after {time.monotonic() - killed:.1f} s at the latest: {dict(load.counts)}")
    assert load.wrong == []
    assert set(load.counts) <= {"200", "503", "whole", "broken"}
    # Those that waited for the killed one, and no more: the other one took what came later.
    assert load.counts["503"] + load.counts["broken"] <= 6
    wait_for(lambda: not any(alive(pid) for pid in orphans), 60)


def test_replacing_all_replicas_loses_nothing(server: Server, expected: list[str]) -> None:
    before = ready(server)
    assert len(before) == 2
    with Load(server, expected, clients=4) as load:
        load.more(6)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: b"replaced all replicas" in server.log, 600)
        load.more(12)
    assert not before & ready(server)
    print(dict(load.counts))
    assert load.wrong == []
    assert set(load.counts) == {"200", "whole"}


def test_it_drains_when_it_ends(server: Server) -> None:
    """The last test: the server is gone then."""
    processes = below(server)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as reply:
        events = (line for line in reply.iter_lines() if line)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        *_, usage, done = events
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 1000
    assert done == "data: [DONE]"
    assert server.process.wait(120) == 0
    wait_for(lambda: not any(alive(pid) for pid in processes), 60)
