"""Splits one choice of a chat, as it is generated, into thinking, content and tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from overlap_spec.grammar.reasoning.reply import ReasoningStream
from overlap_spec.grammar.tools.stream import CallArguments, CallStart, CallStream, ContentDelta
from overlap_spec.types import Delta, FinishReason, Output


@dataclass
class ToolCall:
    """A tool call, complete up to the text so far."""

    name: str
    id: str
    arguments: str = ""


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
    tool_calls: list[ToolCall] = field(default_factory=list)

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
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
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
                    call = ToolCall(name, f"call_{uuid.uuid4().hex[:24]}")
                    self.tool_calls.append(call)
                    function = {"name": name, "arguments": ""}
                    head = {"index": index, "id": call.id, "type": "function"}
                    deltas.append({"tool_calls": [head | {"function": function}]})
                case CallArguments(index, text):
                    self.tool_calls[index].arguments += text
                    more = {"index": index, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [more]})
        return deltas
