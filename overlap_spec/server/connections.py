"""What a connection may cost the server before and after its requests: time, number, pieces."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from overlap_spec.server.errors import RETRY_AFTER_S, ApiError
from overlap_spec.server.settings import ServerSettings

log = logging.getLogger("overlap_spec")

# The whole head of a request.
LONGEST_HEAD_BYTES = 2**14
# What is read and parsed of one connection in a turn of the loop.
READ_BYTES = 2**13
# Each chunk of a body takes microseconds, be it of one byte: beside its content, a body may have so
# many bytes, and this share of the content.
MOST_FRAMING_BYTES, MOST_FRAMING_SHARE = 2**15, 1 / 8
# Given to a client to send the rest of a body whose answer it has, and to read on.
LINGER_S = 2.0
# Descriptors besides those of connections: files, workers, the engine.
OTHER_DESCRIPTORS = 512


class Connection(H11Protocol):
    """One client's connection; closes it where the client is late, or to make room.

    Args:
        settings: Have the limits.
        refused: Called for each connection that is closed for want of room.
    """

    def __init__(self, settings: ServerSettings, refused: Callable[[], None], **more: Any) -> None:
        super().__init__(**more)
        self._settings, self._refused = settings, refused
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._framing = 0.0
        self._idle_since_s = self.loop.time()
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        if len(self.connections) > self._settings.max_connections and not self._make_room():
            self._refused()
            text = f"{self._settings.max_connections} connections are open (max_connections)"
            error = ApiError(503, text, code="too_many_connections", kind="service_unavailable")
            self._answer(error)
            return
        self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        for timer in (self._head_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        # Of a plain connection it is one piece; TLS gives more at once.
        for start in range(0, len(data), READ_BYTES):
            if start and self.transport.is_closing():
                return
            self._received(data[start : start + READ_BYTES])

    def _received(self, data: bytes) -> None:
        cycle, before = self.cycle, self._content_bytes()
        super().data_received(data)
        if cycle is not None and self.cycle is cycle and not cycle.response_complete:
            content = self._content_bytes() - before
            self._framing += len(data) - content * (1 + MOST_FRAMING_SHARE)
            if self._framing > MOST_FRAMING_BYTES:
                self._refuse_chunks()
        else:
            self._framing = 0.0
        if self.conn.their_state is not h11.SEND_BODY:
            self._go_on()
        self._watch_head()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._idle_since_s = self.loop.time()
        # The rest of such a body is of no use, and may be endless.
        has_rest = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if has_rest or self.transport.is_closing():
            self._end_soon()
        self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn."""
        super().timeout_keep_alive_handler()
        self._end_soon()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way: none has come, or the last one is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _content_bytes(self) -> int:
        return 0 if self.cycle is None else len(self.cycle.body)

    def _watch_head(self) -> None:
        """Give a request's head that has begun to come until the deadline."""
        waits = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not waits and self._head_timer is not None and self.cycle is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif waits and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._late)

    def _late(self) -> None:
        if not self.transport.is_closing():
            seconds = self._settings.header_timeout_s
            text = f"the request's head did not come in {seconds:g} s (header_timeout_s)"
            self._answer(ApiError(408, text))

    def _refuse_chunks(self) -> None:
        assert self.cycle is not None
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self._answer(ApiError(400, "the body comes in too small chunks"))

    def _answer(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = msgspec.json.encode(error.body())
            again = f"Retry-After: {RETRY_AFTER_S}\r\n" if error.status == 503 else ""
            head = (
                f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\n{again}"
                f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self.transport.close()
        self._end_soon()

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; whether there is one."""
        idle = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self and other.is_idle
        ]
        if not idle:
            return False
        # Rather one that has never asked than one whose next request may be on its way.
        oldest = min(idle, key=lambda other: (other.cycle is not None, other._idle_since_s))
        self._refused()
        oldest.transport.abort()
        self.connections.discard(oldest)
        return True

    def _end_soon(self) -> None:
        """Close for good once the client sends or reads nothing more that is of use."""
        if self._end_timer is None:
            self._unread_bytes = self.transport.get_write_buffer_size()
            self._end_timer = self.loop.call_later(LINGER_S, self._end)

    def _end(self) -> None:
        self._end_timer = None
        if 0 < self.transport.get_write_buffer_size() < self._unread_bytes:
            self._end_soon()
        else:
            self.transport.abort()

    def _go_on(self) -> None:
        """The rest of the body has come: the connection may have another request."""
        if self._end_timer is not None and not self.transport.is_closing():
            self._end_timer.cancel()
            self._end_timer = None


def raise_descriptor_limit(settings: ServerSettings) -> None:
    """Allow this process as many descriptors as its connections need, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < settings.max_connections + OTHER_DESCRIPTORS:
        log.warning(
            "the system allows %d open files: fewer than max_connections needs (ulimit -n)", wanted
        )
