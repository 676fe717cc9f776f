"""The body of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from overlap_spec.chat_messages import ROLES
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.protocol.base import (
    MOST_ENTRIES,
    Few,
    GenerationBody,
    Items,
    Label,
    Metadata,
    Strict,
)
from overlap_spec.server.protocol.chat import (
    JsonObjectFormat,
    TextFormat,
    read_arguments,
    schema_format,
)
from overlap_spec.server.protocol.task import ChatTask, Effort, ToolAsk
from overlap_spec.types import SamplingParams

LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "nothing is stored: send the whole conversation as input"

# Fields that begin a new message of the assistant where an item of another has come before.
BEFORE = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}


class ContentPart(Strict):
    """A text of a message; log-probabilities and the like are not read."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | Items[ContentPart]


class MessageItem(Strict):
    """A message, of the caller's or of an earlier output."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call of an earlier output; ``arguments`` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: None = None


class CallOutputItem(Strict):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningItem(Strict):
    """Thinking of an earlier output."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[ContentPart] | None = None
    content: Items[ContentPart] | None = None
    encrypted_content: None = None
    status: str | None = None


def _kind(item: Any) -> Any:
    """The type of an item, which a message need not have."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class SchemaFormat(Strict):
    """JSON that is valid under a schema; ``strict: false`` leaves out keywords that no backend
    enforces."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """What the text is."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None

    refused: ClassVar[Mapping[str, str]] = {"verbosity": "the model has no such switch"}


class ReasoningConfig(Strict):
    """How much the model thinks."""

    effort: Effort | None = None

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("summary", "generate_summary"), "the thinking itself is in the output"
    )


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class NamedTool(Strict):
    """One of the tools."""

    type: Literal["function"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Strict):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(max_length=1024)]

    def for_chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        tools = [tool.for_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


class ResponseStreamOptions(Strict):
    """What a stream has besides its output."""

    # OpenAI's padding against traffic analysis: accepted, and not added.
    include_obfuscation: bool | None = None


class ResponsesBody(GenerationBody):
    """A request for a response."""

    example: ClassVar[Mapping[str, Any]] = {
        "input": "Extract name and age: Anna is 30.",
        "max_output_tokens": 64,
        "text": {"format": {"type": "json_object"}},
    }

    input: str | Annotated[Items[Item], Field(min_length=1, max_length=MOST_ENTRIES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: (
        Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None
    ) = Field(None, description="Thinking is never encrypted: it is in the output as it is.")
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(
        None, description="At most 16 short texts, repeated in the response and not used."
    )
    store: Literal[False] | None = Field(None, description="Nothing is ever stored.")
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: Label | None = Field(None, description="Accepted and not used.")
    safety_identifier: Label | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: Label | None = Field(None, description="Accepted and not used.")
    chat_template_kwargs: Annotated[dict[str, Any], Few] | None = Field(
        None, description="Switches of the model's chat template, such as enable_thinking."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": NOT_STORED,
        "conversation": NOT_STORED,
        "prompt": "there are no stored prompts: send instructions and input",
        "max_tool_calls": "the caller's own tools alone are called, once a response",
        "context_management": "shorten the input",
        "moderation": "there is no moderation",
        "max_tokens": "send max_output_tokens",
        "messages": "send input",
        "response_format": "send text.format",
    }

    @property
    def with_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def sampling(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        if self.with_logprobs and self.tools:
            raise InvalidRequest(
                "log-probabilities go with a text alone: send no tools",
                "include" if self.top_logprobs is None else "top_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes with stream: true", "stream_options")
        return self.parameters(
            max_tokens=self.max_output_tokens,
            seed=self.seed,
            logit_bias=self.bias(),
            logprobs=(self.top_logprobs or 0) if self.with_logprobs else None,
        )

    def task(self) -> ChatTask:
        """What the body asks for.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool | AllowedTools):
            choice = choice.for_chat()
        tools = [tool.for_chat() for tool in self.tools or ()]
        form: Any = self.text.format if self.text else None
        if isinstance(form, SchemaFormat):
            form = schema_format(form.schema_, form.strict)
        return ChatTask(
            messages=self.messages(),
            sampling=self.sampling(),
            constraint=self,
            form=form,
            form_field="text.format",
            tools=ToolAsk(tools or None, choice, self.parallel_tool_calls),
            variables=self.chat_template_kwargs or {},
            effort=self.reasoning.effort if self.reasoning else None,
            effort_field="reasoning.effort",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
        )

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat templates expect it.

        Thinking, text and calls of one output, which are items of their own, are one message.
        """
        said: list[dict[str, Any]] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            match item:
                case MessageItem(role="assistant"):
                    _answer(said, "content")["content"] = _text(item.content)
                case MessageItem():
                    role = ROLES[item.role]
                    said.append({"role": role, "content": _text(item.content)})
                case ReasoningItem():
                    thinking = _text(item.content or item.summary or [])
                    _answer(said, "reasoning_content")["reasoning_content"] = thinking
                case CallItem():
                    arguments = read_arguments(item.arguments, f"input[{index}].arguments")
                    function = {"name": item.name, "arguments": arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _answer(said, "tool_calls").setdefault("tool_calls", []).append(call)
                case CallOutputItem():
                    result = {"tool_call_id": item.call_id, "content": _text(item.output)}
                    said.append({"role": "tool", **result})
        return said


def _answer(said: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to, as its field ``name``."""
    last = said[-1] if said and said[-1]["role"] == "assistant" else None
    if last is None or any(last.get(field) for field in BEFORE[name]):
        last = {"role": "assistant", "content": None}
        said.append(last)
    return last


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
