"""Log-probabilities of prompts over HTTP: OpenAI's ``echo`` with ``logprobs``, vLLM's field."""

import itertools
from typing import Any

import openai
import pytest

from tests.support.serving import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "overlap-spec"
SAID = "Maria Lopez is 34 years old and lives in Lisbon. Größe: 3 µm."
ASKED: list[Any] = [{"role": "user", "content": SAID}]
# The server's logits, of another batch.
CLOSE = 0.02


def ask(server: Server, path: str, **more: Any) -> Any:
    given = {"prompt": SAID} if path == TEXT else {"messages": ASKED}
    return server.ask(path, {"max_tokens": 8, "temperature": 0} | given | more)


def test_echo_has_the_prompts_first(client: openai.OpenAI, server: Server) -> None:
    create = {"model": MODEL, "prompt": SAID, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    plain = client.completions.create(**create).choices[0]
    echoed = client.completions.create(**create, echo=True).choices[0]
    assert echoed.text == SAID + plain.text
    own, whole = plain.logprobs, echoed.logprobs
    assert own is not None
    assert whole is not None
    assert whole.tokens is not None
    assert whole.token_logprobs is not None
    assert whole.top_logprobs is not None
    assert whole.text_offset is not None
    assert own.tokens is not None
    count = len(whole.tokens) - len(own.tokens)
    ids = server.post("/tokenize", {"prompt": SAID}).json()["tokens"]
    assert count == len(ids)
    assert whole.tokens[count:] == own.tokens
    assert whole.token_logprobs[0] is None
    assert whole.top_logprobs[0] is None
    assert all(value <= 0 for value in whole.token_logprobs[1:])
    assert all(0 < len(top) <= 2 for top in whole.top_logprobs[1:])
    for value, top in zip(whole.token_logprobs[1:], whole.top_logprobs[1:], strict=True):
        assert value <= max(top.values())
    lengths = [b - a for a, b in itertools.pairwise(whole.text_offset)]
    assert lengths == [len(token) for token in whole.tokens[:-1]]


def test_a_prompt_is_scored_without_an_answer(server: Server) -> None:
    for more in ({}, {"regex": "a{9}"}):
        scored = ask(server, TEXT, echo=True, logprobs=2, max_tokens=0, **more)
        longer = ask(server, TEXT, echo=True, logprobs=2, max_tokens=1)["choices"][0]
        (choice,) = scored["choices"]
        assert (choice["text"], choice["finish_reason"]) == (SAID, "length")
        assert scored["usage"]["completion_tokens"] == 0
        for name, values in choice["logprobs"].items():
            assert values == longer["logprobs"][name][:-1]


def test_a_prompt_is_as_probable_as_its_tokens_were_when_written(server: Server) -> None:
    """Greedy and free: the output's log-probabilities are the model's own."""
    told = ask(server, TEXT, logprobs=1, max_tokens=12, return_token_ids=True)["choices"][0]
    ids = [*told["prompt_token_ids"], *told["token_ids"]]
    again = ask(server, TEXT, prompt=ids, logprobs=1, echo=True, max_tokens=1)["choices"][0]
    start = len(told["prompt_token_ids"])
    found = again["logprobs"]["token_logprobs"][start : len(ids)]
    assert found == pytest.approx(told["logprobs"]["token_logprobs"], abs=CLOSE)
    # As evaluation harnesses tell whether a continuation is the greedy one.
    tops = again["logprobs"]["top_logprobs"][start : len(ids)]
    assert all(max(top.values()) == value for top, value in zip(tops, found, strict=True))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_in_vllms_shape(server: Server, path: str) -> None:
    whole = ask(server, path, prompt_logprobs=3, n=2, return_token_ids=True)
    assert len(whole["choices"]) == 2
    for choice in whole["choices"]:
        holder = whole if path == CHAT else choice
        ids, told = holder["prompt_token_ids"], holder["prompt_logprobs"]
        assert len(told) == len(ids)
        assert told[0] is None
        for token, entries in zip(ids[1:], told[1:], strict=True):
            own = entries[str(token)]
            assert next(iter(entries.values())) == own
            best = [entry for entry in entries.values() if entry["rank"] <= 3]
            assert [entry["rank"] for entry in sorted(best, key=lambda e: -e["logprob"])] == [
                1,
                2,
                3,
            ]
            assert len(entries) == 3 + (own["rank"] > 3)
            assert {"logprob", "rank", "decoded_token"} == own.keys()
    assert "prompt_logprobs" not in ask(server, path)
    assert "prompt_logprobs" not in ask(server, path)["choices"][0]


def test_both_fields_and_several_prompts(server: Server) -> None:
    prompts = [SAID, "Once upon a time"]
    body = {"prompt": prompts, "echo": True, "n": 2}
    asked = ask(server, TEXT, **body, logprobs=1, prompt_logprobs=4, return_token_ids=True)
    assert [choice["index"] for choice in asked["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(asked["choices"], [p for p in prompts for _ in "12"], strict=True):
        assert choice["text"].startswith(prompt)
        shown, told = choice["logprobs"], choice["prompt_logprobs"]
        assert all(len(top) == 1 for top in shown["top_logprobs"][1:])
        pairs = zip(choice["prompt_token_ids"], told, strict=True)
        own = [entry[str(token)]["logprob"] for token, entry in pairs if entry]
        assert shown["token_logprobs"][1 : len(told)] == own
    # Whether it is told or not, the text is the same.
    plain = ask(server, TEXT, **body)
    assert [c["text"] for c in plain["choices"]] == [c["text"] for c in asked["choices"]]


def test_a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    create: dict[str, Any] = {"model": MODEL, "prompt": [SAID, "Once upon"], "max_tokens": 8}
    create |= {"temperature": 0, "logprobs": 2, "echo": True}
    whole = client.completions.create(**create).choices
    pieces = [
        choice
        for chunk in client.completions.create(**create, stream=True)
        for choice in chunk.choices
    ]
    for index, choice in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == choice.text
        shown = [piece.logprobs for piece in mine if piece.logprobs is not None]
        assert choice.logprobs is not None
        for name in ("tokens", "text_offset"):
            joined = [entry for part in shown for entry in getattr(part, name)]
            assert joined == getattr(choice.logprobs, name)
        values = [value for part in shown for value in part.token_logprobs or ()]
        assert values[0] is None
        assert choice.logprobs.token_logprobs is not None
        assert values[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=CLOSE)


def test_more_than_a_request_may_ask_is_refused(server: Server) -> None:
    # 8 × 2,000 tokens × 21.
    body = {"prompt": [[5] * 2000] * 8, "logprobs": 20, "echo": True, "max_tokens": 1}
    reply = server.post(TEXT, body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert "336000; 262144 are allowed" in error["message"]
