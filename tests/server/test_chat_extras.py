"""What vLLM, SGLang and older clients send with a chat besides OpenAI's fields."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from overlap_spec.grammar.reasoning.reply import load_reasoning
from overlap_spec.server.conversation import ANY_TEXT, _after_thinking
from overlap_spec.types import Request, SamplingParams
from tests.support.serving import FIXED, PAIR, Server
from tests.support.tiers import few

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "Maria Lopez is 34 years old and lives in Lisbon."
ASKED = [{"role": "user", "content": SAID}]
# One that thinks, if it is told to.
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{% endif %}"""


@pytest.fixture(scope="module", params=few(["own"]))
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    flags = ("--chat-template", str(file), "--reasoning-parser", "deepseek_r1")
    server = Server(*flags, *FIXED, "--admin-api-key", "admin")
    yield server
    server.kill()


def ask(server: Server, body: dict[str, Any], path: str = CHAT) -> Any:
    given = {"prompt": SAID} if path == TEXT else {"messages": ASKED}
    return server.ask(path, {"max_tokens": 24} | given | body)


def prompt(server: Server, **more: Any) -> list[int]:
    ids: list[int] = ask(server, {"max_tokens": 1, "return_token_ids": True, **more})[
        "prompt_token_ids"
    ]
    return ids


def chunks(server: Server, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    given = {"prompt": SAID} if path == TEXT else {"messages": ASKED}
    return server.events(path, {"max_tokens": 24} | given | body)


def text_of(server: Server, ids: list[int]) -> str:
    text: str = server.post("/detokenize", {"tokens": ids}).json()["text"]
    return text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_are_those_of_the_text(server: Server, path: str) -> None:
    body = {"return_token_ids": True, "max_tokens": 12}
    whole = ask(server, body, path)
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text_of(server, choice["token_ids"]) == text
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    shown = whole if path == CHAT else choice
    assert SAID in text_of(server, shown["prompt_token_ids"])
    assert len(shown["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    first, *rest = streamed = chunks(server, body, path)
    shown = first if path == CHAT else first["choices"][0]
    assert "prompt_token_ids" in shown
    assert not any("prompt_token_ids" in json.dumps(chunk) for chunk in rest)
    ids = [token for chunk in streamed for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]
    assert "token_ids" not in ask(server, {}, path)["choices"][0]


def test_the_prompt_ends_where_it_is_told_to(server: Server) -> None:
    whole = prompt(server)
    bare = prompt(server, add_generation_prompt=False)
    assert whole[: len(bare)] == bare
    assert len(bare) < len(whole)
    begun = [*ASKED, {"role": "assistant", "content": "Her name is "}]
    ids = prompt(server, messages=begun, continue_final_message=True)
    assert text_of(server, ids).endswith("Her name is ")
    closed = prompt(server, messages=begun, add_generation_prompt=False)
    assert len(closed) == len(ids) + 1
    # What follows is what the model would have said next.
    said = ask(server, {"max_tokens": 12, "return_token_ids": True})["choices"][0]
    first = said["message"]["content"]
    begun = [*ASKED, {"role": "assistant", "content": first}]
    more = ask(server, {"max_tokens": 6, "messages": begun, "continue_final_message": True})
    longer = ask(server, {"max_tokens": 18})["choices"][0]["message"]["content"]
    ids = prompt(server, messages=begun, continue_final_message=True)
    if ids == [*whole, *said["token_ids"]]:
        assert first + more["choices"][0]["message"]["content"] == longer


def test_switches_of_the_template(server: Server, thinking: Server) -> None:
    on = prompt(thinking)
    off = prompt(thinking, chat_template_kwargs={"enable_thinking": False})
    assert text_of(thinking, off) == text_of(thinking, on) + "<think></think>"
    high = prompt(thinking, reasoning_effort="high")
    assert text_of(thinking, high).endswith("high")
    none = prompt(thinking, reasoning_effort="none")
    assert text_of(thinking, none).endswith("<think></think>")
    own = {"reasoning_effort": "own"}
    assert text_of(thinking, prompt(thinking, chat_template_kwargs=own)).endswith("own")
    info = thinking.get("/get_model_info").json()
    assert info["chat_template_switches"] == ["enable_thinking", "reasoning_effort"]
    unread = {"thinking": True, "enable_thinking": False}
    reply = ask(thinking, {"chat_template_kwargs": unread, "return_token_ids": True})
    assert reply["prompt_token_ids"] == off
    (warning,) = reply["choices"][0]["warnings"]
    assert warning.endswith("the model's chat template does not read thinking")
    # A model that cannot think does not.
    assert prompt(server, reasoning_effort="none") == prompt(server)
    refused = server.post(CHAT, {"messages": ASKED, "reasoning_effort": "low"})
    assert refused.json()["error"]["param"] == "reasoning_effort"


def test_thinking_is_separate_or_not(thinking: Server) -> None:
    body = {"regex": "answer", "max_tokens": 60, "seed": 1}
    apart = ask(thinking, body)["choices"][0]["message"]
    whole = ask(thinking, body | {"separate_reasoning": False})["choices"][0]["message"]
    assert "reasoning_content" not in whole
    thought = (apart["reasoning_content"] or "") + apart["content"]
    assert re.sub(r"</?think>|\n", "", whole["content"]) == re.sub(r"\n", "", thought)
    streamed = chunks(thinking, body | {"separate_reasoning": False})
    parts = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(part.get("content", "") for part in parts) == whole["content"]
    response = thinking.post("/v1/responses", {"input": SAID, "max_output_tokens": 20}).json()
    used = response["usage"]
    assert used["output_tokens_details"]["reasoning_tokens"] == used["output_tokens"] == 20
    assert response["output"][0]["type"] == "reasoning"
    message = thinking.post("/v1/messages", {"messages": ASKED, "max_tokens": 20}).json()
    assert message["content"][0]["type"] == "thinking"
    assert message["content"][0]["thinking"] == response["output"][0]["content"][0]["text"]
    off = {"messages": ASKED, "max_tokens": 20, "thinking": {"type": "disabled"}}
    answer = thinking.post("/v1/messages", off).json()
    assert answer["content"][0]["type"] == "text"


def test_the_cache_is_shared_under_one_salt(server: Server, thinking: Server) -> None:
    def cached(at: Server, **more: Any) -> int:
        body = {"messages": [{"role": "user", "content": "s" * 700}], "max_tokens": 1}
        count: int = ask(at, body | more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(server, cache_salt="one") == 0
    assert cached(server, cache_salt="one") > 0
    assert cached(server, cache_salt="two") == 0
    assert cached(server) == 0
    assert cached(server) > 0
    response = {"input": [{"role": "user", "content": "s" * 700}], "max_output_tokens": 1}
    for salt, found in (("one", True), ("three", False)):
        reply = server.post("/v1/responses", response | {"cache_salt": salt}).json()
        assert bool(reply["usage"]["input_tokens_details"]["cached_tokens"]) == found
    # The administrator may forget all of it.
    refused = server.post("/flush_cache", None)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_admin")
    assert cached(server) > 0
    cached(thinking)
    assert cached(thinking) > 0
    thinking.headers = {"authorization": "Bearer admin"}
    flushed = thinking.post("/flush_cache", None).json()["flushed_pages"]
    thinking.headers = {}
    assert flushed > 0
    assert cached(thinking) == 0
    thinking.settle()


def test_functions_as_they_were(server: Server) -> None:
    function = {"name": "zyx_tool", "parameters": PAIR}
    body = {"functions": [function], "function_call": {"name": "zyx_tool"}, "max_tokens": 200}
    (choice,) = ask(server, body)["choices"]
    assert choice["finish_reason"] == "function_call"
    call = choice["message"]["function_call"]
    assert "tool_calls" not in choice["message"]
    assert call["name"] == "zyx_tool"
    jsonschema.validate(json.loads(call["arguments"]), PAIR)
    streamed = chunks(server, body)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in streamed]
    assert "".join(delta.get("arguments", "") for delta in deltas) == call["arguments"]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["zyx_tool"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "function_call"
    tool = {"type": "function", "function": function}
    body = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    new = ask(server, body | {"max_tokens": 200})["choices"][0]["message"]
    assert new["tool_calls"][0]["function"] == call
    # Call and result, as they were and as they are, are one prompt.
    said = {"role": "assistant", "content": None}
    old_past = [{**said, "function_call": call}, {"role": "function", "name": "f", "content": "1"}]
    new_past = [
        {**said, "tool_calls": new["tool_calls"]},
        {"role": "tool", "tool_call_id": new["tool_calls"][0]["id"], "content": "1"},
    ]
    old = prompt(server, messages=[*ASKED, *old_past], functions=[function], function_call="none")
    assert old == prompt(server, messages=[*ASKED, *new_past], tools=[tool], tool_choice="none")


@pytest.mark.parametrize(
    ("kind", "value", "valid"),
    [
        ("json", PAIR, r'\{"zyx":-?\d+,"wvu":(true|false)\}'),
        ("regex", "[x-z]{4}", "[x-z]{4}"),
        ("choice", ["zyx", "wvu"], "zyx|wvu"),
        ("grammar", 'root ::= "q" [xyz]', "q[xyz]"),
        ("json_object", True, r"(?s)\{.*"),
    ],
)
def test_guided_fields_are_structured_outputs(
    server: Server, kind: str, value: Any, valid: str
) -> None:
    old = ask(server, {"max_tokens": 300, f"guided_{kind}": value})
    new = ask(server, {"max_tokens": 300, "structured_outputs": {kind: value}})
    texts = [reply["choices"][0]["message"]["content"] for reply in (old, new)]
    assert texts[0] == texts[1]
    assert re.fullmatch(valid, texts[0])


ANSWER = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR}}


@pytest.mark.parametrize("budget", few((0, 1, 9), 1))
@pytest.mark.parametrize("answer", [{}, {"response_format": ANSWER}])
def test_thinking_ends_at_its_budget(thinking: Server, answer: dict[str, Any], budget: int) -> None:
    body = {"thinking_budget": budget, "max_tokens": 160, "return_token_ids": True} | answer
    choice = ask(thinking, body)["choices"][0]
    # Behind the thinking there is its end marker, of at most as many tokens as it has characters.
    marked = text_of(thinking, choice["token_ids"][: budget + len("</think>")])
    assert "</think>" in marked
    message = choice["message"]
    assert message["content"]
    if answer:
        jsonschema.validate(json.loads(message["content"]), PAIR)
    assert ask(thinking, body | {"speculate": False})["choices"][0]["message"] == message
    by_another_name = dict(body)
    by_another_name["thinking_token_budget"] = by_another_name.pop("thinking_budget")
    assert ask(thinking, by_another_name)["choices"][0]["message"] == message
    streamed = [chunk["choices"][0]["delta"] for chunk in chunks(thinking, body)]
    assert "".join(part.get("content") or "" for part in streamed) == message["content"]


def test_a_budget_of_no_thinking(server: Server, thinking: Server) -> None:
    closed = {"reasoning_effort": "none", "regex": "answer"}
    assert ask(thinking, closed | {"thinking_budget": 3})["choices"][0]["message"]["content"] == (
        "answer"
    )
    differing = {"messages": ASKED, "thinking_budget": 3, "thinking_token_budget": 4}
    for reply, param in (
        (thinking.post(CHAT, differing), "thinking_token_budget"),
        (server.post(CHAT, {"messages": ASKED, "thinking_budget": 3}), "thinking_budget"),
        (thinking.post(CHAT, {"messages": ASKED, "thinking_budget": -1}), "thinking_budget"),
        (thinking.post(TEXT, {"prompt": SAID, "thinking_budget": 3}), "thinking_budget"),
    ):
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param


def test_a_budget_in_the_shape_of_messages(thinking: Server) -> None:
    def message(kind: str, budget: int, **more: Any) -> Any:
        limited = {"type": kind, "budget_tokens": budget}
        body = {"messages": ASKED, "max_tokens": 40, "thinking": limited} | more
        return thinking.post("/v1/messages", body)

    blocks = message("enabled", 5).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    chat = ask(thinking, {"thinking_budget": 5, "max_tokens": 40, "reasoning_effort": "medium"})
    assert blocks[1]["text"] == chat["choices"][0]["message"]["content"]
    for wrong in (message("disabled", 5), message("enabled", 5, thinking_budget=6)):
        assert wrong.status_code == 400
        assert "budget_tokens" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("opened", [None, True, False])
def test_a_free_answer_knows_of_its_thinking_where_that_is_drafted_loosely(
    relaxed: bool, opened: bool | None
) -> None:
    """Relaxed acceptance holds inside the thinking alone, so that its end must be told."""
    free = Request(0, (1, 2), SamplingParams(), None, 9, frozenset({0}), 0, 0)
    made = _after_thinking(free, load_reasoning("deepseek_r1"), opened, relaxed)
    if not relaxed or opened is False:
        assert made.grammar is None
        return
    assert made.grammar is not None
    assert made.grammar.kind == "after_thinking"
    assert made.grammar.inner == ANY_TEXT
