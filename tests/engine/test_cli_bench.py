"""``overlap-spec bench``: figures of any server with OpenAI's API, by the command alone."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import shared_server

ROOT = Path(__file__).parents[2]


class Other(BaseHTTPRequestHandler):
    """A server of another make: streams ``ANSWERS`` in turn, one chunk a character."""

    answers: tuple[str, ...] = ("{}",)
    usage, key = True, ""
    bodies: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        found = {"data": [{"id": "theirs"}]} if self.path == "/v1/models" else None
        self._send(200 if found else 404, json.dumps(found).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if self.key and self.headers["authorization"] != f"Bearer {self.key}":
            self._send(401, b"no key")
            return
        answer = self.answers[len(self.bodies) % len(self.answers)]
        events: list[Any] = [_chunk({"role": "assistant", "content": ""}, None)]
        events += [_chunk({"content": character}, None) for character in answer]
        events += [_chunk({}, "stop")]
        if self.usage:
            events += [{"choices": [], "usage": {"completion_tokens": len(answer)}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _chunk(delta: dict[str, str], reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


@pytest.fixture
def other() -> Iterator[tuple[type[Other], str]]:
    kind = type("Handler", (Other,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def bench(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command, from a folder without the repository."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **more}
    command = [sys.executable, "-m", "overlap_spec", "bench", *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )


Run = Callable[[str], tuple[int, str, str]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def write_data(tmp_path: Path) -> str:
    row = {"id": "1", "schema": SCHEMA, "tests": [{"valid": True, "data": {"a": 1}}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    return "data.jsonl"


@pytest.mark.ci
def test_our_server_twice(tmp_path: Path) -> None:
    url = shared_server().url
    flags = ("--requests", "6", "--clients", "2", "--repetitions", "2", "--mode", "both")
    servers = ("--url", f"one={url}/v1", "--url", f"two={url}/")
    done = bench(tmp_path, *servers, *flags, "--rate", "50", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "100.0%" in done.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert len(record["samples"]) == 2 * 2 * 2 * 6
    for name, modes in record["servers"].items():
        assert list(modes) == ["closed", "open"]
        for figures in modes.values():
            counts = [figures[key] for key in ("requests", "failed", "invalid")]
            assert counts == [12, 0, 0]
            assert figures["ttft_ms"]["p50"] > 0
            assert figures["accept_length"] >= 1
            assert ("ratio" in figures) == (name == "two")
    assert record["servers"]["two"]["closed"]["ratio"]["n"] == 2


def test_another_server_that_breaks_its_schemas(
    tmp_path: Path, other: tuple[type[Other], str]
) -> None:
    kind, url = other
    kind.answers, kind.key = ('{"a": 7}', '{"a": "seven"}'), "secret"
    flags = ("--requests", "8", "--clients", "1", "--data", write_data(tmp_path))
    done = bench(tmp_path, "--url", url, *flags, "--json", "out.json", OPENAI_API_KEY="secret")
    assert done.returncode == 1
    assert "4 faults, the first: wrong JSON" in done.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["servers"][url]["closed"]
    assert (figures["requests"], figures["failed"], figures["invalid"]) == (8, 0, 4)
    assert figures["valid_share"] == 0.5
    assert figures["accept_length"] is None
    for body in kind.bodies:
        assert body["model"] == "theirs"
        assert body["response_format"]["json_schema"]["schema"] == SCHEMA
        assert body.keys() == {
            "model", "messages", "max_tokens", "temperature", "stream", "stream_options",
            "response_format",
        }  # fmt: skip


def test_faults_of_a_server_are_told(run: Run, other: tuple[type[Other], str]) -> None:
    kind, url = other
    few = f"bench --url {url} --requests 2 --clients 1 --workload free"
    kind.usage = False
    status, _, told = run(few)
    assert (status, "without usage" in told) == (1, True)
    kind.key = "secret"
    status, _, told = run(few)
    assert (status, "401" in told) == (1, True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--url"),
        ("--url localhost:1", "--url must be http://"),
        ("--url http://a --url http://a", "two servers of one name"),
        ("--url http://127.0.0.1:9", "--url: ConnectError"),
        ("--url http://a --mode x", "mode must be one of closed, open, both"),
        ("--url http://a --workload x", "workload must be one of"),
        ("--url http://a --clients 0", "clients must be over 0"),
        ("--url http://a --requests 0", "requests must be over 0"),
        ("--url http://a --data none.jsonl", "none.jsonl holds no schemas"),
    ],
)
def test_faults_of_use_are_told(run: Run, flags: str, words: str) -> None:
    status, _, told = run(f"bench {flags}")
    assert status == 2
    assert words in told


def test_urls_are_told_whole_and_take_no_room_of_the_figures(
    run: Run, other: tuple[type[Other], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, url = other
    theirs.answers = ('{"name":"Anna"}',)
    named = url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("COLUMNS", "80")
    _, told, _ = run(f"bench --url {url} --url theirs={named} --requests 8")
    first, *rest = told.splitlines()
    assert first == f"server 1: {url}"
    assert sum("theirs" in line for line in rest) == 1
    # Nothing is cut, at 80 columns.
    assert "…" not in "".join(rest)
