"""The output items of a response, as the model writes them, and the events that tell of them."""

from __future__ import annotations

from typing import Any

from overlap_spec.server.service import new_id

Event = dict[str, Any]


class ItemWriter:
    """Takes the deltas of a chat's answer; gives the Responses API's events, and the items.

    Thinking, text and each call are items of their own, in the order in which they are written.

    Attributes:
        items: Of the output; the last one may be open.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        # Of the open item, whose fields are set when it ends.
        self._text = ""

    def push(self, delta: dict[str, Any], logprobs: list[Any]) -> list[Event]:
        """The events of a delta in chat completions' form; ``logprobs`` are those of its text."""
        events: list[Event] = []
        if "reasoning_content" in delta:
            events += self._begin("reasoning")
            events += self._add("response.reasoning_text.delta", delta["reasoning_content"])
        if "content" in delta:
            events += self._begin("message")
            more = {"logprobs": logprobs}
            events += self._add("response.output_text.delta", delta["content"], **more)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._end()
                own = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                events += self._start("function_call", "fc_", own)
            if text := call["function"]["arguments"]:
                events += self._add("response.function_call_arguments.delta", text)
        return events

    def finish(self, status: str) -> list[Event]:
        """The events of the output's end; ``status`` is that of the item that it ends in."""
        events = [] if self.items else self._begin("message")
        return events + self._end(status)

    def _begin(self, kind: str) -> list[Event]:
        """Go on with the open item if it is of this kind, else end it and start one."""
        if self._open and self.items[-1]["type"] == kind:
            return []
        events = self._end()
        if kind == "message":
            events += self._start(kind, "msg_", {"role": "assistant", "content": []})
        else:
            events += self._start(kind, "rs_", {"summary": [], "content": []})
        part = {"part": self._part()}
        return [*events, self._event("response.content_part.added", content_index=0, **part)]

    def _start(self, kind: str, prefix: str, own: dict[str, Any]) -> list[Event]:
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **own}
        self.items.append(item)
        self._open, self._text = True, ""
        shown = {"output_index": len(self.items) - 1, "item": dict(item)}
        return [{"type": "response.output_item.added", **shown}]

    def _add(self, kind: str, text: str, **more: Any) -> list[Event]:
        self._text += text
        index = {} if self.items[-1]["type"] == "function_call" else {"content_index": 0}
        return [self._event(kind, **index, delta=text, **more)]

    def _end(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        item, text, self._open = self.items[-1], self._text, False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            kind, own = "response.function_call_arguments.done", {"name": item["name"]}
            events = [self._event(kind, arguments=text, **own)]
        else:
            item["content"] = [self._part()]
            is_message = item["type"] == "message"
            kind = "response.output_text.done" if is_message else "response.reasoning_text.done"
            # What came with the deltas is not repeated.
            more: dict[str, Any] = {"logprobs": []} if is_message else {}
            part = {"part": self._part()}
            events = [
                self._event(kind, content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, **part),
            ]
        shown = {"output_index": len(self.items) - 1, "item": dict(item)}
        return [*events, {"type": "response.output_item.done", **shown}]

    def _part(self) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **own: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": index, **own}
