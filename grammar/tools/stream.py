"""Parses streamed replies with tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overlap_spec.grammar.tools.format import ToolFormat
from overlap_spec.grammar.tools.formats import load_format

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.\-]")
_LONGEST_NAME = 64
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the JSON text as the model wrote it; it is partial if `is_whole` is
    False, which happens to the last call of a reply that was cut off."""

    name: str
    arguments: str
    is_whole: bool = True


@dataclass(frozen=True)
class ToolReply:
    """A reply. `content` is the text outside of calls; `parsed` is the value of a reply without
    calls under `Grammar.tools(otherwise=…)`."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    parsed: Any = None


@dataclass(frozen=True)
class ContentDelta:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; `index` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = ContentDelta | CallStart | CallArguments


class CallStream:
    """Splits a streamed reply into content and calls; pieces may have any size.

    Text that may become a call is held back until that is decided, so that no part of a call's
    markers is ever emitted as content. Content, names and arguments do not depend on where the
    pieces are cut. A malformed call, which free generation can produce, is content.
    """

    def __init__(self, format: str | ToolFormat) -> None:
        form = load_format(format) if isinstance(format, str) else format
        self._format = form
        self._heads = tuple({_bare(opening + form.begin) for opening in form.openings})
        self._step: Callable[[str], str] = self._text
        self._held = ""
        self._read = ""
        self._wanted: tuple[str, ...] = ()
        self._name = ""
        self._arguments = _Json()
        self._events: list[Event] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._pieces: list[str] = []

    def push(self, text: str) -> list[Event]:
        """Add text; returns the new events."""
        while text:
            text = self._step(text)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """End the reply; returns the last events. Text held back that is not a call is content."""
        # Text held after the arguments of a call is part of the call.
        if self._step not in (self._end, self._after):
            self._emit(self._held)
        self._held = ""
        events, self._events = self._events, []
        return events

    @property
    def reply(self) -> ToolReply:
        """The reply so far."""
        calls = list(self._calls)
        if calls and self._pieces:
            calls[-1] = replace(calls[-1], arguments="".join(self._pieces))
        return ToolReply("".join(self._content), tuple(calls))

    def _text(self, text: str) -> str:
        """Free text, up to where a call may start."""
        text, self._held = self._held + text, ""
        starts, anywhere = self._format.starts, self._format.anywhere
        found = [at for start in starts if (at := text.find(start)) >= 0]
        if found and (anywhere or min(found) == 0):
            self._emit(text[: min(found)])
            self._expect(self._heads, self._head)
            return text[min(found) :]
        keep = partial_end(text, starts) if anywhere else 0
        if not anywhere and any(start.startswith(text) for start in starts):
            keep = len(text)
        elif not anywhere:
            self._step = self._plain
        self._emit(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return ""

    def _plain(self, text: str) -> str:
        """Text after which no call can come."""
        self._emit(text)
        return ""

    def _head(self, text: str) -> str:
        """The opening of a call, up to its name."""
        rest = self._match(text)
        if self._read in self._wanted:
            self._name, self._step = "", self._named
        return rest

    def _named(self, text: str) -> str:
        if _NAME_CHAR.match(text) and len(self._name) < _LONGEST_NAME:
            self._name += text[0]
            self._held += text[0]
            return text[1:]
        if not self._name:
            return self._no_call(text)
        self._expect((_bare(self._format.middle),), self._between, self._held)
        return text

    def _between(self, text: str) -> str:
        """Between the name and the arguments, which are an object."""
        if self._read not in self._wanted:
            return self._match(text)
        if text[0].isspace():
            return self._space(text)
        if text[0] != "{":
            return self._no_call(text)
        self._events.append(CallStart(len(self._calls), self._name))
        self._calls.append(ToolCall(self._name, "", is_whole=False))
        self._held, self._pieces, self._arguments = "", [], _Json()
        self._step = self._inside
        return text

    def _inside(self, text: str) -> str:
        """The arguments."""
        length = self._arguments.push(text)
        piece = text if length is None else text[:length]
        self._pieces.append(piece)
        self._events.append(CallArguments(len(self._calls) - 1, piece))
        if length is None:
            return ""
        self._calls[-1] = replace(self._calls[-1], arguments="".join(self._pieces), is_whole=True)
        self._pieces = []
        self._expect((_bare(self._format.end),), self._end)
        return text[length:]

    def _end(self, text: str) -> str:
        """The rest of the call."""
        if self._read in self._wanted:
            self._held, self._step = "", self._after
            return text
        return self._match(text)

    def _after(self, text: str) -> str:
        """Between two calls, or after the last one."""
        separator, close = self._format.separator.strip(), self._format.close
        if text[0].isspace():
            return self._space(text)
        parted = bool(separator) and separator in self._held
        if text[0] == separator and not parted:
            self._held += separator
            return text[1:]
        if text[0] == close and not parted:
            self._held, self._step = "", self._text if self._format.anywhere else self._plain
            return text[1:]
        self._expect((_bare(self._format.begin),), self._head, self._held)
        return text

    def _expect(self, wanted: tuple[str, ...], step: Callable[[str], str], held: str = "") -> None:
        self._wanted, self._read, self._held = wanted, "", held
        self._step = step

    def _match(self, text: str) -> str:
        """Consume one expected character, or white space; where it is neither, there is no call."""
        if text[0].isspace():
            return self._space(text)
        self._read += text[0]
        if any(wanted.startswith(self._read) for wanted in self._wanted):
            self._held += text[0]
            return text[1:]
        return self._no_call(text)

    def _space(self, text: str) -> str:
        rest = text.lstrip()
        self._held += text[: len(text) - len(rest)]
        return rest

    def _no_call(self, more: str = "") -> str:
        """The held text is not a call: emit it as content, unless a call starts inside it."""
        text, self._held = self._held + more, ""
        if not self._format.anywhere:
            self._step = self._plain
            return text
        self._step = self._text
        self._emit(text[:1])
        return text[1:]

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._content.append(text)
        last = self._events[-1] if self._events else None
        if isinstance(last, ContentDelta):
            self._events[-1] = ContentDelta(last.text + text)
        else:
            self._events.append(ContentDelta(text))


def parse_reply(text: str, format: str | ToolFormat) -> ToolReply:
    """Parse a whole reply. Anything but a well-formed call is content, unchanged; white space
    between the parts of a call is ignored, whatever the format generates."""
    stream = CallStream(format)
    stream.push(text)
    stream.finish()
    return stream.reply


class _Json:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """Length of the text that belongs to the object; None if the object continues."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            char = found[0]
            if char == '"':
                self._quoted = not self._quoted
            elif char == "\\":
                self._escaped = True
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return at
        return None


def _bare(text: str) -> str:
    return "".join(text.split())


def partial_end(text: str, starts: tuple[str, ...]) -> int:
    """Length of the longest suffix of a text that is a proper prefix of one of the strings."""
    longest = min(len(text), max(map(len, starts)) - 1)
    for length in range(longest, 0, -1):
        if any(start.startswith(text[-length:]) for start in starts):
            return length
    return 0
