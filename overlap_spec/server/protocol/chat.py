"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from overlap_spec.errors import InvalidRequest
from overlap_spec.server.protocol.base import MOST_ENTRIES, Few, Items, OpenAIBody, Strict
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
    function_call: None = None
    annotations: list[Any] | None = None


class ToolMessage(Strict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


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

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_ENTRIES)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Few] | None = Field(
        None, description="Accepted and not used."
    )
    store: Literal[False] | None = Field(None, description="Nothing is ever stored.")
    service_tier: Literal["auto", "default"] | None = None
    modalities: Items[Literal["text"]] | None = None
    safety_identifier: str | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted and not used.")

    refused: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.refused,
        "functions": "send tools instead",
        "function_call": "send tool_choice instead",
        "audio": "there is no audio",
        "prediction": "the draft head predicts",
        "reasoning_effort": "the model's chat template has no such switch",
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
        return self.parameters(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            seed=self.seed,
            logit_bias=self.bias(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            origins=self.with_origins or None,
        )

    def count_characters(self) -> int:
        """Characters of all texts of the messages, arguments of tool calls included."""
        return sum(map(_characters, self.messages))

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them: content as text, arguments as objects."""
        return [_plain(message, index) for index, message in enumerate(self.messages)]


def _characters(message: Any) -> int:
    content, calls = message.content, getattr(message, "tool_calls", None)
    parts = content if isinstance(content, list) else ()
    return (
        (len(content) if isinstance(content, str) else 0)
        + sum(len(part.text) for part in parts)
        + len(getattr(message, "reasoning_content", None) or "")
        + sum(len(call.function.name) + len(call.function.arguments) for call in calls or ())
    )


def _plain(message: Any, index: int) -> dict[str, Any]:
    plain = {"role": message.role, "content": _text(message.content)}
    if message.role == "developer":
        plain["role"] = "system"
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name, None) is not None:
            plain[name] = getattr(message, name)
    calls = getattr(message, "tool_calls", None)
    if calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, index, number),
                },
            }
            for number, call in enumerate(calls)
        ]
    elif message.content is None:
        raise InvalidRequest(
            f"messages[{index}]: an assistant's message has content or tool_calls", "messages"
        )
    return plain


def _text(content: str | list[TextPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def _arguments(text: str, message: int, call: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"messages[{message}].tool_calls[{call}].function.arguments"
        raise InvalidRequest(f"{where} is not the text of a JSON object", "messages")
    return arguments
