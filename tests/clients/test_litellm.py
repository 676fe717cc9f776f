"""litellm, with the server as a host of OpenAI's, vLLM's and Anthropic's API."""

import json
from typing import Any

import pytest

from tests.clients.questions import ASKED, MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

litellm = pytest.importorskip("litellm", reason="litellm is not installed")
HOSTS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}


def ask(server: Server, host: str, **more: Any) -> Any:
    base = server.url + HOSTS[host]
    return litellm.completion(
        model=f"{host}/{MODEL}",
        messages=ASKED,
        api_base=base,
        api_key="none",
        max_tokens=MOST_TOKENS,
        num_retries=0,
        **more,
    )


@pytest.mark.parametrize("host", HOSTS)
def test_a_text_whole_and_streamed(server: Server, host: str) -> None:
    whole = ask(server, host).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(server, host, stream=True)]
    assert whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("host", HOSTS)
def test_a_tool_is_called(server: Server, host: str) -> None:
    function = {"name": "zyx_tool", "parameters": Pair.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    reply = ask(server, host, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    Pair.model_validate(json.loads(call.function.arguments))


@pytest.mark.parametrize("host", ["openai", "hosted_vllm"])
def test_a_schema_holds(server: Server, host: str) -> None:
    reply = ask(server, host, response_format=Pair)
    Pair.model_validate_json(reply.choices[0].message.content)


def test_responses(server: Server) -> None:
    pytest.importorskip("mcp", reason="litellm answers responses only beside mcp")
    reply = litellm.responses(
        model=f"openai/{MODEL}",
        input=TEXT,
        api_base=f"{server.url}/v1",
        api_key="none",
        max_output_tokens=MOST_TOKENS,
    )
    text = reply.output[0].content[0].text
    assert text == ask(server, "openai").choices[0].message.content
