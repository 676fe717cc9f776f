"""A client that asks for much waits for itself: others' requests and grammars have their turns."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import httpx
import pytest

from tests.support.serving import FIXED, Server, wait_for

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ANNA, BERT = ({"Authorization": f"Bearer {key}"} for key in ("anna", "bert"))
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("anna\nbert\n")
    flags = ("--max-running-requests", "2", "--max-queued-requests", "6")
    made = Server(*FIXED, *flags, "--api-key-file", str(keys))
    made.headers = BERT
    yield made
    made.kill()


@contextlib.contextmanager
def asking(server: Server, path: str, bodies: list[Any], who: dict[str, str]) -> Iterator[Any]:
    """Requests under way."""
    asked = [server.later(path, body, who) for body in bodies]
    yield asked
    wait(asked, 60)


def test_a_queue_that_one_has_filled_takes_another_ones_request(server: Server) -> None:
    many = {"text": "a", "rid": "many", "sampling_params": ENDLESS | {"n": 8}}
    short = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    with asking(server, "/generate", [many], ANNA):
        wait_for(lambda: server.state()["open"] == 8)
        refused = server.post("/generate", short, ANNA)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        # Its turn comes as soon as one of the two rows is free: not behind all six that wait.
        stream = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1}}
        with httpx.stream(
            "POST", server.url + "/generate", json=stream, headers=BERT, timeout=60
        ) as reply:
            assert reply.status_code == 200
        assert server.post("/abort_request", {"rid": "many"}, ANNA).json() == {"aborted": 8}
    server.settle()


def slow_schema(number: int) -> dict[str, Any]:
    """Draft 4 wants an enum's values to differ, and each is compared with all others."""
    values: list[Any] = [i if i % 2 else {"a": i} for i in range(8_000 + number)]
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "enum": values}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {"messages": HI, "max_tokens": 1, "response_format": form}


def test_a_reader_that_one_keeps_busy_reads_another_ones_schema(server: Server) -> None:
    properties = {f"property_{i}": {"enum": [f"value_{i}"]} for i in range(60)}
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}
    good = {"messages": HI, "max_tokens": 1, "response_format": form}
    with asking(server, CHAT, [slow_schema(i) for i in range(16)], ANNA) as asked:
        wait_for(lambda: len(server.readers()) >= 2)
        assert server.post(CHAT, good, BERT).status_code == 200
        assert sum(not each.done() for each in asked) > 6
