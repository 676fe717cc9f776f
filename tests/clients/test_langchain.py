"""langchain-openai: chats, structured output, tools, and the Responses API."""

from typing import Any

import pytest

from tests.clients.questions import MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is missing")


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(server: Server, request: pytest.FixtureRequest) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        max_retries=0,
        max_tokens=MOST_TOKENS,
        use_responses_api=request.param,
    )


def test_a_text_whole_and_streamed(chat: Any) -> None:
    whole = chat.invoke(TEXT)
    pieces = list(chat.stream(TEXT))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Pair, method=method).invoke(TEXT), Pair)


def test_tools_go_there_and_back(chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool(args_schema=Pair)
    def zyx_tool(zyx: int, wvu: bool) -> str:
        """Take a pair."""
        return f"{zyx} {wvu}"

    with_tools = chat.bind_tools([zyx_tool], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage(TEXT)
    called = with_tools.invoke([asked])
    (call,) = called.tool_calls
    Pair.model_validate(call["args"])
    result = ToolMessage(zyx_tool.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.invoke([asked, called, result]).text
