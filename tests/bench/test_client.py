"""The benchmarks' client, against a server that this file scripts and against our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.backends.base import Task
from bench.client import ServerSystem
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
        assert self.path == "/v1/models"
        self._send(200, json.dumps({"data": [{"id": "scripted"}]}))

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


def test_where_no_server_listens() -> None:
    with pytest.raises(ConfigError, match="lists no model"):
        ServerSystem("http://127.0.0.1:9")
    assert ServerSystem("http://127.0.0.1:9", "named").run([Task("Q")], 1).replies[0].error


@pytest.mark.ci
def test_our_own_server_is_measured() -> None:
    system = ServerSystem(f"{shared_server().url}/v1")
    batch = system.run([Task("Question: 1 + 1?\nAnswer:", max_tokens=8, raw=True)] * 3, 2)
    for reply in batch.replies:
        assert (reply.error, reply.text) == (None, batch.replies[0].text)
        assert 0 < reply.tokens <= 8
