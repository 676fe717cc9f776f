"""The drafts of each step in a stream, and where requests stand."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.support.serving import Server, shared_server, wait_for

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Anna Weber, a 29-year-old nurse from Graz, works for Alpine Care."


def told(server: Server, path: str, **options: bool) -> tuple[str, list[dict[str, Any]]]:
    """The output of a stream with these options, and its ``overlap_spec`` fields."""
    body: dict[str, Any] = {"stream_options": options, "temperature": 0, "max_tokens": 60}
    body |= {"structured_outputs": {"json": SCHEMA}}
    chat = "chat" in path
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    chunks = server.events(path, body)
    pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    texts = [piece["delta"].get("content") if chat else piece["text"] for piece in pieces]
    fields = [chunk["overlap_spec"] for chunk in chunks if "overlap_spec" in chunk]
    return "".join(text or "" for text in texts), fields


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_its_drafts(path: str) -> None:
    server = shared_server()
    output, steps = told(server, path, include_draft_trees=True)
    plain, without = told(server, path, include_token_origins=True)
    assert output == plain
    assert without
    assert not any("draft" in step for step in without)
    assert told(server, path, include_draft_trees=False) == (plain, [])
    drafts = [step["draft"] for step in steps]
    numbers = [draft["step"] for draft in drafts]
    assert numbers == sorted(set(numbers))
    fates = {node["fate"] for draft in drafts for node in draft["nodes"]}
    assert "accepted" in fates
    assert fates <= {"accepted", "masked", "rejected", "late", "cut"}
    for step in steps:
        nodes = step["draft"]["nodes"]
        kept = [node["text"] for node in nodes if node["fate"] == "accepted"]
        assert kept == [token["text"] for token in step["tokens"][: len(kept)]]
        assert all(-1 <= node["parent"] < number for number, node in enumerate(nodes))
    spans = server.get("/timeline?steps=200").json()["spans"]
    assert set(numbers) <= {span["step"] for span in spans}
    server.settle()


def test_an_option_of_another_type_is_refused() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    body |= {"stream_options": {"include_draft_trees": "yes"}}
    refused = shared_server().post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options.include_draft_trees"


@contextmanager
def endless(server: Server, count: int) -> Iterator[list[str]]:
    """Streams that go on until the end of the block; their ids."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    body |= {"regex": "[a-z]+", "min_tokens": 3400, "max_tokens": 3500}
    url = server.url + "/v1/chat/completions"
    with httpx.Client(timeout=60) as client, ExitStack() as stack:
        replies = [stack.enter_context(client.stream("POST", url, json=body)) for _ in range(count)]
        # An iterator that is dropped closes its connection.
        lines = [reply.iter_lines() for reply in replies]
        firsts = [next(line for line in each if line.startswith("data: {")) for each in lines]
        yield [json.loads(first[6:])["id"] for first in firsts]
    server.settle()


def rows(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/requests").json()["requests"]
    return found


def test_requests_under_way_are_told_in_figures() -> None:
    server = shared_server()
    with endless(server, 2) as ids:
        wait_for(lambda: server.get("/requests").json()["totals"]["running"] == 2, 60)
        wait_for(lambda: all(row["output_tokens"] for row in rows(server)), 60)
        reply = server.get("/requests")
        state = reply.json()
        assert {row["id"] for row in state["requests"]} == set(ids)
        for row in state["requests"]:
            assert row["own"]
            assert row["state"] in ("prefill", "decode")
            assert row["prompt_tokens"] > 10
            assert row["pages"] > 0
            assert row["constrained"]
            assert row["age_ms"] > 0
        assert state["not_shown"] == 0
        assert not state["is_admin"]
        assert "Weber" not in reply.text
        assert "a-z" not in reply.text
        totals = state["totals"]
        assert 0 < totals["pages_in_use"] <= totals["pages"]
        later = server.get("/requests").json()
        assert later["totals"]["output_tokens"] >= totals["output_tokens"]
        assert later["time_ms"] > state["time_ms"]
    after = server.get("/requests").json()
    assert after["requests"] == []
    assert after["totals"]["output_tokens"] >= later["totals"]["output_tokens"]
