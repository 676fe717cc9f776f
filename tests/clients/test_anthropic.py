"""Anthropic's client."""

from typing import Any

import pytest

from tests.clients.questions import ASKED, MODEL, MOST_TOKENS, Pair
from tests.support.serving import Server

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
TOOL = {"name": "zyx_tool", "description": "Takes it.", "input_schema": Pair.model_json_schema()}
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": MOST_TOKENS, "messages": ASKED}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_create_and_stream_are_equal(client: Any) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content] == [text]
    assert final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tools_go_there_and_back(client: Any) -> None:
    ask = {**ASK, "tools": [TOOL]}
    forced = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**ask, tool_choice=forced) as stream:
        message = stream.get_final_message()
    (use,) = message.content
    assert message.stop_reason == "tool_use"
    Pair.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
    turns = [
        *ASKED,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**ask, "messages": turns}, tool_choice={"type": "none"})
    assert [block.type for block in after.content] == ["text"]


def test_parse_gives_objects(client: Any) -> None:
    if not hasattr(client.messages, "parse"):
        pytest.skip(f"anthropic {anthropic.__version__} has no parse")
    reply = client.messages.parse(**ASK, output_format=Pair)
    assert isinstance(reply.parsed_output, Pair)


def test_count_and_errors(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED)
    usage = client.messages.create(**ASK).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
        client.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="unknown field"):
        client.messages.create(**ASK, extra_body={"nonesuch": 1})


def test_the_asynchronous_client(server: Server) -> None:
    import asyncio

    async def ask() -> list[str]:
        url = server.url
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            replies = await asyncio.gather(*[client.messages.create(**ASK) for _ in range(4)])
        return [reply.content[0].text for reply in replies]

    assert len(set(asyncio.run(ask()))) == 1
