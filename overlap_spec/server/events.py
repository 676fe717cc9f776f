"""Server-sent events, in parts that each take one short turn of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from overlap_spec.server.errors import ApiError

# How long a client may take to read one event.
EVENT_TIMEOUT_S = 30.0
# What is written at once of a long event.
PART_BYTES = 2**16

DONE = b"data: [DONE]\n\n"


class GrowingList:
    """A JSON list to which items are added, each of which is encoded once."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._last = bytearray(b"[")
        self._empty = True

    def push(self, items: Sequence[Any]) -> None:
        """Add items, as plain data."""
        if not items:
            return
        if not self._empty:
            self._last += b","
        self._last += memoryview(msgspec.json.encode(items))[1:-1]
        self._empty = False
        if len(self._last) >= PART_BYTES:
            self._full.append(bytes(self._last))
            self._last.clear()

    def parts(self) -> list[bytes]:
        """The JSON text so far."""
        return [*self._full, bytes(self._last) + b"]"]


@dataclass(frozen=True)
class InParts:
    """An event's JSON text that is too long to be encoded, or copied, in one turn."""

    parts: Sequence[bytes]


@dataclass(frozen=True)
class Wire:
    """How a route's streams look.

    Attributes:
        failed: Makes the last event of a stream that fails.
        done: What follows the last event.
        named: Whether each event, which is plain data, has a line with its ``type``.
    """

    failed: Callable[[ApiError], Any] = ApiError.body
    done: bytes = DONE
    named: bool = False


def sse(event: Any, named: bool = False) -> Iterator[bytes]:
    """The bytes of one event, of plain data or :class:`InParts`."""
    parts = event.parts if isinstance(event, InParts) else [msgspec.json.encode(event)]
    held = bytearray(f"event: {event['type']}\n".encode() if named else b"")
    held += b"data: "
    for part in parts:
        held += part
        if len(held) >= PART_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held) + b"\n\n"


async def written(event: Any, named: bool = False) -> AsyncIterator[bytes]:
    """The bytes of one event, each in a turn of its own.

    Raises:
        TimeoutError: they were not taken in `EVENT_TIMEOUT_S`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + EVENT_TIMEOUT_S
    for part in sse(event, named):
        if loop.time() > deadline:
            raise TimeoutError
        yield part
        # Neither pieces that have come nor writes to a client that has gone would wait.
        await asyncio.sleep(0)


class Events(StreamingResponse):
    """A response of server-sent events.

    Args:
        lines: Their bytes; TimeoutError ends the response before its end.
        end: Called exactly once at the end, even if the client leaves before the first event, with
            whether all events were sent.
    """

    def __init__(self, lines: AsyncIterator[bytes], end: Callable[[bool], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._end, self._whole = end, False

    async def stream_response(self, send: Send) -> None:
        """See starlette."""

        async def soon(message: Any) -> None:
            async with asyncio.timeout(EVENT_TIMEOUT_S):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().stream_response(soon)
            self._whole = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end(self._whole)
