"""A chat on its way to the model and back, whatever the route's wire format."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from overlap_spec.chat_template import Rendering
from overlap_spec.errors import InvalidRequest
from overlap_spec.grammar.reasoning.reply import (
    ReasoningFormat,
    ReasoningStream,
    load_reasoning,
    opened_by,
)
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tools.stream import CallArguments, CallStart, CallStream, ContentDelta
from overlap_spec.server.service import Service
from overlap_spec.server.task import ChatTask, Effort
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, FinishReason, Output, Request

Event = dict[str, Any]
# The answer behind a thinking that is limited or drafted loosely, where nothing else is asked of
# it.
ANY_TEXT = Grammar.regex(r"[\s\S]*")
# Switches of chat templates: how much to think, and whether to.
EFFORT, THINKING = "reasoning_effort", "enable_thinking"


@dataclass(frozen=True)
class Conversation:
    """A chat whose request is ready.

    Attributes:
        request: Checked and tokenised, with its grammar.
        field: The body's field that the grammar comes from.
        opened: True if the prompt ends inside the model's thinking, False if it has closed the
            thinking; None if it does neither or the model does not think.
        separate: Whether thinking is split from the answer.
        with_calls: Whether the answer may have calls.
    """

    service: Service
    request: Request
    field: str | None
    opened: bool | None
    separate: bool
    with_calls: bool

    @classmethod
    async def prepare(cls, service: Service, read: Callable[[], ChatTask]) -> Conversation:
        """Check and tokenise a chat.

        Args:
            read: Reads it from a body, in a turn of the loop that is not the body's own.

        Raises:
            InvalidRequest: an invalid field; names it.
        """
        task = read()
        service.engine.input_processor.check_length(task.messages)
        # Reading many messages took this turn.
        await asyncio.sleep(0)
        rendering = rendering_of(service, task)
        constraint = await service.constraints.of(task.constraint, task.form, task.form_field)
        constraint = await service.constraints.tools(task.tools, constraint)
        request = await service.engine.prepare(
            task.messages,
            constraint.grammar,
            task.sampling,
            tools=task.tools.tools,
            priority=task.priority,
            rendering=rendering,
            cache_salt=task.cache_salt,
        )
        form, opened = _reasoning(service), None
        if form is not None:
            opened = opened_by(form, service.engine.tokenizer.ending(request.prompt_ids))
            relaxed = service.engine.config.relaxed_topk > 0
            request = _after_thinking(request, form, opened, relaxed)
        ask, parser = task.tools, service.settings.tool_call_parser
        with_calls = bool(ask.tools) and ask.choice != "none" and parser is not None
        # The task is not kept: a stream may go on for minutes, and does not need its body.
        return cls(service, request, constraint.field, opened, task.separate, with_calls)

    def assembler(self) -> ChatAssembler:
        """Splits one output into thinking, content and calls."""
        form = _reasoning(self.service) if self.separate else None
        parser = self.service.settings.tool_call_parser
        return ChatAssembler(
            ReasoningStream(form, self.opened) if form is not None else None,
            CallStream(parser) if self.with_calls and parser is not None else None,
        )

    def thinking(self) -> ThinkingTokens:
        """Counts the tokens of one output's thinking."""
        return ThinkingTokens(self.service.engine.tokenizer, _reasoning(self.service), self.opened)


class ThinkingTokens:
    """Counts an output's tokens before the answer, its marks included, where the model thinks.

    Attributes:
        count: Of the tokens so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, form: ReasoningFormat | None, opened: bool | None
    ) -> None:
        self._stream = None if form is None else ReasoningStream(form, opened)
        self._decoder = tokenizer.detokenizer()
        self._before, self._thinks = 0, False

    @property
    def count(self) -> int:
        return self._before if self._thinks else 0

    def push(self, ids: Sequence[int]) -> None:
        """Add the next tokens."""
        for token in ids:
            if self._stream is None:
                return
            thought, answer = self._stream.push(self._decoder.push((token,)))
            self._thinks = self._thinks or bool(thought)
            if answer:
                self._stream = None
            else:
                self._before += 1


def rendering_of(service: Service, task: ChatTask) -> Rendering:
    """How a chat is rendered.

    Raises:
        InvalidRequest: the template has no switch for what is asked, or it goes with other fields.
    """
    thinks = _reasoning(service) is not None
    if not task.separate and thinks and task.tools.tools:
        raise InvalidRequest(
            "separate_reasoning: false goes without tools, whose calls could not be told from "
            "thoughts about them",
            "separate_reasoning",
        )
    variables: dict[str, Any] = dict(task.variables)
    if task.effort is not None:
        found = _effort(task.effort, service)
        if not found and (thinks or task.effort != "none"):
            raise InvalidRequest(
                f"{task.effort_field} is not supported: the model's chat template has no switch "
                f"{EFFORT} or {THINKING}",
                task.effort_field,
            )
        variables = found | variables
    return Rendering(task.open_answer, task.continues, variables)


def _effort(effort: Effort, service: Service) -> dict[str, Any]:
    switches, found = service.engine.tokenizer.switches, dict[str, Any]()
    if THINKING in switches:
        found[THINKING] = effort != "none"
    if EFFORT in switches and found.get(THINKING) is not False:
        found[EFFORT] = effort
    return found


def _reasoning(service: Service) -> ReasoningFormat | None:
    parser = service.settings.reasoning_parser
    return None if parser is None else load_reasoning(parser)


def _after_thinking(
    request: Request, form: ReasoningFormat, opened: bool | None, relaxed: bool
) -> Request:
    """A request whose grammar and budget know of the thinking before the answer; ``relaxed``:
    drafts are accepted in the relaxed way there, so that its end must be known."""
    grammar, asked = request.grammar, request.sampling
    if opened is False:
        # No thinking is left to limit.
        return replace(request, sampling=replace(asked, thinking_budget=None))
    if grammar is None and (relaxed or asked.thinking_budget is not None):
        grammar = ANY_TEXT
    if grammar is not None:
        begins_inside = opened or form.opens_inside
        grammar = grammar.after_thinking(form.end, None if begins_inside else form.begin)
    return replace(request, grammar=grammar)


@dataclass
class ChatAssembler:
    """Takes the text of one choice in pieces; gives OpenAI's deltas, and the message at the end.

    Args:
        reasoning: Splits thinking from the answer; None if the model does not think.
        calls: Finds tool calls; None if there are no tools.
    """

    reasoning: ReasoningStream | None = None
    calls: CallStream | None = None
    thinking: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, piece: Delta | Output) -> list[dict[str, Any]]:
        """The deltas that a piece completes; of the last one, with what was held back."""
        return self.push(piece.text) + ([] if piece.finish_reason is None else self.finish())

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that a piece of text completes."""
        if self.reasoning is None:
            return self._push_answer(text)
        thinking, answer = self.reasoning.push(text)
        return self._push_thinking(thinking) + self._push_answer(answer)

    def finish(self) -> list[dict[str, Any]]:
        """The deltas that were held back until the text's end."""
        deltas = []
        if self.reasoning is not None:
            thinking, answer = self.reasoning.finish()
            deltas += self._push_thinking(thinking) + self._push_answer(answer)
        if self.calls is not None:
            deltas += self._push_events(self.calls.finish())
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's finish reason: ``tool_calls`` if the choice ended with complete calls."""
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """The message so far, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.thinking or None
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": self.tool_calls}
        return message

    def _push_thinking(self, text: str) -> list[dict[str, Any]]:
        self.thinking += text
        return [{"reasoning_content": text}] if text else []

    def _push_answer(self, text: str) -> list[dict[str, Any]]:
        if self.calls is not None:
            return self._push_events(self.calls.push(text))
        self.content += text
        return [{"content": text}] if text else []

    def _push_events(self, events: list[Any]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                    deltas.append({"content": text})
                case CallStart(index, name):
                    function = {"name": name, "arguments": ""}
                    own = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                    self.tool_calls.append(own | {"function": dict(function)})
                    deltas.append({"tool_calls": [{"index": index, **own, "function": function}]})
                case CallArguments(index, text):
                    self.tool_calls[index]["function"]["arguments"] += text
                    more = {"index": index, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [more]})
        return deltas


class PartWriter(ABC):
    """Takes the deltas of a chat's answer; gives a wire's events, and the parts of its reply.

    Args:
        thinking, text: The types of such parts.

    Attributes:
        parts: Of the reply; the last one may be open.
    """

    def __init__(self, thinking: str, text: str) -> None:
        self.parts: list[dict[str, Any]] = []
        self._kinds = {"reasoning_content": thinking, "content": text}
        self._open = False
        # Of the open part, whose fields are set when it ends.
        self._text = ""

    def push(self, delta: dict[str, Any]) -> list[Event]:
        """The events of a delta in chat completions' form."""
        events: list[Event] = []
        for name, kind in self._kinds.items():
            if name in delta:
                events += self._begin(kind) + self._add(delta[name])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self.end() + self._start_call(call["id"], call["function"]["name"])
            if text := call["function"]["arguments"]:
                events += self._add(text)
        return events

    def end(self) -> list[Event]:
        """End the open part, if there is one."""
        ended, self._open = self._open, False
        return self._ended() if ended else []

    def _begin(self, kind: str) -> list[Event]:
        """Go on with the open part if it is of this kind, else end it and start one."""
        goes_on = self._open and self.parts[-1]["type"] == kind
        return [] if goes_on else self.end() + self._start(kind)

    def _put(self, part: dict[str, Any]) -> dict[str, Any]:
        """Open a part; what an event shows of it."""
        self.parts.append(part)
        self._open, self._text = True, ""
        return dict(part)

    def _add(self, text: str) -> list[Event]:
        self._text += text
        return [self._added(text)]

    @abstractmethod
    def _start(self, kind: str) -> list[Event]: ...
    @abstractmethod
    def _start_call(self, label: str, name: str) -> list[Event]: ...
    @abstractmethod
    def _added(self, text: str) -> Event: ...
    @abstractmethod
    def _ended(self) -> list[Event]: ...
