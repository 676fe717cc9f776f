"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.constraints import ResolvedConstraint
from overlap_spec.server.conversation import Conversation, Event, PartWriter, rendering_of
from overlap_spec.server.errors import ANTHROPIC_ERRORS, ApiError, Json
from overlap_spec.server.events import Wire
from overlap_spec.server.protocol import CACHED, MOST_ENTRIES, Count, Few, Items, Positive, Strict
from overlap_spec.server.service import (
    STREAMS,
    Format,
    RequestGroup,
    Serving,
    findings,
    interleaved,
    new_id,
    routes,
    speculation,
)
from overlap_spec.server.task import ChatFields, ChatTask, Effort, ToolAsk, schema_format
from overlap_spec.types import Output, SamplingParams

# Type of a block → type and field of its deltas.
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


# As Anthropic bounds it.
UserId = Annotated[str, Field(max_length=512)]

EFFORTS: dict[str, Effort | None] = {"enabled": "medium", "disabled": "none", "adaptive": None}


class Part(Strict):
    """What all parts of a content have."""

    cache_control: dict[str, Any] | None = Field(None, description=CACHED)


class TextBlock(Part):
    """A text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ToolUseBlock(Part):
    """A call of a tool, in an assistant's message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    # As a reply has it.
    caller: dict[str, Any] | None = None


class ToolResultBlock(Part):
    """What a tool gave, in a user's message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = Field(
        None, description="Accepted and not used: the content says what went wrong."
    )


class ThinkingBlock(Strict):
    """Thinking of an earlier reply."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class UserTurn(Strict):
    """The user's message: texts, and the results of tools."""

    role: Literal["user"]
    content: str | Items[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]

    def for_chat(self) -> list[dict[str, Any]]:
        """As chat templates expect it: the results of tools, then the text."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        said: list[dict[str, Any]] = []
        texts = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                content = _text(block.content or "")
                said.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        if texts or not said:
            said.append({"role": "user", "content": "\n".join(texts)})
        return said


class AssistantTurn(Strict):
    """The model's message. As the last one, it is the beginning of the reply."""

    role: Literal["assistant"]
    content: (
        str
        | Items[Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]]
    )

    def for_chat(self) -> list[dict[str, Any]]:
        """As chat templates expect it."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts, thoughts, calls = [], [], []
        for block in self.content:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
        said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            said["reasoning_content"] = "".join(thoughts)
        if calls:
            said |= {"tool_calls": calls, "content": said["content"] or None}
        return [said]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        function = {"name": self.name, "parameters": self.input_schema}
        function |= self.model_dump(include={"description", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class ToolChoice(Strict):
    """Which tools may be called: any or none of them, at least one, or the one of the name."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = Field(None, description="Most tokens of it.")
    display: Literal["summarized"] | None = None


class OutputFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What the reply is."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountBody(ChatFields):
    """Messages whose tokens are counted."""

    example: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}]}

    messages: Annotated[Items[Turn], Field(min_length=1, max_length=MOST_ENTRIES)]
    system: str | Items[TextBlock] | None = None
    tools: Annotated[Items[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description=CACHED)

    refused: ClassVar[Mapping[str, str]] = {
        "container": "there are no containers",
        "mcp_servers": "there are no servers' tools: send tools",
        "context_management": "shorten the messages",
        "max_tokens_to_sample": "send max_tokens",
        "stop": "send stop_sequences",
        "response_format": "send output_config.format",
        "output_format": "send output_config.format",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"mcp_servers": []}

    def parameters(self, **more: Any) -> SamplingParams:
        """See the base class; ``thinking.budget_tokens`` is the budget of the thinking."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if self.thinking is None or budget is None:
            return super().parameters(**more)
        if self.thinking.type == "disabled" or self.thinking_budget not in (None, budget):
            raise InvalidRequest(
                "budget_tokens goes with thinking, and without another thinking_budget",
                "thinking.budget_tokens",
            )
        return super().parameters(**more, thinking_budget=budget)

    def sampling(self) -> SamplingParams:
        """The sampling parameters."""
        return self.parameters()

    def task(self) -> ChatTask:
        """What the body asks for; InvalidRequest where fields contradict each other."""
        form, effort, effort_field = None, None, "output_config.effort"
        if self.output_config is not None:
            effort = self.output_config.effort
            if self.output_config.format is not None:
                form = schema_format(self.output_config.format.schema_)
        if self.thinking is not None and effort is None:
            effort, effort_field = EFFORTS[self.thinking.type], "thinking"
        return self.task_of(
            self.template_messages(),
            self.sampling(),
            form=form,
            form_field="output_config.format",
            tools=self.tool_ask(),
            effort=effort,
            effort_field=effort_field,
            continues=self.messages[-1].role == "assistant",
        )

    def tool_ask(self) -> ToolAsk:
        """The tools in the form of chat completions."""
        tools = [tool.for_chat() for tool in self.tools or ()]
        given = self.tool_choice
        if given is None:
            return ToolAsk(tools or None)
        if (given.type == "tool") != (given.name is not None):
            raise InvalidRequest("a name goes with the type tool", "tool_choice.name")
        choice: Any = {"any": "required"}.get(given.type, given.type)
        if given.name is not None:
            choice = {"type": "function", "function": {"name": given.name}}
        alone = given.disable_parallel_tool_use
        return ToolAsk(tools or None, choice, None if alone is None else not alone)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them: results of tools are messages of their own.

        Raises:
            InvalidRequest: the last message calls a tool.
        """
        said: list[dict[str, Any]] = []
        if self.system is not None:
            said.append({"role": "system", "content": _text(self.system)})
        for turn in self.messages:
            said += turn.for_chat()
        if self.messages[-1].role == "assistant" and "tool_calls" in said[-1]:
            raise InvalidRequest("a tool_use needs its tool_result", "messages")
        return said


class MessagesBody(CountBody):
    """A request for a message."""

    example: ClassVar[Mapping[str, Any]] = {**CountBody.example, "max_tokens": 32}

    max_tokens: Positive = Field(
        description="What the context leaves is the most, whatever is asked."
    )
    stop_sequences: Annotated[Items[str], Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, UserId | None], Few] | None = Field(
        None, description="Accepted and not used."
    )
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters, without ``max_tokens``, which the context may cut."""
        given = self.parameters(stop=self.stop_sequences, max_tokens=self.max_tokens)
        return replace(given, max_tokens=None)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


router = routes(responses=ANTHROPIC_ERRORS)


@router.post("/v1/messages", responses=STREAMS)
async def messages(service: Serving, body: MessagesBody, http: HttpRequest) -> Response:
    """Anthropic's messages."""
    model, label = service.check_model(body.model), new_id("msg_")
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    # Clients ask for more than a context may hold, which ends a message, and does not refuse it.
    is_cut = body.max_tokens > chat.request.max_tokens
    request = replace(chat.request, max_tokens=min(body.max_tokens, chat.request.max_tokens))
    shown = MessageFormatter(chat, label, model, is_cut)
    group = RequestGroup([label], [request], chat.field)
    return await service.answer(http, shown, group, stream=body.stream, model=model)


@router.post("/v1/messages/count_tokens")
async def count_tokens(service: Serving, body: CountBody, http: HttpRequest) -> Response:
    """Tokens that messages have as a prompt."""
    service.check_model(body.model)
    task = body.task()
    service.engine.input_processor.check_length(task.messages)
    await service.constraints.tools(task.tools, ResolvedConstraint())
    rendering, engine = rendering_of(service, task), service.engine
    work = partial(
        engine.input_processor.prompt_ids,
        task.messages,
        tools=task.tools.tools,
        rendering=rendering,
    )
    ids = await service.run_until_disconnect(http, engine.preparation.run(work))
    return Json({"input_tokens": len(ids)})


class MessageFormatter(Format):
    """Formats one output as a message.

    Args:
        is_cut: Whether the context leaves less than was asked.
    """

    wire = Wire(ApiError.anthropic_body, b"", named=True)

    def __init__(self, conversation: Conversation, label: str, model: str, is_cut: bool) -> None:
        self._conversation, self._is_cut = conversation, is_cut
        self._writer = BlockWriter()
        own = {"id": label, "type": "message", "role": "assistant", "model": model}
        self._head: dict[str, Any] = own

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The message as one object."""
        (output,) = outputs
        for piece in self._conversation.assembler().take(output):
            self._writer.push(piece)
        self._writer.end()
        ended = self._ended(output) | {"usage": _usage(output)} | speculation(outputs)
        return self._head | {"content": self._writer.parts, **ended, **findings(output)}

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Event]:
        """The message in events."""
        (handle,), assembler = handles, self._conversation.assembler()
        tokens = {"input_tokens": len(handle.request.prompt_ids), "output_tokens": 0}
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        begun = self._head | nothing | {"usage": CACHE | tokens}
        yield {"type": "message_start", "message": begun}
        async for _, delta in interleaved(handles):
            for piece in assembler.take(delta):
                for event in self._writer.push(piece):
                    yield event
        for event in self._writer.end():
            yield event
        output = await handle.finish()
        ended = {"delta": self._ended(output), "usage": _usage(output), **findings(output)}
        ended |= speculation([output])
        yield {"type": "message_delta", **ended}
        yield {"type": "message_stop"}

    def _ended(self, output: Output) -> dict[str, Any]:
        """Why the message ended."""
        reason: str | None
        match output.finish_reason:
            case "length":
                reason = "model_context_window_exceeded" if self._is_cut else "max_tokens"
            case "stop" if isinstance(output.stop_match, str):
                return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_match}
            case "stop" if any(block["type"] == "tool_use" for block in self._writer.parts):
                reason = "tool_use"
            case "stop":
                reason = "end_turn"
            case _:
                # The caller aborted it.
                reason = None
        return {"stop_reason": reason, "stop_sequence": None}


CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(output: Output) -> dict[str, Any]:
    """Anthropic's usage, where tokens that were found in the cache do not count as input."""
    stats = output.stats
    read = min(stats.cached_tokens, stats.prompt_tokens)
    own = {"input_tokens": stats.prompt_tokens - read, "cache_read_input_tokens": read}
    return CACHE | own | {"output_tokens": stats.output_tokens}


class BlockWriter(PartWriter):
    """Writes the Messages API's events and blocks."""

    def __init__(self) -> None:
        super().__init__("thinking", "text")

    def _start(self, kind: str) -> list[Event]:
        own = {"signature": ""} if kind == "thinking" else {}
        return self._opened({"type": kind, kind: "", **own})

    def _start_call(self, label: str, name: str) -> list[Event]:
        return self._opened({"type": "tool_use", "id": label, "name": name, "input": {}})

    def _opened(self, block: dict[str, Any]) -> list[Event]:
        return [self._event("start", content_block=self._put(block))]

    def _added(self, text: str) -> Event:
        kind, field = DELTAS[self.parts[-1]["type"]]
        return self._event("delta", delta={"type": kind, field: text})

    def _ended(self) -> list[Event]:
        block = self.parts[-1]
        if block["type"] == "tool_use":
            block["input"] = _read(self._text)
        else:
            block[block["type"]] = self._text
        return [self._event("stop")]

    def _event(self, kind: str, **own: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self.parts) - 1, **own}


def _read(text: str) -> dict[str, Any]:
    """The object that a call's arguments are the text of; nothing of one that was cut short."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
