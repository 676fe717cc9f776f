"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from overlap_spec.async_engine import AsyncRequestHandle
from overlap_spec.errors import InvalidRequest
from overlap_spec.server.conversation import ChatAssembler, Conversation
from overlap_spec.server.logprobs import chat_logprobs, cut_stop, prompt_logprobs, without_stop
from overlap_spec.server.origins import TokenOrigins
from overlap_spec.server.protocol import (
    CACHED,
    MOST_ENTRIES,
    Items,
    OpenAIBody,
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
    fan_out,
    findings,
    interleaved,
    new_id,
    routes,
    stop_reason,
    usages,
)
from overlap_spec.server.task import ChatFields, ChatTask, Effort, ResponseFormat, ToolAsk
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import FinishReason, Output, SamplingParams, TokenLogprobs


class TextPart(Strict):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description=CACHED)


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


class TextMessage(Strict):
    """The system's instructions, or the user's message."""

    role: Literal["system", "developer", "user"]
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
    TextMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class FunctionName(Strict):
    """The one function to call."""

    name: str


class ChatBody(OpenAIBody, ChatFields, Unused):
    """A request for chat completions."""

    example: ClassVar[Mapping[str, Any]] = {
        "messages": [{"role": "user", "content": "Is the flight delayed? It is on time."}],
        "structured_outputs": {"choice": ["yes", "no"]},
    }

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_ENTRIES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Items[dict[str, Any]], Field(max_length=1024)] | None = Field(
        None, deprecated=True, description="Deprecated: send tools."
    )
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        None, deprecated=True, description="Deprecated: send tool_choice."
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
        "modalities": "the answer is a text",
        "moderation": "there is no moderation",
        "prediction": "the draft head predicts",
        "store": "nothing is ever stored",
        "verbosity": "the model has no such switch",
        "web_search_options": "there is no search",
        "echo": "it is for /v1/completions",
        **dict.fromkeys(("prompt", "input"), "send messages"),
        "max_output_tokens": "send max_completion_tokens",
        "reasoning": "send reasoning_effort",
        "text": "send response_format",
    }
    neutral: ClassVar[Mapping[str, Any]] = {
        **OpenAIBody.neutral,
        "echo": False,
        "modalities": ["text"],
        "store": False,
        "verbosity": "medium",
    }

    def sampling(self) -> SamplingParams:
        """The sampling parameters; InvalidRequest where fields contradict each other."""
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_completion_tokens and max_tokens differ: send one of them",
                "max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs goes with logprobs: true", "top_logprobs")
        return self.parameters(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def tool_ask(self) -> ToolAsk:
        """The tools, or the older ``functions``; InvalidRequest where both are sent."""
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
        """What the body asks for; InvalidRequest where fields contradict each other."""
        return self.task_of(
            [_plain(message) for message in self.messages],
            self.sampling(),
            form=self.response_format,
            tools=self.tool_ask(),
            effort=self.reasoning_effort,
            open_answer=self.add_generation_prompt is not False,
            continues=self.continues,
            separate=self.separate_reasoning is not False,
        )


def _plain(message: Any) -> dict[str, Any]:
    """As the engine takes it, its parts as one text."""
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    return plain


router = routes()


@router.post("/v1/chat/completions", responses=STREAMS)
async def chat_completions(service: Serving, body: ChatBody, http: HttpRequest) -> Response:
    """OpenAI's chat completions."""
    model, count = service.check_model(body.model), body.n or 1
    label = body.own_id("chatcmpl-") or new_id("chatcmpl-")
    service.check_choices(count)
    chat = await service.run_until_disconnect(http, Conversation.prepare(service, body.task))
    requests = fan_out([chat.request], count)
    group = RequestGroup([label] * count, requests, chat.field, body.id_field)
    shown = ChatFormatter(chat, body, label, model)
    return await service.answer(http, shown, group, stream=body.stream, model=model)


@dataclass
class ChatFormatter(Format):
    """Formats the outputs of one chat as chat completions."""

    conversation: Conversation
    body: ChatBody
    id: str
    model: str

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The reply as one object."""
        choices, request = [], self.conversation.request
        for index, output in enumerate(outputs):
            assembler = self.conversation.assembler()
            assembler.take(output)
            reason = self._reason(assembler, output.finish_reason)
            ids, logprobs = without_stop(output)
            message = self._named(assembler.message())
            choice = self._choice(index, {"message": message}, ids, logprobs, reason)
            ended = {"stop_reason": stop_reason(output, self.tokenizer.eos_ids), **findings(output)}
            choices.append(choice | ended | self.body.told_ids(output.token_ids))
        head = self._head("chat.completion") | self.body.told_prompt(request)
        if (top := self.body.prompt_logprobs) is not None:
            told = outputs[0].prompt_logprobs
            shown = prompt_logprobs(self.tokenizer, request.prompt_ids, told, top)
            head |= {"prompt_logprobs": shown}
        return head | {"choices": choices} | usages(outputs, [request])

    async def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
        """The reply in chunks: for each choice its role, its deltas, and its finish reason."""
        head, tokens = self._head("chat.completion.chunk"), [0] * len(handles)
        assemblers = [self.conversation.assembler() for _ in handles]
        decoders = [TokenOrigins(self.tokenizer) for _ in handles]
        for index, handle in enumerate(handles):
            first = {"role": "assistant", "content": ""}
            choice = self._choice(index, {"delta": first})
            shown = self.body.told_prompt(handle.request) if index == 0 else {}
            yield head | self.body.usage_so_far(handle.request, 0) | {"choices": [choice]} | shown
        async for index, delta in interleaved(handles):
            assembler = assemblers[index]
            tokens[index] += len(delta.token_ids)
            now = head | self.body.usage_so_far(handles[index].request, tokens[index])
            pieces = assembler.take(delta)
            ids, logprobs = cut_stop(handles[index].request, delta)
            extra, own = decoders[index].chunk_fields(delta), self.body.told_ids(delta.token_ids)
            if not pieces and (logprobs or extra or (own and delta.token_ids)):
                pieces = [{"content": ""}]
            for number, piece in enumerate(pieces):
                # Of the deltas of one run of tokens, the first carries what there is a token.
                mine = (ids, logprobs) if number == 0 else ((), ())
                choice = self._choice(index, {"delta": self._named(piece)}, *mine)
                choice |= own if number == 0 else {}
                yield now | {"choices": [choice]} | (extra if number == 0 else {})
            if delta.finish_reason is not None and delta.finish_reason != "error":
                reason = self._reason(assembler, delta.finish_reason)
                choice = self._choice(index, {"delta": {}}, reason=reason) | findings(delta)
                yield now | {"choices": [choice]}
        if self.body.include_usage:
            outputs = [handle.output for handle in handles if handle.output is not None]
            yield head | {"choices": []} | usages(outputs, [handles[0].request])

    def _head(self, kind: str) -> dict[str, Any]:
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self.model}

    def _choice(
        self,
        index: int,
        inside: dict[str, Any],
        ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        shown = None
        if self.body.logprobs and (logprobs or "message" in inside):
            shown = chat_logprobs(self.tokenizer, ids, logprobs)
        return {"index": index, **inside, "logprobs": shown, "finish_reason": reason}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.conversation.service.engine.tokenizer

    def _named(self, delta: dict[str, Any]) -> dict[str, Any]:
        return delta if self.body.functions is None else _legacy(delta)

    def _reason(self, assembler: ChatAssembler, reason: FinishReason) -> str:
        ended = assembler.finish_reason(reason)
        legacy = ended == "tool_calls" and self.body.functions is not None
        return "function_call" if legacy else ended


def _legacy(delta: dict[str, Any]) -> dict[str, Any]:
    """A delta or message whose call is named as where ``functions`` were sent, of which one is
    called at most."""
    calls = delta.pop("tool_calls", None)
    if calls:
        delta["function_call"] = calls[0]["function"]
    return delta
