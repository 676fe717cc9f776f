"""The content blocks of a message, as the model writes them, and the events that tell of them."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]
# Type of a block → type and field of its deltas.
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class BlockWriter:
    """Takes the deltas of a chat's answer; gives the Messages API's events, and the blocks.

    Attributes:
        blocks: Of the message; the last one may be open.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False
        # Of the open block, whose fields are set when it ends.
        self._text = ""

    def push(self, delta: dict[str, Any]) -> list[Event]:
        """The events of a delta in chat completions' form."""
        events: list[Event] = []
        if "reasoning_content" in delta:
            events += self._begin("thinking", {"thinking": "", "signature": ""})
            events += self._add(delta["reasoning_content"])
        if "content" in delta:
            events += self._begin("text", {"text": ""})
            events += self._add(delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self.finish()
                own = {"id": call["id"], "name": call["function"]["name"], "input": {}}
                events += self._begin("tool_use", own)
            if text := call["function"]["arguments"]:
                events += self._add(text)
        return events

    def finish(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._open:
            return []
        block, self._open = self.blocks[-1], False
        if block["type"] == "tool_use":
            block["input"] = _read(self._text)
        else:
            block[block["type"]] = self._text
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, kind: str, own: dict[str, Any]) -> list[Event]:
        """Go on with the open block if it is of this kind, else end it and start one."""
        if self._open and self.blocks[-1]["type"] == kind:
            return []
        events = self.finish()
        self.blocks.append({"type": kind, **own})
        self._open, self._text = True, ""
        shown = {"index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}
        return [*events, {"type": "content_block_start", **shown}]

    def _add(self, text: str) -> list[Event]:
        self._text += text
        kind, field = DELTAS[self.blocks[-1]["type"]]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}]


def _read(text: str) -> dict[str, Any]:
    """The object that a call's arguments are the text of; nothing of one that was cut short."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
