"""OpenAI's ``/v1/responses``. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.chat_messages import read_arguments
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.conversation import Conversation, Event, PartWriter
from overlap_spec.server.errors import ApiError
from overlap_spec.server.events import Wire
from overlap_spec.server.logprobs import chat_logprobs, cut_stop, without_stop
from overlap_spec.server.protocol import (
    CACHED,
    MOST_ENTRIES,
    Items,
    Metadata,
    Positive,
    Strict,
    Top,
    Unused,
)
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
from overlap_spec.server.task import (
    ChatFields,
    ChatTask,
    Effort,
    JsonObjectFormat,
    NamedSchema,
    TextFormat,
    ToolAsk,
    schema_format,
)
from overlap_spec.types import FinishReason, Output, SamplingParams, TokenLogprobs

# Engine's finish reason → the response's status; the reason of one that is incomplete.
STATUS = {"length": "incomplete", "abort": "cancelled"}
INCOMPLETE = {"reason": "max_output_tokens"}


LOGPROBS = "message.output_text.logprobs"
# The rest are of tools that no output has.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
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
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description=CACHED)


Content = str | Items[ContentPart]


class MessageItem(Strict):
    """A message, of the caller's or of an earlier output."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionItem(Strict):
    """What a call and its output have."""

    call_id: str
    id: str | None = None
    status: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "namespace": "functions are called by their names alone",
        "caller": "the model itself calls functions",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"caller": {"type": "direct"}}


class CallItem(FunctionItem):
    """A call of an earlier output; ``arguments`` is JSON text."""

    type: Literal["function_call"]
    name: str
    arguments: str


class CallOutputItem(FunctionItem):
    """What a function gave."""

    type: Literal["function_call_output"]
    name: str | None = None
    output: Content


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


class SchemaFormat(NamedSchema):
    """JSON that is valid under a schema; ``strict: false`` leaves out keywords that no backend
    enforces."""

    type: Literal["json_schema"]

    refused: ClassVar[Mapping[str, str]] = {"json_schema": "send its fields beside the type"}


class TextConfig(Strict):
    """What the text is."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None

    refused: ClassVar[Mapping[str, str]] = {"verbosity": "the model has no such switch"}
    neutral: ClassVar[Mapping[str, Any]] = {"verbosity": "medium"}


class ReasoningConfig(Strict):
    """How much the model thinks."""

    effort: Effort | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("summary", "generate_summary"), "the thinking itself is in the output"),
        "context": "the chat template chooses among the thinking in the input",
        "mode": "the model has no such switch",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"context": "auto", "mode": "standard"}


# As chat completions have it.
UNWRAPPED = {"function": "send its fields beside the type"}


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    refused: ClassVar[Mapping[str, str]] = {
        **UNWRAPPED,
        "allowed_callers": "the model itself calls functions",
        "defer_loading": "there is no search for tools: the model reads all of them",
        "output_schema": "say in the description what the function gives",
    }
    neutral: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"], "defer_loading": False}

    def for_chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class NamedTool(Strict):
    """One of the tools."""

    type: Literal["function"]
    name: str

    refused: ClassVar[Mapping[str, str]] = UNWRAPPED

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


class ResponsesBody(ChatFields, Unused):
    """A request for a response."""

    example: ClassVar[Mapping[str, Any]] = {
        "input": "Extract name and age: Anna is 30.",
        "max_output_tokens": 64,
        "text": {"format": {"type": "json_object"}},
    }

    input: str | Annotated[Items[Item], Field(min_length=1, max_length=MOST_ENTRIES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: Items[Include] | None = Field(
        None,
        description="Thinking is never encrypted: it is in the output as it is; no output has "
        "items of OpenAI's own tools.",
    )
    top_logprobs: Top | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(
        None, description="At most 16 short texts, repeated in the response and not used."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "background": "nothing is stored that could be asked for later: wait for the response, or "
        "send stream: true",
        "previous_response_id": NOT_STORED,
        "conversation": NOT_STORED,
        "store": "nothing is ever stored",
        "prompt": "there are no stored prompts: send instructions and input",
        "max_tool_calls": "the caller's own tools alone are called, once a response",
        "context_management": "shorten the input",
        "truncation": "an input that is too long is refused, so shorten it",
        "moderation": "there is no moderation",
        "max_tokens": "send max_output_tokens",
        "messages": "send input",
        "response_format": "send text.format",
        "max_completion_tokens": "send max_output_tokens",
        "reasoning_effort": "send reasoning.effort",
        "logprobs": "send top_logprobs",
        "stop": "send stop_regex",
        "n": "a response has one answer: ask again",
    }
    neutral: ClassVar[Mapping[str, Any]] = {
        "background": False,
        "n": 1,
        "store": False,
        "truncation": "disabled",
    }

    @property
    def with_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def sampling(self) -> SamplingParams:
        """The sampling parameters; InvalidRequest where fields contradict each other."""
        if self.with_logprobs and self.tools:
            raise InvalidRequest(
                "log-probabilities go with a text alone: send no tools",
                "include" if self.top_logprobs is None else "top_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes with stream: true", "stream_options")
        return self.parameters(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.with_logprobs else None,
        )

    def task(self) -> ChatTask:
        """What the body asks for; InvalidRequest where fields contradict each other."""
        # What a response without tools says itself, and clients send again.
        choice: Any = None if self.tool_choice == "auto" else self.tool_choice
        if isinstance(choice, NamedTool | AllowedTools):
            choice = choice.for_chat()
        tools = [tool.for_chat() for tool in self.tools or ()]
        form: Any = self.text.format if self.text else None
        if isinstance(form, SchemaFormat):
            form = schema_format(form.schema_, form.strict)
        return self.task_of(
            self.messages(),
            self.sampling(),
            form=form,
            form_field="text.format",
            tools=ToolAsk(tools or None, choice, self.parallel_tool_calls),
            effort=self.reasoning.effort if self.reasoning else None,
            effort_field="reasoning.effort",
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
                    said.append({"role": item.role, "content": _text(item.content)})
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
                    named = {} if item.name is None else {"name": item.name}
                    said.append({"role": "tool", **result, **named})
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


router = routes()


@router.post("/v1/responses", responses=STREAMS)
async def responses(service: Serving, body: ResponsesBody, http: HttpRequest) -> Response:
    """OpenAI's responses; nothing is stored."""
    model, label = service.check_model(body.model), new_id("resp_")
    if body.with_logprobs and service.settings.reasoning_parser is not None:
        field = "include" if body.top_logprobs is None else "top_logprobs"
        message = "log-probabilities go with a text alone, and this model's has thinking before it"
        raise InvalidRequest(message, field)
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    shown = ResponseFormatter(chat, body, label, model)
    group = RequestGroup([label], [chat.request], chat.field)
    return await service.answer(http, shown, group, stream=body.stream, model=model)


@router.get("/v1/responses/{response_id}")
async def no_response(response_id: str) -> Response:
    """Always 404: nothing is stored."""
    message = f"there is no response {response_id!r}: nothing is stored"
    raise ApiError(404, message, "response_id", code="response_not_found")


class ResponseFormatter(Format):
    """Formats one output as a response."""

    def __init__(
        self, conversation: Conversation, body: ResponsesBody, label: str, model: str
    ) -> None:
        self._conversation, self._with_logprobs = conversation, body.with_logprobs
        self.wire = Wire(self.failed, b"", named=True)
        self._writer = ItemWriter()
        self._thinking = conversation.thinking()
        self._sequence = 0
        self._head = self._fields(body, label, model)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The response as one object."""
        (output,) = outputs
        self._thinking.push(output.token_ids)
        for piece in self._conversation.assembler().take(output):
            self._writer.push(piece)
        status = STATUS.get(output.finish_reason, "completed")
        self._writer.finish(_item_status(output.finish_reason))
        if self._with_logprobs:
            (part,) = self._writer.parts[-1]["content"]
            part["logprobs"] = self._logprobs(*without_stop(output))
        return self._response(status, output)

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Event]:
        """The response in events."""
        (handle,), assembler = handles, self._conversation.assembler()
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._response("in_progress")})
        async for _, delta in interleaved(handles):
            self._thinking.push(delta.token_ids)
            pieces = assembler.take(delta)
            if self._with_logprobs:
                self._writer.logprobs += self._logprobs(*cut_stop(handle.request, delta))
                if self._writer.logprobs and not pieces:
                    pieces = [{"content": ""}]
            for piece in pieces:
                for event in self._writer.push(piece):
                    yield self._numbered(event)
        output = await handle.finish()
        for event in self._writer.finish(_item_status(output.finish_reason)):
            yield self._numbered(event)
        status = STATUS.get(output.finish_reason, "completed")
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._numbered({"type": kind, "response": self._response(status, output)})

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""
        told = error.body()["error"]
        response = self._response("failed")
        response["error"] = {"code": told["code"] or told["type"], "message": told["message"]}
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._sequence += 1
        return event | {"sequence_number": self._sequence - 1}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Any]:
        tokenizer = self._conversation.service.engine.tokenizer
        shown: list[Any] = chat_logprobs(tokenizer, ids, logprobs)["content"]
        return shown

    def _fields(self, body: ResponsesBody, label: str, model: str) -> dict[str, Any]:
        """What a response has from its beginning."""
        sampling = self._conversation.request.sampling
        # With the names of the wire, and without what was left out.
        sent = body.model_dump(by_alias=True, exclude_none=True, include=ECHOED)
        reasoning = {"effort": None, "summary": None} | sent.get("reasoning", {})
        return {
            "id": label,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "background": False,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": sent.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": [TOOL | tool for tool in sent.get("tools", [])],
            "truncation": "disabled",
        }

    def _response(self, status: str, output: Output | None = None) -> dict[str, Any]:
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        return self._head | {
            "status": status,
            "incomplete_details": INCOMPLETE if status == "incomplete" else None,
            "output": list(self._writer.parts) if output is not None else [],
            "usage": None if output is None else self._usage(output),
            **ended,
            **({} if output is None else findings(output) | speculation([output])),
        }

    def _usage(self, output: Output) -> dict[str, Any]:
        stats = output.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thinking.count},
            "total_tokens": stats.prompt_tokens + stats.output_tokens,
        }


# Fields that a response repeats as they were sent.
ECHOED = {"text", "reasoning", "tools", "tool_choice"}
# What a tool has where the body leaves it out.
TOOL = {"description": None, "parameters": None, "strict": None}


def _item_status(reason: FinishReason) -> str:
    return "completed" if reason == "stop" else "incomplete"


class ItemWriter(PartWriter):
    """Writes the Responses API's events and items: thinking, text and each call are items of their
    own, in the order in which they are written.

    Attributes:
        logprobs: Those of the next piece of text.
    """

    def __init__(self) -> None:
        super().__init__("reasoning", "message")
        self.logprobs: list[Any] = []
        self._status = "completed"

    def finish(self, status: str) -> list[Event]:
        """The events of the output's end; ``status`` is that of the item that it ends in."""
        events = [] if self.parts else self._begin("message")
        self._status = status
        return events + self.end()

    def _start(self, kind: str) -> list[Event]:
        if kind == "message":
            events = self._opened(kind, "msg_", {"role": "assistant", "content": []})
        else:
            events = self._opened(kind, "rs_", {"summary": [], "content": []})
        part = {"part": self._part()}
        return [*events, self._event("content_part.added", content_index=0, **part)]

    def _start_call(self, label: str, name: str) -> list[Event]:
        own = {"call_id": label, "name": name, "arguments": ""}
        return self._opened("function_call", "fc_", own)

    def _opened(self, kind: str, prefix: str, own: dict[str, Any]) -> list[Event]:
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **own}
        shown = self._put(item)
        place = len(self.parts) - 1
        return [{"type": "response.output_item.added", "output_index": place, "item": shown}]

    def _added(self, text: str) -> Event:
        match self.parts[-1]["type"]:
            case "function_call":
                return self._event("function_call_arguments.delta", delta=text)
            case "reasoning":
                return self._event("reasoning_text.delta", content_index=0, delta=text)
        told, self.logprobs = self.logprobs, []
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=told)

    def _ended(self) -> list[Event]:
        item, text = self.parts[-1], self._text
        item["status"] = self._status
        if item["type"] == "function_call":
            item["arguments"] = text
            own = {"arguments": text, "name": item["name"]}
            events = [self._event("function_call_arguments.done", **own)]
        else:
            item["content"] = [self._part()]
            is_message = item["type"] == "message"
            kind = "output_text.done" if is_message else "reasoning_text.done"
            # What came with the deltas is not repeated.
            more: dict[str, Any] = {"logprobs": []} if is_message else {}
            part = {"part": self._part()}
            events = [
                self._event(kind, content_index=0, text=text, **more),
                self._event("content_part.done", content_index=0, **part),
            ]
        shown = {"output_index": len(self.parts) - 1, "item": dict(item)}
        return [*events, {"type": "response.output_item.done", **shown}]

    def _part(self) -> dict[str, Any]:
        if self.parts[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **own: Any) -> Event:
        place = {"item_id": self.parts[-1]["id"], "output_index": len(self.parts) - 1}
        return {"type": f"response.{kind}", **place, **own}
