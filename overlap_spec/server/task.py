"""What a body asks of the model, in the words of no wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from overlap_spec.server.protocol import Constraint, Few, GenerationBody, Items, Strict
from overlap_spec.types import SamplingParams

KWARGS = "Switches of the model's chat template, such as enable_thinking."
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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


@dataclass(frozen=True)
class ToolAsk:
    """Tools, and which of them may be called.

    Attributes:
        tools: In the form of chat completions.
        choice: ``none``, ``auto``, ``required``, or the form of chat completions for some of them.
        parallel: Whether several may be called at once; None where the body does not say.
        fields: What the body calls tools and choice.
    """

    tools: Sequence[dict[str, Any]] | None = None
    choice: Any = None
    parallel: bool | None = None
    fields: tuple[str, str] = ("tools", "tool_choice")


@dataclass(frozen=True)
class ChatTask:
    """A chat to go on with.

    Attributes:
        messages: As chat templates expect them: content as text, arguments as objects.
        constraint: Has SGLang's and vLLM's fields of constraints.
        form: A response format, as above; ``form_field`` is what
            the body calls it.
        variables: Switches of the chat template.
        effort: How much the model thinks; ``effort_field`` is what the body calls it.
        open_answer, continues: See :class:`overlap_spec.chat_template.Rendering`.
        separate: Split thinking from the answer.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    constraint: Constraint
    form: Any = None
    form_field: str = "response_format"
    tools: ToolAsk = ToolAsk()
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: Effort | None = None
    effort_field: str = "reasoning_effort"
    open_answer: bool = True
    continues: bool = False
    separate: bool = True
    priority: int = 0
    cache_salt: str = ""


class ChatFields(GenerationBody):
    """What all bodies of chats have."""

    chat_template_kwargs: Annotated[dict[str, Any], Few] | None = Field(None, description=KWARGS)

    def task_of(
        self, messages: list[dict[str, Any]], sampling: SamplingParams, **more: Any
    ) -> ChatTask:
        """What the body asks for; ``more``: fields of :class:`ChatTask`."""
        return ChatTask(
            messages,
            sampling,
            constraint=self,
            variables=self.chat_template_kwargs or {},
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            **more,
        )
