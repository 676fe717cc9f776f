"""What replies tell of drafts: OpenAI's names in the usage, vLLM's in the metrics."""

import json
from typing import Any

import pytest

from tests.support.serving import Server

MESSAGES = [{"role": "user", "content": "abcabcabc"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "regex": "(abc){20}", "temperature": 0}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": 70},
    "/v1/completions": {"prompt": "abcabc", "regex": "(abc){20}", "max_tokens": 70},
    "/v1/responses": {"input": "abcabc", "regex": "(abc){20}", "max_output_tokens": 70},
    "/v1/messages": {"messages": MESSAGES, "regex": "(abc){20}", "max_tokens": 70},
}


def check(reply: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The figures, which must agree with each other and with the reply's tokens."""
    told: dict[str, Any] = reply["metrics"]["speculative_decoding"]
    histogram, steps = told["acceptance_histogram"], told["num_spec_steps"]
    accepted, drafted = told["num_accepted_draft_tokens"], told["num_draft_tokens"]
    assert steps == sum(histogram) > 0
    assert accepted == sum(at * count for at, count in enumerate(histogram))
    assert told["num_spec_tokens"] == len(histogram) - 1
    assert told["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert told["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    assert 0 <= accepted <= drafted
    # The prompt's pass brings a token too; a last verify may bring none of its own.
    assert tokens - 1 - steps <= accepted <= tokens
    return told


@pytest.mark.parametrize("route", ASKS)
def test_each_reply_tells_of_its_drafts(server: Server, route: str) -> None:
    reply = server.post(route, ASKS[route]).json()
    usage = reply["usage"]
    told = check(reply, usage.get("completion_tokens", usage.get("output_tokens")))
    if "completion_tokens" in usage:
        details = usage["completion_tokens_details"]
        accepted, rejected = (f"{kind}_prediction_tokens" for kind in ("accepted", "rejected"))
        assert details[accepted] == told["num_accepted_draft_tokens"] > 0
        assert details[accepted] + details[rejected] == told["num_draft_tokens"]


def test_a_stream_tells_with_its_usage(server: Server) -> None:
    body = CHAT | {"max_tokens": 70, "stream": True}
    streams = []
    for more in ({}, {"stream_options": {"include_usage": True}}):
        lines = server.post("/v1/chat/completions", body | more).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streams.append([chunk for chunk in chunks if "metrics" in chunk])
    assert streams[0] == []
    (last,) = streams[1]
    assert last["choices"] == []
    check(last, last["usage"]["completion_tokens"])


def test_several_outputs_have_sums_alone(server: Server) -> None:
    reply = server.post("/v1/chat/completions", CHAT | {"max_tokens": 70, "n": 2}).json()
    assert "metrics" not in reply
    assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_nothing_is_told_where_nothing_was_drafted(server: Server) -> None:
    plain = {"messages": MESSAGES, "max_tokens": 10, "speculate": False}
    reply = server.post("/v1/chat/completions", plain).json()
    assert "metrics" not in reply
    assert "completion_tokens_details" not in reply["usage"]
