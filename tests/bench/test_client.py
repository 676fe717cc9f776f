"""The benchmarks' client, against a server that this file scripts and against our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import gsm8k
from bench.backends.base import Task
from bench.client import ServerSystem
from bench.common import rounded, samples_path
from overlap_spec.errors import ConfigError
from tests.support.serving import shared_server

PIECES = ("The answer", " is 7", ".")
USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


class Script(BaseHTTPRequestHandler):
    """Says PIECES to whatever is asked; a prompt that names a fault gets it."""

    asked: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        states = [{"avg_spec_accept_length": 2.5}]
        known = {
            "/v1/models": {"data": [{"id": "scripted"}]},
            "/get_server_info": {"version": "1", "internal_states": states},
        }
        self._send(200 if self.path in known else 404, json.dumps(known.get(self.path, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"path": self.path, **body})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if "refused" in prompt:
            self._send(400, '{"error": {"message": "no such thing"}}')
            return
        chat = "messages" in body
        events: list[Any] = [
            {"choices": [{"delta": {"content": p}} if chat else {"text": p}]} for p in PIECES
        ]
        events.append({"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
        if "countless" not in prompt:
            events.append(USAGE)
        if "broken" in prompt:
            events[1] = {"error": {"message": "engine fell over"}}
        lines = [f"data: {json.dumps(event)}" for event in events] + [": comment", "data: [DONE]"]
        self._send(200, "\n\n".join(lines) + "\n\n")

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def scripted() -> Iterator[str]:
    """URL of a scripted server."""
    Script.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("raw", [True, False])
def test_a_stream_is_put_together(scripted: str, raw: bool) -> None:
    system = ServerSystem(scripted)
    schema = None if raw else {"type": "object"}
    batch = system.run([Task("Q", schema, 9, ("stop",), raw)] * 3, 2)
    for reply in batch.replies:
        assert (reply.text, reply.tokens, reply.finish_reason) == ("The answer is 7.", 5, "stop")
        assert reply.ttft_ms is not None
        assert 0 < reply.ttft_ms <= reply.end_to_end_ms
    asked = Script.asked[0]
    assert asked["path"] == ("/v1/completions" if raw else "/v1/chat/completions")
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("scripted", 0.0, 9)
    assert asked["stop"] == ["stop"]
    assert asked["stream_options"] == {"include_usage": True}
    if not raw:
        form = asked["response_format"]
        assert (form["type"], form["json_schema"]["schema"]) == ("json_schema", schema)
    assert system.accept_length() == 2.5


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("refused", "no such thing"), ("broken", "engine fell over"), ("countless", "without usage")],
)
def test_a_fault_is_that_requests_alone(scripted: str, prompt: str, words: str) -> None:
    batch = ServerSystem(scripted).run([Task(prompt, raw=True), Task("Q", raw=True)], 2)
    assert batch.replies[0].finish_reason == "error"
    assert words in str(batch.replies[0].error)
    assert batch.replies[1].error is None


def test_where_no_server_listens() -> None:
    with pytest.raises(ConfigError, match="lists no model"):
        ServerSystem("http://127.0.0.1:9")
    assert ServerSystem("http://127.0.0.1:9", "named").run([Task("Q")], 1).replies[0].error


def test_servers_have_names(scripted: str) -> None:
    sides = gsm8k.open_servers([f"a={scripted}", scripted], None)
    assert list(sides) == ["a", scripted]
    with pytest.raises(ConfigError, match="two servers"):
        gsm8k.open_servers([scripted, scripted], None)


@pytest.mark.ci
def test_gsm8k_measures_our_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, out = shared_server().url, tmp_path / "out.json"
    words = ["--num-questions", "2", "--num-shots", "1", "--parallel", "2", "--max-new-tokens", "8"]
    gsm8k.main(["--quick", "--json", str(out), *words, "--base-url", f"a={url}",
                "--base-url", f"b={url}/v1"])  # fmt: skip
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["equal"] == 1.0
    assert set(record["sides"]) == {"a", "b"}
    for side in record["sides"].values():
        assert (side["failed"], side["output_tokens"]) == (0, 16)
        assert side["ttft_ms"]["p50"] > 0
        assert side["server_accept_length"] >= 1
    samples = [json.loads(line) for line in samples_path(out).read_text().splitlines()]
    again = rounded(gsm8k.summary(samples))
    assert record["ratio"] == again["ratio"]
