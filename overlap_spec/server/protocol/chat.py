"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from overlap_spec import chat_messages
from overlap_spec.chat_messages import ROLES
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.body import collector_off
from overlap_spec.server.protocol.base import (
    MOST_ENTRIES,
    Few,
    Items,
    Label,
    Metadata,
    OpenAIBody,
    Strict,
)
from overlap_spec.server.protocol.task import ChatTask, Effort, ToolAsk
from overlap_spec.types import SamplingParams


class TextPart(Strict):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class FunctionCall(Strict):
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str


class MessageToolCall(Strict):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    # Present if a client has put the message together from a stream's chunks.
    index: int | None = None


class SystemMessage(Strict):
    """The system's instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """The user's message."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """The model's earlier message."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    name: str | None = None
    # Fields of a reply's message, so that clients can send it back unchanged.
    refusal: None = None
    audio: None = None
    function_call: FunctionCall | None = Field(None, deprecated=True)
    annotations: list[Any] | None = None


class ToolMessage(Strict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(Strict):
    """The result of a call of one of the ``functions``."""

    role: Literal["function"]
    content: str
    name: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


class FunctionName(Strict):
    """The one function to call."""

    name: str


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object; with ``schema``, as some clients send it, JSON under a schema."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Strict):
    """A schema; ``strict: false`` leaves out keywords that no backend enforces."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def schema_format(schema: Any, strict: bool | None = None) -> JsonSchemaFormat:
    """The response format of a schema that another body has."""
    named = NamedSchema.model_construct(schema=schema, strict=strict)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=named)


class StructuralTagFormat(Strict):
    """A structural tag: the form with ``format``, or the older one with ``structures``."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class ChatBody(OpenAIBody):
    """A request for chat completions."""

    example: ClassVar[Mapping[str, Any]] = {
        "messages": [{"role": "user", "content": "Is the flight delayed? It is on time."}],
        "structured_outputs": {"choice": ["yes", "no"]},
    }

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_ENTRIES)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = Field(None, description="Accepted and not used.")
    store: Literal[False] | None = Field(None, description="Nothing is ever stored.")
    service_tier: Literal["auto", "default"] | None = None
    modalities: Items[Literal["text"]] | None = None
    safety_identifier: Label | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: Label | None = Field(None, description="Accepted and not used.")
    functions: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = Field(
        None, deprecated=True, description="Deprecated: send tools."
    )
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        None, deprecated=True, description="Deprecated: send tool_choice."
    )
    chat_template_kwargs: Annotated[dict[str, Any], Few] | None = Field(
        None, description="Switches of the model's chat template, such as enable_thinking."
    )
    reasoning_effort: Effort | None = Field(
        None, description="How much the model thinks; for chat templates with such a switch."
    )
    separate_reasoning: bool | None = Field(
        None, description="False: leave the thinking, with its marks, in the content."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False: do not add the start of the model's answer to the prompt."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, an assistant's."
    )

    refused: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.refused,
        "audio": "there is no audio",
        "prediction": "the draft head predicts",
        "verbosity": "the model has no such switch",
        "web_search_options": "there is no search",
        "echo": "it is for /v1/completions",
    }

    def sampling(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_completion_tokens and max_tokens differ: send one of them",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs goes with logprobs: true", "top_logprobs")
        self.check_shown()
        return self.parameters(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            seed=self.seed,
            logit_bias=self.bias(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            origins=self.with_origins or None,
            draft_trees=self.with_draft_trees or None,
        )

    @property
    def is_deprecated(self) -> bool:
        """See the base class."""
        return super().is_deprecated or self.functions is not None

    def tool_ask(self) -> ToolAsk:
        """The tools, or the older ``functions``.

        Raises:
            InvalidRequest: both.
        """
        if self.functions is None:
            if self.function_call is not None:
                raise InvalidRequest("function_call goes with functions", "function_call")
            return ToolAsk(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.tools is not None or self.tool_choice is not None:
            raise InvalidRequest("functions and tools: send tools alone", "functions")
        choice: Any = self.function_call
        if isinstance(choice, FunctionName):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": function} for function in self.functions]
        return ToolAsk(tools, choice, False, ("functions", "function_call"))

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt: send one of them",
                "continue_final_message",
            )
        return self.continue_final_message is True

    def task(self) -> ChatTask:
        """What the body asks for.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        return ChatTask(
            messages=self.template_messages(),
            sampling=self.sampling(),
            constraint=self,
            form=self.response_format,
            tools=self.tool_ask(),
            variables=self.chat_template_kwargs or {},
            effort=self.reasoning_effort,
            open_answer=self.add_generation_prompt is not False,
            continues=self.continues,
            separate=self.separate_reasoning is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            warnings=self.warnings,
        )

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them: content as text, arguments as objects."""
        return [_plain(message, index) for index, message in enumerate(self.messages)]


def _plain(message: Any, index: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": _text(message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name, None) is not None:
            plain[name] = getattr(message, name)
    calls = getattr(message, "tool_calls", None)
    call = getattr(message, "function_call", None)
    if calls:
        plain["tool_calls"] = [
            _call(call.id, call.function, f"messages[{index}].tool_calls[{number}].function")
            for number, call in enumerate(calls)
        ]
    elif call is not None:
        plain["tool_calls"] = [_call("", call, f"messages[{index}].function_call")]
    elif message.content is None:
        raise InvalidRequest(
            f"messages[{index}]: an assistant's message has content or tool_calls", "messages"
        )
    return plain


def _text(content: str | list[TextPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def _call(label: str, call: FunctionCall, where: str) -> dict[str, Any]:
    arguments = read_arguments(call.arguments, f"{where}.arguments")
    function = {"name": call.name, "arguments": arguments}
    return {"id": label, "type": "function", "function": function}


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """See :func:`overlap_spec.chat_messages.read_arguments`; a large object has many new parts."""
    with collector_off():
        return chat_messages.read_arguments(text, where)
