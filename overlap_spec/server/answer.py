"""One choice of a chat as it comes: thinking, content and tool calls out of one text."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from overlap_spec.grammar.reasoning import ReasoningStream
from overlap_spec.grammar.tool_stream import CallArguments, CallStart, CallStream, ContentDelta
from overlap_spec.types import FinishReason


@dataclass
class Call:
    """A tool call as far as it has come."""

    name: str
    id: str
    arguments: str = ""


@dataclass
class Answer:
    """Takes a reply's text in pieces; gives OpenAI's deltas, and keeps the whole message.

    Args:
        reasoning: Splits thinking from answer; None where the model does not think.
        calls: Finds tool calls; None where there are no tools.
    """

    reasoning: ReasoningStream | None = None
    calls: CallStream | None = None
    thinking: str = ""
    content: str = ""
    made: list[Call] = field(default_factory=list)

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas that a piece of text makes known."""
        if self.reasoning is None:
            return self._answer(text)
        thinking, answer = self.reasoning.push(text)
        return self._think(thinking) + self._answer(answer)

    def finish(self) -> list[dict[str, Any]]:
        """Deltas that the end of the reply makes known."""
        deltas = []
        if self.reasoning is not None:
            thinking, answer = self.reasoning.finish()
            deltas += self._think(thinking) + self._answer(answer)
        if self.calls is not None:
            deltas += self._events(self.calls.finish())
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's reason: calls that are whole are one of their own."""
        return "tool_calls" if self.made and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.thinking or None
        if self.made:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.made
            ]
        return message

    def _think(self, text: str) -> list[dict[str, Any]]:
        self.thinking += text
        return [{"reasoning_content": text}] if text else []

    def _answer(self, text: str) -> list[dict[str, Any]]:
        if self.calls is not None:
            return self._events(self.calls.push(text))
        self.content += text
        return [{"content": text}] if text else []

    def _events(self, events: list[Any]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                    deltas.append({"content": text})
                case CallStart(index, name):
                    call = Call(name, f"call_{uuid.uuid4().hex[:24]}")
                    self.made.append(call)
                    function = {"name": name, "arguments": ""}
                    head = {"index": index, "id": call.id, "type": "function"}
                    deltas.append({"tool_calls": [head | {"function": function}]})
                case CallArguments(index, text):
                    self.made[index].arguments += text
                    more = {"index": index, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [more]})
        return deltas
