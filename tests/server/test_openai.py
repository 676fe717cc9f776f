"""The server through OpenAI's client, and in SGLang's shape."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from tests.support.serving import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "overlap-spec"
PERSON = json.loads((EXAMPLES / "person.schema.json").read_text())
MARIA = [{"role": "user", "content": "Maria Lopez is 34 years old and lives in Lisbon."}]
WEATHER = [{"role": "user", "content": "What is the weather in Vienna in celsius?"}]
TOOLS = json.loads((EXAMPLES / "tools.json").read_text())


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


class Person(BaseModel):
    name: str
    age: int
    city: str


def usage_of(chunk: dict[str, Any]) -> int:
    usage = chunk["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    count: int = usage["completion_tokens"]
    return count


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_its_usage_so_far_as_vllm_does(server: Server, path: str) -> None:
    told = {"messages": MARIA} if path.endswith("chat/completions") else {"prompt": ["a", "b"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    n = 2 if "messages" in told else 1
    body = told | {"max_tokens": 9, "n": n, "stream": True, "stream_options": options}
    *chunks, last = server.events(path, body)
    assert not last["choices"]
    ends = []
    for index in range(2):
        counts = [usage_of(c) for c in chunks if c["choices"][0]["index"] == index]
        assert counts == sorted(counts)
        ends.append(counts[-1])
    assert sum(ends) == usage_of(last)
    plain = server.events(path, body | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
    assert all("usage" not in c for c in server.events(path, body | {"stream_options": {}}))


def test_what_asks_nothing_of_a_server_of_ones_own_is_taken(client: openai.OpenAI) -> None:
    more = {"prompt_cache_retention": "24h", "prompt_cache_key": "k", "safety_identifier": "s"}
    more |= {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    function = {"call_id": "1", "caller": {"type": "direct"}}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", **mark}]},
        {"type": "function_call", "name": "f", "arguments": "{}", **function},
        {"type": "function_call_output", "name": "f", "output": "1", **function},
    ]
    asked = [{"role": "user", "content": [{"type": "text", "text": "Hi", **mark}]}]
    for tier in ("flex", "priority", "fast"):
        given: dict[str, Any] = {"model": MODEL, "extra_body": more | {"service_tier": tier}}
        client.chat.completions.create(messages=asked, max_tokens=1, verbosity="medium", **given)  # type: ignore[call-overload]
        given["extra_body"] |= {"parallel_tool_calls": False, "store": False, "background": False}
        given["extra_body"] |= {"tool_choice": "auto", "include": ["web_search_call.results"]}
        text = {"verbosity": "medium"}
        client.responses.create(input=items, max_output_tokens=16, text=text, **given)


def test_models_name_their_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 4096  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        client.models.retrieve("gpt-5")


def test_a_schema_in_gives_valid_json_out_whole_and_streamed(client: openai.OpenAI) -> None:
    form = schema_format(PERSON)
    whole = client.chat.completions.create(model=MODEL, messages=MARIA, response_format=form)
    text = whole.choices[0].message.content
    assert text is not None
    jsonschema.validate(json.loads(text), PERSON)
    assert json.loads(text)["name"] == "Maria Lopez"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MARIA, response_format=form, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert joined(chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4
    *_, end, last = chunks
    assert end.choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_parse_returns_pydantic_objects(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=MARIA, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name="Maria Lopez", age=34, city="Lisbon")
    with client.chat.completions.stream(
        model=MODEL, messages=MARIA, response_format=Person
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == reply.choices[0].message.parsed
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize(
    ("extra", "valid"),
    [
        ({"regex": r"\d{4}-\d\d-\d\d"}, r"\d{4}-\d\d-\d\d"),
        ({"ebnf": 'root ::= "a" [0-9] "z"'}, r"a[0-9]z"),
        ({"json_schema": '{"enum": ["left", "right"]}'}, '"(left|right)"'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
        ({"structured_outputs": {"grammar": 'root ::= "q" "r"'}}, "qr"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_the_names_that_people_already_send(
    client: openai.OpenAI, extra: dict[str, Any], valid: str
) -> None:
    import re

    reply = client.chat.completions.create(model=MODEL, messages=MARIA, extra_body=extra)
    assert re.fullmatch(valid, reply.choices[0].message.content or "")
    text = client.completions.create(model=MODEL, prompt="x", extra_body=extra)
    assert re.fullmatch(valid, text.choices[0].text)


def test_json_object_and_structural_tag(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MARIA, response_format={"type": "json_object"}, max_tokens=200,
        logit_bias={},
    )  # fmt: skip
    assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {
        "type": "integer", "minimum": 1, "maximum": 9}}, "end": "</n>"}  # fmt: skip
    form: Any = {"type": "structural_tag", "format": tag}
    reply = client.chat.completions.create(model=MODEL, messages=MARIA, response_format=form)
    content = reply.choices[0].message.content or ""
    assert content[:3] + content[-4:] == "<n></n>"
    assert 1 <= int(content[3:-4]) <= 9


def test_a_tool_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": WEATHER, "tools": TOOLS}
    ask["tool_choice"] = "required"
    ask["parallel_tool_calls"] = False
    reply = client.chat.completions.create(**ask)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
    assert arguments["city"] == "Vienna"
    chunks = list(client.chat.completions.create(**ask, stream=True))
    pieces = [c for k in chunks for x in k.choices for c in x.delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather"
    assert pieces[0].id
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments
    assert len(pieces) > 3
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # The call and its result go back into the chat.
    messages = [*WEATHER, choice.message.model_dump(exclude_unset=True)]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature":21}'})
    after = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=40
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_one_tool_by_name_and_tools_beside_a_schema(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "send_email"}}
    reply = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice=named
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.name == "send_email"
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[1]["function"]["parameters"])
    reply = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, response_format=schema_format(PERSON)
    )
    message = reply.choices[0].message
    # A call or the schema's JSON: one of them, never neither.
    if message.tool_calls:
        assert message.tool_calls[0].function.name in ("get_weather", "send_email")
    else:
        jsonschema.validate(json.loads(message.content or ""), PERSON)


def test_logprobs_of_chats_and_texts(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": MARIA,
        "response_format": schema_format(PERSON),
    }
    reply = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    shown = reply.choices[0].logprobs
    assert shown is not None
    entries = shown.content or []
    raw = bytes(b for entry in entries for b in entry.bytes or [])
    assert raw.decode() == reply.choices[0].message.content
    assert all(entry.logprob <= 0 for entry in entries)
    assert all(1 <= len(entry.top_logprobs) <= 3 for entry in entries)
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)
    chunks = client.chat.completions.create(**ask, logprobs=True, stream=True)
    streamed = [
        e for k in chunks for c in k.choices if c.logprobs for e in c.logprobs.content or []
    ]
    assert [e.token for e in streamed] == [e.token for e in entries]
    text = client.completions.create(model=MODEL, prompt="One two", max_tokens=6, logprobs=2)
    assert text.choices[0].logprobs is not None
    tokens = text.choices[0].logprobs
    assert len(tokens.tokens or []) == len(tokens.token_logprobs or []) == 6
    assert "".join(tokens.tokens or []).startswith(text.choices[0].text)


def test_several_outputs_differ_by_their_seeds(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MARIA, "temperature": 1.5, "max_tokens": 24}
    reply = client.chat.completions.create(**ask, n=3, seed=7)
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    single = client.chat.completions.create(**ask, seed=8)
    assert single.choices[0].message.content == texts[1]
    chunks = list(client.chat.completions.create(**ask, n=3, seed=7, stream=True))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_lengths_stops_and_bias(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MARIA}
    cut = client.chat.completions.create(**ask, max_completion_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5
    form = schema_format(PERSON)
    stopped = client.chat.completions.create(**ask, response_format=form, stop=[",", "zzz"])
    assert stopped.choices[0].message.content == '{"name":"Maria Lopez"'
    assert stopped.choices[0].stop_reason == ","  # type: ignore[attr-defined]
    extra = {"min_tokens": 40, "repetition_penalty": 1.1, "top_k": 5, "min_p": 0.01}
    long = client.chat.completions.create(
        **ask, max_tokens=60, extra_body=extra, presence_penalty=0.5, frequency_penalty=-0.5, seed=1
    )
    assert long.usage is not None
    assert long.usage.completion_tokens >= 40
    digit = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, logit_bias={"25": 100}, temperature=0
    )
    assert digit.usage is not None
    ids = httpx.post(
        f"{client.base_url}".replace("/v1/", "/detokenize"), json={"tokens": [25]}
    ).json()
    assert digit.choices[0].text == ids["text"]


def test_completions_of_texts_and_token_ids(server: Server, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["text"] == "Once upon"
    texts = client.completions.create(model=MODEL, prompt=["Once upon", "Tom has"], max_tokens=8)
    tokens = client.completions.create(model=MODEL, prompt=[ids], max_tokens=8)
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[0].text == tokens.choices[0].text
    echoed = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, echo=True)
    assert echoed.choices[0].text == "Once upon" + texts.choices[0].text
    stream = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, stream=True)
    assert "".join(k.choices[0].text for k in stream) == texts.choices[0].text


def test_generate_in_sglangs_shape(server: Server) -> None:
    params = {"max_new_tokens": 30, "regex": r"\d{3}-\d{3}", "temperature": 0}
    body = {"text": "Call me", "sampling_params": params, "rid": "mine"}
    one = server.post("/generate", body).json()
    assert one["meta_info"]["id"] == "mine"
    assert one["meta_info"]["finish_reason"]["type"] == "stop"
    assert one["meta_info"]["spec_verify_ct"] >= 1
    assert (
        sum(one["meta_info"]["spec_correct_drafts_histogram"]) == one["meta_info"]["spec_verify_ct"]
    )
    many = server.post("/generate", body | {"text": ["Call me", "Or me"], "rid": None})
    assert [r["text"] == one["text"] for r in many.json()] == [True, False]
    ids = server.post("/tokenize", {"prompt": "Call me"}).json()["tokens"]
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    logged = server.post("/generate", body | {"top_logprobs_num": 2}).json()
    assert logged["text"] == one["text"]
    pairs = logged["meta_info"]["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == logged["output_ids"]
    events = server.events("/generate", body)
    assert events[-1]["text"] == one["text"]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(events))
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"


async def _async_parse(url: str) -> list[Person | None]:
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def one() -> Person | None:
        reply = await client.chat.completions.parse(
            model=MODEL,
            messages=MARIA,
            response_format=Person,  # type: ignore[arg-type]
        )
        return reply.choices[0].message.parsed

    try:
        return await asyncio.gather(*[one() for _ in range(16)])
    finally:
        await client.close()


def test_many_at_once_give_the_same_as_one(server: Server) -> None:
    import asyncio

    people = asyncio.run(_async_parse(server.url))
    assert people == [Person(name="Maria Lopez", age=34, city="Lisbon")] * 16
    server.settle()


def test_a_request_can_do_without_speculation(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Repeat: one two three."}], "max_tokens": 12}
    on, off = (server.post("/v1/chat/completions", body | {"speculate": s}) for s in (True, False))
    assert on.json()["choices"][0]["message"] == off.json()["choices"][0]["message"]
    wrong = server.post("/v1/chat/completions", body | {"speculate": "no"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "speculate")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_choice_with_the_probability_of_each_text(server: Server, path: str) -> None:
    texts = ["pending", "shipped", "delivered, thanks"]
    wanted = {"choice": texts, "probabilities": True, "faithful": True}
    prompt = "What is the status?"
    chat = "chat" in path
    body: dict[str, Any] = {"temperature": 0, "structured_outputs": wanted}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    (choice,) = server.post(path, body).json()["choices"]
    found = choice["choice_probabilities"]
    assert [entry["text"] for entry in found] == texts
    assert sum(entry["probability"] for entry in found) == pytest.approx(1)
    best = max(found, key=lambda entry: entry["logprob"])["text"]
    assert (choice["message"]["content"] if chat else choice["text"]) == best
    pieces = [piece for event in server.events(path, body) for piece in event["choices"]]
    (streamed,) = [p["choice_probabilities"] for p in pieces if "choice_probabilities" in p]
    assert [p["finish_reason"] for p in pieces if "choice_probabilities" in p] == ["stop"]
    for one, other in zip(found, streamed, strict=True):
        assert one["text"] == other["text"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    plain = body | {"structured_outputs": {"choice": texts}}
    assert "choice_probabilities" not in server.post(path, plain).json()["choices"][0]
