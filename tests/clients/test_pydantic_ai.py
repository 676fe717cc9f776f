"""pydantic-ai: agents over chats, responses and Anthropic's messages."""

from typing import Any

import pytest

from tests.clients.questions import MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    if request.param == "anthropic":
        pytest.importorskip("anthropic", reason="anthropic is not installed")
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        own = AnthropicProvider(base_url=server.url, api_key="none")
        return AnthropicModel(MODEL, provider=own)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=provider)


def agent(model: Any, **more: Any) -> Any:
    settings = {"max_tokens": MOST_TOKENS, "parallel_tool_calls": False}
    return pydantic_ai.Agent(model, model_settings=settings, retries=0, **more)


def test_a_text(model: Any) -> None:
    result = agent(model).run_sync(TEXT)
    assert result.output
    assert result.usage.output_tokens > 0


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_objects(model: Any, kind: str) -> None:
    if kind == "NativeOutput" and not model.profile.get("supports_json_schema_output"):
        pytest.skip("pydantic-ai asks for a schema only of models that it knows by name")
    output = getattr(pydantic_ai, kind)(Pair)
    assert isinstance(agent(model, output_type=output).run_sync(TEXT).output, Pair)


def test_a_tool_runs(model: Any) -> None:
    ran: list[Pair] = []

    def zyx_tool(pair: Pair) -> str:
        """Take a pair."""
        ran.append(pair)
        return "taken"

    # Either the output's tool or this one has to be called in each turn.
    limits = pydantic_ai.UsageLimits(request_limit=4)
    made = agent(model, output_type=Pair, tools=[zyx_tool])
    try:
        result = made.run_sync(TEXT, usage_limits=limits)
    except pydantic_ai.UsageLimitExceeded:
        assert ran
    else:
        assert isinstance(result.output, Pair)


def test_a_stream_is_the_text(model: Any) -> None:
    import asyncio

    async def streamed() -> str:
        async with agent(model).run_stream(TEXT) as result:
            text: str = await result.get_output()
            return text

    assert asyncio.run(streamed()) == agent(model).run_sync(TEXT).output
