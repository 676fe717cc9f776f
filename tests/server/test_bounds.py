"""One client's large or odd request holds up nobody else: refused at once, or done elsewhere."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import httpx
import pytest
from pydantic import FailFast

from overlap_spec.config import EMBEDDED
from overlap_spec.server.body import MOST_VALUES
from overlap_spec.server.protocol import chat, text
from overlap_spec.server.protocol.base import Strict
from tests.server.test_errors import error_of
from tests.support.serving import Server, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
# Far over what a bounded reply needs on a busy machine, far below what the faults took.
SOON_S = 2.0
pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "target" / "model.safetensors").exists(), reason="no embedded weights"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.kill()


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


def send(server: Server, path: str, content: str | bytes) -> httpx.Response:
    return httpx.post(server.url + path, content=content, headers=JSON, timeout=60)


def quick(server: Server, path: str, content: str | bytes, status: int = 400) -> dict[str, Any]:
    """The error of a body that must be refused soon."""
    with probed(server):
        start = time.monotonic()
        error = error_of(send(server, path, content), status)
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
    many = {f"unknown{i}": i for i in range(100_000)}
    error = quick(server, CHAT, json.dumps({"messages": HI} | many))
    assert (error["param"], error["message"]) == ("unknown0", "unknown0: unknown field")
    bias = {f"wrong{i}": "x" for i in range(100_000)}
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
    with probed(server) as probe:
        reply = send(server, "/tokenize", long)
        assert reply.json()["count"] > 100_000
        tokens = reply.json()["tokens"]
        assert (
            send(server, "/detokenize", json.dumps({"tokens": tokens[: 2**17]})).status_code == 200
        )
    assert probe.worst_s < 1


def slow_schema(length: int) -> dict[str, Any]:
    """Draft 4 wants an enum's values to differ, and each is compared with all others."""
    values: list[Any] = [i if i % 2 else {"a": i} for i in range(length)]
    return {"$schema": "http://json-schema.org/draft-04/schema#", "enum": values}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def test_a_slow_schema_holds_up_no_other(server: Server) -> None:
    slow = {"messages": HI, "max_tokens": 1} | response_format(slow_schema(20_000))
    properties = {f"property_{i}": {"enum": [f"value_{i}"]} for i in range(120)}
    good = {"messages": HI, "max_tokens": 1} | response_format({"properties": properties})
    assert len(json.dumps(good)) > 4096
    replies: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: replies.append(server.post(CHAT, slow))) for _ in range(4)
    ]
    with probed(server):
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        assert server.post(CHAT, good).status_code == 200
        assert time.monotonic() - start < 8
        for thread in threads:
            thread.join(60)
    assert {reply.status_code for reply in replies} <= {400, 429}
    assert any("to read" in reply.text for reply in replies)


def test_a_client_that_leaves_ends_the_reading_of_its_schema(server: Server) -> None:
    slow = {"messages": HI, "max_tokens": 1} | response_format(slow_schema(20_000))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=slow, timeout=2)
    wait_for(lambda: not busy_readers(server), 3)


def busy_readers(server: Server) -> list[int]:
    """Reader processes of the server that compute now."""
    before = reader_ticks(server)
    time.sleep(0.3)
    after = reader_ticks(server)
    return [pid for pid, ticks in after.items() if ticks > before.get(pid, 0) + 2]


def reader_ticks(server: Server) -> dict[int, int]:
    """Ticks of CPU that each reader process of the server has used."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if b"grammar_reader" in command and int(fields[1]) == server.process.pid:
                found[int(folder.name)] = int(fields[11])
    return found


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
        for module in (chat, text)
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
