"""Wrong requests: 400 in OpenAI's form that names the field, and a server that goes on."""

import json
from typing import Any

import httpx
import pytest

from overlap_spec.server import admin
from tests.support.serving import Server, error_of

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


def schema(text: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": text, **more}}}


CASES: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0]", "'robot'"),
    (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content", "content or tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type", "'text'"),
    (CHAT, {"temprature": 1}, "temprature", "unknown field: did you mean temperature?"),
    (CHAT, {"respone_format": {}}, "respone_format", "did you mean response_format?"),
    (CHAT, {"temperature": -1}, "temperature", "temperature must be"),
    (CHAT, {"top_p": 0}, "top_p", "over 0"),
    (CHAT, {"use_beam_search": True}, "use_beam_search", "tokens are sampled"),
    (CHAT, {"use_beam_search": 0}, "use_beam_search", "false is taken"),
    (CHAT, {"length_penalty": 0.8}, "length_penalty", "1.0 is taken"),
    (CHAT, {"best_of": 2}, "best_of", "not supported"),
    (CHAT, {"request_id": "x" * 257}, "request_id", "at most 256"),
    (CHAT, {"rid": "x", "request_id": "y"}, "request_id", "send one"),
    (CHAT, {"stop_regex": "(a"}, "stop_regex", "unterminated"),
    (CHAT, {"allowed_token_ids": [9999]}, "allowed_token_ids", "outside the vocabulary"),
    (CHAT, {"n": 0}, "n", "greater than"),
    (CHAT, {"max_tokens": 10**6}, "max_tokens", "exceed the context of 4096"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, "prompt", "shorten"),
    (CHAT, {"stop": [""]}, "stop", "non-empty"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    (CHAT, {"functions": [{"name": "f"}], "tools": []}, "functions", "send tools"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "functions", "'g'"),
    (CHAT, {"function_call": "auto"}, "function_call", "goes with functions"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    (CHAT, {"guided_json": {}, "regex": "a"}, "guided_json", "send one constraint"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "without stream"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens", "return_token_ids"),
    (CHAT, {"continue_final_message": True}, "messages", "only a text of the assistant"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message", "send one of them"),
    (TEXT, {"prompt": []}, "prompt", "at least 1 item"),
    (TEXT, {"prompt": [[]]}, "prompt[0]", "at least 1 item"),
    (TEXT, {"prompt": ["a", 1]}, "prompt[1]", "string"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[1]", "integer"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo: true"),
    (TEXT, {"prompt": "a", "max_tokens": 0, "echo": True, "stream": True}, "max_tokens", "stream"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "equal to 1"),
    (CHAT, {"verbosity": "low"}, "verbosity", '"medium" is taken'),
    (RESPONSES, {}, "input", "required"),
    (RESPONSES, {"input": "x", "previous_response_id": "y"}, "previous_response_id", "stored"),
    (RESPONSES, {"input": "x", "store": True}, "store", "false is taken"),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation", 'so shorten it; "disabled"'),
    (CHAT, {"store": True}, "store", "false is taken"),
    (RESPONSES, {"input": "x", "max_tokens": 1}, "max_tokens", "max_output_tokens"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type", "'input_text'"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "1", "name": "f",
        "arguments": "["}]}, "input", "input[0].arguments"),
    (RESPONSES, {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "no such switch"),
    (RESPONSES, {"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort", "switch"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    (RESPONSES, {"input": "x", "tool_choice": "required"}, "tool_choice", "goes with tools"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema",
        "schema": {"type": "objekt"}}}}, "text.format", "objekt"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f"}], "top_logprobs": 1},
        "top_logprobs", "send no tools"),
    (RESPONSES, {"input": "x " * 9000}, "prompt", "shorten"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'xml'"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (CHAT, schema({"type": "objekt"}), "response_format", "objekt"),
    (CHAT, schema({"$ref": "http://example.com/x"}), "response_format", "example.com"),
    (CHAT, {"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "send one constraint"),
    (CHAT, {"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "one"),
    (CHAT, {"json_schema": "{broken"}, "json_schema", "not JSON"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    (CHAT, {"structured_outputs": {"regex": "a", "probabilities": True}},
        "structured_outputs.probabilities", "goes with choice"),
    (CHAT, {"structured_outputs": {"regex": "a", "key_order": "any"}},
        "structured_outputs.key_order", "goes with json"),
    (CHAT, {"structured_outputs": {"regex": "a", "formats": "annotation"}},
        "structured_outputs.formats", "goes with json"),
    (CHAT, {"structured_outputs": {"json": {"required": list("abcdefghij")}, "key_order": "any"}},
        "structured_outputs.json", "10 properties"),
    (CHAT, {"logprobs": True, "structured_outputs": {"choice": ["a"], "faithful": True}},
        "logprobs", "made among whole texts"),
    (CHAT, {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern", "compact"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice", "goes with tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "maybe"},
        "tool_choice", ""),
    (TEXT, {}, "prompt", "required"),
    (TEXT, {"prompt": [9999]}, "prompt", "outside the vocabulary"),
    (TEXT, {"prompt": ["a"] * 200}, "n", "max_choices"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "send that alone"),
    (TEXT, {"messages": HI, "prompt": "a"}, "messages", "/v1/chat/completions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", '["text"] is taken'),
    (CHAT, {"moderation": {"model": "x"}}, "moderation", "no moderation"),
    (CHAT, {"response_format": "json"}, "response_format", "must be a JSON object"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]", "needs a 'role'"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x", "audio": {"id": "x"}}]},
        "messages[1].audio", "leave it out"),
    (RESPONSES, {"input": "x", "background": True}, "background", "send stream: true; false is"),
    (RESPONSES, {"input": "x", "reasoning_effort": "low"}, "reasoning_effort", "reasoning.effort"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].function", "beside the type"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "json_schema": {}}}},
        "text.format.json_schema", "beside the type"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "defer_loading": True}]},
        "tools[0].defer_loading", "false is taken"),
    ("/generate", {"text": "a", "temperature": 0}, "temperature", "in sampling_params"),
    ("/generate", {"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob", "top_logprobs_num"),
    ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"1": 101}}},
        "sampling_params.logit_bias", "between -100 and 100"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "["}}, "sampling_params.regex",
        "unterminated"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True, "n": 2}, "n", "without n"),
    ("/generate", {}, "text", "either text or input_ids"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text", "either"),
    ("/generate", {"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens",
        "max_new_tokens"),
    ("/generate", {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}},
        "sampling_params.min_new_tokens", "over max_tokens"),
    ("/generate", {"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params", "2 values"),
    ("/generate", {"text": "a", "lora_path": "x"}, "lora_path", "by its name"),
    ("/generate", {"text": "a", "rid": "x" * 257}, "rid", "at most 256"),
    ("/generate", {"text": "a", "logprob_start_len": 0}, "logprob_start_len", "-1 is taken"),
    ("/tokenize", {"messages": [{"role": "usr", "content": ""}]}, "messages[0].role", "'usr'"),
    ("/abort_request", {}, "rid", "abort_all"),
    ("/tokenize", {}, "prompt", "either"),
    ("/detokenize", {"tokens": [5000]}, "tokens", "outside the vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "words"), CASES)
def test_wrong_requests_name_the_field(
    server: Server, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    if path == CHAT:
        body = {"messages": HI} | body
    error = error_of(server.post(path, body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert words in error["message"]


def test_bodies_that_are_no_json_objects(server: Server) -> None:
    for content in (b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000):
        error_of(server.post(CHAT, content))
    latin = '{"messages":[{"role":"user","content":"caf\xe9"}]}'.encode("latin-1")
    assert "not UTF-8: byte 42 is 0xe9" in error_of(server.post(CHAT, latin))["message"]
    error_of(httpx.post(server.url + CHAT, content=b'{"messages":[]}'))
    deep = '{"messages":[{"role":"user","content":"x"}],"tools":' + "[" * 9000 + "]" * 9000 + "}"
    assert "nested too deeply" in error_of(server.post(CHAT, deep))["message"]
    lone = '{"messages":[{"role":"user","content":"\\ud800"}]}'
    assert "not valid Unicode" in error_of(server.post(CHAT, lone))["message"]
    lone = (
        '{"messages":[{"role":"user","content":"x"}],"json_schema":"{\\"const\\":\\"\\\\ud800\\"}"}'
    )
    error_of(server.post(CHAT, lone))
    number = '{"messages":[{"role":"user","content":"x"}],"seed":1' + "0" * 5000 + "}"
    error_of(server.post(CHAT, number))
    nan = '{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'
    told = error_of(server.post(CHAT, nan))
    assert told["param"] == "temperature"
    assert "finite number" in told["message"]


def test_limits_of_size(server: Server) -> None:
    large = {"messages": [{"role": "user", "content": "x" * (9 * 2**20)}]}
    assert "max_body_bytes" in error_of(server.post(CHAT, large), 413)["message"]
    enum = {"enum": [f"{i:064}" for i in range(2**14)]}
    error = error_of(server.post(CHAT, {"messages": HI} | schema(enum)))
    assert error["param"] == "response_format"
    assert "max_schema_bytes" in error["message"]
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    reply = server.post(CHAT, json.dumps({"messages": HI, "max_tokens": 5} | schema(deep)))
    assert reply.status_code in (200, 400)


def test_no_such_route_method_or_model(server: Server) -> None:
    assert "route" in error_of(server.get("/v2/models"), 404)["message"]
    error_of(server.get(CHAT), 405)
    error = error_of(server.post(CHAT, {"messages": HI, "model": "gpt-5"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert server.get("/").status_code == (200 if admin.PAGE.is_file() else 404)


def test_a_wrong_parameter_of_a_query_is_named(server: Server) -> None:
    assert error_of(server.get("/timeline?steps=0"))["param"] == "steps"


def test_a_refusal_of_a_stream_has_its_status(server: Server) -> None:
    body = {"messages": HI, "stream": True, "ebnf": "root ::= nonesuch"}
    assert error_of(server.post(CHAT, body))["param"] == "ebnf"


def test_the_server_goes_on(server: Server) -> None:
    reply = server.post(CHAT, {"messages": HI, "max_tokens": 3})
    assert reply.status_code == 200
    rejected = [
        line for line in server.get("/metrics").text.splitlines() if "rejected_total" in line
    ]
    assert any('status="400"' in line for line in rejected)
    assert 'overlap_spec:grammar_failures_total{kind="refused"}' in server.get("/metrics").text
    server.settle()
