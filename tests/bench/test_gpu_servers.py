"""Other servers beside the engine, of which none is installed: a stand-in answers for one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import gpu_compare, gpu_servers
from bench.backends.base import Batch, Reply, Task
from bench.gpu_servers import Peer, ServerFailed, serving
from bench.gpu_setup import Context, Setup

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": sys.argv[1]}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

if sys.argv[1] == "/broken":
    sys.exit("no such model")
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    (tmp_path / "stand_in_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Peer("stand-in", "stand_in_server", lambda target, port: [str(target), str(port)])


def test_a_server_is_started_and_ended(peer: Peer) -> None:
    with serving(peer, Path("/weights"), 60) as url:
        told = httpx.get(f"{url}/v1/models").json()
        assert told["data"][0]["id"] == "/weights"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/models")


def test_a_server_that_ends_is_told_with_its_last_words(peer: Peer) -> None:
    failed = pytest.raises(ServerFailed, match="stand-in ended with 1: no such model")
    with failed, serving(peer, Path("/broken"), 60):
        pass


def test_a_server_that_does_not_answer_is_given_up() -> None:
    silent = Peer("silent", "this", lambda *_: [])
    slow = silent._replace(module="http.server", flags=lambda *_: ["0"])
    with pytest.raises(ServerFailed, match="silent does not answer"), serving(slow, Path("/"), 1):
        pass


def test_both_are_started_for_the_same_target() -> None:
    for each in gpu_servers.PEERS:
        flags = each.flags(Path("/weights"), 8123)
        assert {"/weights", "8123", "bfloat16", "127.0.0.1"} <= set(flags)


class Answering:
    """A system that says a number of tokens in a second."""

    how = "made up"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        assert parallel in (1, 16)
        replies = [Reply("{}", self.tokens, "stop", ttft_ms=1.0, end_to_end_ms=2.0) for _ in tasks]
        return Batch(float(len(tasks)), replies)

    def compile_ms(self, _: Any) -> float:
        return 0.0

    def close(self) -> None: ...


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context whose engines say 30 tokens a second as a chain and 20 as a tree."""
    found = Context(Setup(False, True, 0, "none", tmp_path))
    opened: list[tuple[str, ...]] = []
    monkeypatch.setattr(found, "engines", lambda *names: opened.append(names) or names)
    systems = {"chain": Answering(30), "tree": Answering(20)}
    monkeypatch.setattr(
        gpu_servers,
        "drafting",
        lambda *names: {gpu_compare.DRAFTS[name]: systems[name] for name in names},
    )
    monkeypatch.setattr(gpu_servers, "ServerSystem", lambda url: Answering(int(url)))
    found.opened = opened  # type: ignore[attr-defined]
    return found


def test_speeds_are_held_against_each_server_that_is_there(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def served(peer: Peer, target: Path, _: float) -> Any:
        assert target == context.setup.target
        # The engines' memory is free by then.
        assert context.opened[-1] == ()  # type: ignore[attr-defined]
        if peer.name == "broken":
            raise ServerFailed("broken ended with 1")
        yield "10"

    made = [gpu_servers.PEERS[0]._replace(name=name) for name in ("there", "broken", "absent")]
    monkeypatch.setattr(gpu_servers, "PEERS", made)
    monkeypatch.setattr(gpu_servers, "serving", served)
    monkeypatch.setattr(
        gpu_servers, "find_spec", lambda name: None if name == "absent" else object()
    )
    kept: list[Any] = []
    context.keep = kept.append
    found = gpu_servers.servers(context)
    assert list(found.figures) == ["there_speedup"]
    assert found.figures["there_speedup"]["value"] == 3.0
    assert found.figures["there_speedup"]["target"] is None
    assert found.faults == ["broken ended with 1"]
    assert found.details["missing"] == ["absent"]
    assert found.details["workloads"]["batch 16"]["there"]["ratio"]["median"] == 3.0
    assert kept == [found]


def test_without_any_server_nothing_is_opened(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_servers, "find_spec", lambda _: None)
    found = gpu_servers.servers(context)
    assert found.details == {"missing": ["vllm", "sglang"]}
    assert not found.figures
    assert context.opened == []  # type: ignore[attr-defined]
