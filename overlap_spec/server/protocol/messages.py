"""The bodies of Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from overlap_spec.errors import InvalidRequest
from overlap_spec.server.protocol.base import (
    MOST_ENTRIES,
    Count,
    Few,
    GenerationBody,
    Items,
    Strict,
)
from overlap_spec.server.protocol.chat import schema_format
from overlap_spec.server.protocol.task import ChatTask, Effort, ToolAsk
from overlap_spec.types import SamplingParams

# As Anthropic bounds it.
UserId = Annotated[str, Field(max_length=512)]
CACHED = "Accepted and not used: whatever prompts have in common at their start is cached."

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


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]


class Turn(Strict):
    """A message. As the last one, the assistant's is the beginning of the reply."""

    role: Literal["user", "assistant"]
    content: str | Items[Block]


class Tool(Part):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
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


class CountBody(GenerationBody):
    """Messages whose tokens are counted."""

    example: ClassVar[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}]}

    messages: Annotated[Items[Turn], Field(min_length=1, max_length=MOST_ENTRIES)]
    system: str | Items[TextBlock] | None = None
    tools: Annotated[Items[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description=CACHED)
    chat_template_kwargs: Annotated[dict[str, Any], Few] | None = Field(
        None, description="Switches of the model's chat template, such as enable_thinking."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "container": "there are no containers",
        "mcp_servers": "there are no servers' tools: send tools",
        "context_management": "shorten the messages",
        "max_tokens_to_sample": "send max_tokens",
        "stop": "send stop_sequences",
        "response_format": "send output_config.format",
        "output_format": "send output_config.format",
    }

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
        return self.parameters(seed=self.seed, logit_bias=self.bias())

    def task(self) -> ChatTask:
        """What the body asks for.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        form, effort, effort_field = None, None, "output_config.effort"
        if self.output_config is not None:
            effort = self.output_config.effort
            if self.output_config.format is not None:
                form = schema_format(self.output_config.format.schema_)
        if self.thinking is not None and effort is None:
            effort, effort_field = EFFORTS[self.thinking.type], "thinking"
        return ChatTask(
            messages=self.template_messages(),
            sampling=self.sampling(),
            constraint=self,
            form=form,
            form_field="output_config.format",
            tools=self.tool_ask(),
            variables=self.chat_template_kwargs or {},
            effort=effort,
            effort_field=effort_field,
            continues=self.messages[-1].role == "assistant",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
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
            InvalidRequest: a block that cannot be in a message of its role.
        """
        said: list[dict[str, Any]] = []
        if self.system is not None:
            said.append({"role": "system", "content": _text(self.system)})
        for index, turn in enumerate(self.messages):
            if isinstance(turn.content, str):
                said.append({"role": turn.role, "content": turn.content})
            elif turn.role == "user":
                said += _asked(turn.content, index)
            else:
                said.append(_answered(turn.content, index))
        if self.messages[-1].role == "assistant" and "tool_calls" in said[-1]:
            raise InvalidRequest("a tool_use needs its tool_result", "messages")
        return said


class MessagesBody(CountBody):
    """A request for a message."""

    example: ClassVar[Mapping[str, Any]] = {**CountBody.example, "max_tokens": 32}

    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] = Field(
        description="What the context leaves is the most, whatever is asked."
    )
    stop_sequences: Annotated[Items[str], Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, UserId | None], Few] | None = Field(
        None, description="Accepted and not used."
    )
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters, without ``max_tokens``, which the context may cut."""
        given = self.parameters(
            seed=self.seed,
            logit_bias=self.bias(),
            stop=self.stop_sequences,
            max_tokens=self.max_tokens,
        )
        return replace(given, max_tokens=None)


def _asked(blocks: list[Any], index: int) -> list[dict[str, Any]]:
    """A user's message: the results of tools, then the text."""
    said: list[dict[str, Any]] = []
    texts = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                content = _text(block.content or "")
                said.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                raise _misplaced(block, index, number, "a user's")
    if texts or not said:
        said.append({"role": "user", "content": "\n".join(texts)})
    return said


def _answered(blocks: list[Any], index: int) -> dict[str, Any]:
    """An assistant's message."""
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, index, number, "an assistant's")
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said |= {"tool_calls": calls, "content": said["content"] or None}
    return said


def _misplaced(block: Any, index: int, number: int, whose: str) -> InvalidRequest:
    where = f"messages[{index}].content[{number}]"
    return InvalidRequest(f"a {block.type} cannot be in {whose} message", where)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
