"""What a connection may cost the server before and after its requests: time, number, pieces.

And HTTP/1.1 as strict as its standard. h11 takes a bare line feed for the end of a line, joins
folded lines, and prefers one of two lengths: a proxy that reads these otherwise would see other
requests than this server (request smuggling).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import ssl
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from overlap_spec.server.errors import RETRY_AFTER_S, ApiError
from overlap_spec.server.keys import network_of
from overlap_spec.server.middleware import ProbesOnly
from overlap_spec.server.settings import ServerSettings
from overlap_spec.shares import Shares

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
# Connections beyond the limit, which are there for probes: one more closes the oldest.
SPARE = 16
# Descriptors besides those of connections: files, workers, the engine; and the least of them.
OTHER_DESCRIPTORS, LEAST_DESCRIPTORS = 512, 40
END = b"\r\n\r\n"
# A line feed or carriage return alone, or a line that goes on with the one before it.
ODD = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\n[ \t]")
CHUNK_HEAD = re.compile(rb"[0-9A-Fa-f]{1,16}(;[^\r\n]*)?\r\n")
LENGTHS = (b"content-length", b"transfer-encoding")


class Rooms:
    """The connections of a server: how many each address has, and those that are there for probes.

    Args:
        most: Connections that may be open; for fewer addresses than others, see
            :class:`overlap_spec.shares.Shares`.
        refused: Called for each connection that is closed for want of room.
    """

    def __init__(self, most: int, refused: Callable[[], None]) -> None:
        self.shares, self.refused = Shares(most), refused
        # Those that are let in, and those that are there for probes alone.
        self.inside: set[Connection] = set()
        self.spare: dict[Connection, None] = {}
        text = f"{most} connections are open (max_connections)"
        # To who asks a spare connection for anything else than a probe.
        self.full = ApiError(503, text, code="too_many_connections", kind="service_unavailable")

    def enter(self, connection: Connection) -> bool:
        """Let a connection in; False: as a spare one, for a probe."""
        address = connection.address
        if self.shares.has_room(address) or self._make_room(connection):
            self.shares.add(address)
            self.inside.add(connection)
            return True
        self.spare[connection] = None
        if len(self.spare) > SPARE:
            next(iter(self.spare)).refuse()
        return False

    def leave(self, connection: Connection) -> None:
        """A connection has ended; one that has left already is none of these."""
        self.spare.pop(connection, None)
        if connection in self.inside:
            self.inside.remove(connection)
            self.shares.add(connection.address, -1)

    def _make_room(self, newcomer: Connection) -> bool:
        """Close an idle connection of who has most, and no fewer than the newcomer's address;
        whether there is one."""
        held = self.shares.held
        least = held[newcomer.address]
        idle = [each for each in self.inside if each.is_idle and held[each.address] >= least]
        if not idle:
            return False
        # Rather one that has never asked than one whose next request may be on its way.
        oldest = min(
            idle,
            key=lambda other: (-held[other.address], other.cycle is not None, other.idle_since_s),
        )
        self.refused()
        self.leave(oldest)
        oldest.connections.discard(oldest)
        oldest.transport.abort()
        return True


class Connection(H11Protocol):
    """One client's connection; closes it where the client is late, or to make room.

    Args:
        settings: Have the limits.
        rooms: Lets it in.
        tls: Speaks TLS, if there is one. The handshake is part of the connection's time, and the
            connection is counted from its first moment.
    """

    def __init__(
        self, settings: ServerSettings, rooms: Rooms, tls: ssl.SSLContext | None, **more: Any
    ) -> None:
        super().__init__(**more)
        self.conn = h11.Connection(h11.SERVER, LONGEST_HEAD_BYTES)
        self.conn._receive_buffer = StrictBuffer()
        self._settings, self._rooms, self._tls = settings, rooms, tls
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None
        # What a client says right behind its handshake.
        self._early = b""
        self._framing = 0.0
        self._has_answered = False
        self.address = ""
        self.idle_since_s = self.loop.time()
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        self.address = network_of(self.client[0] if self.client else "")
        self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._late)
        if not self._rooms.enter(self):
            self.app = ProbesOnly(self.app, self._rooms.full, self._rooms.refused)
        if self._tls is not None and not transport.is_closing():
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._secure(transport, self._tls))

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        limit = self._settings.header_timeout_s
        secured = None
        if transport.is_closing():
            return
        with contextlib.suppress(OSError):
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=limit
            )
        self._handshake = None
        if secured is None:
            transport.abort()
            self.connection_lost(None)
            return
        self.transport, self.flow = secured, FlowControl(secured)
        self.scheme = "https"
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._rooms.leave(self)
        super().connection_lost(exc)

    def refuse(self) -> None:
        """Answer that there is no room, and close."""
        self._rooms.refused()
        self._rooms.leave(self)
        if self._handshake is not None:
            self.transport.abort()
        else:
            self._answer(self._rooms.full, lingers=False)

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            self._early += data
            return
        # Of a plain connection it is one piece; TLS gives more at once.
        for start in range(0, len(data), READ_BYTES):
            if self._has_answered or (start and self.transport.is_closing()):
                return
            self._received(data[start : start + READ_BYTES])

    def _received(self, data: bytes) -> None:
        cycle = self.cycle
        before = 0 if cycle is None else len(cycle.body)
        has_body = self.conn.their_state is h11.SEND_BODY
        super().data_received(data)
        # What comes behind a body waits for its turn.
        if has_body and self.cycle is cycle and not cycle.response_complete:
            content = len(cycle.body) - before
            self._framing += len(data) - content * (1 + MOST_FRAMING_SHARE)
            if self._framing > MOST_FRAMING_BYTES:
                cycle.disconnected = True
                cycle.message_event.set()
                self._answer(ApiError(400, "the body comes in too small chunks"))
        else:
            self._framing = 0.0
        is_whole = self.conn.their_state is not h11.SEND_BODY
        if is_whole and self._end_timer is not None and not self.transport.is_closing():
            # The connection may have another request.
            self._end_timer.cancel()
            self._end_timer = None
        self._watch_head()

    def on_response_complete(self) -> None:
        self.idle_since_s = self.loop.time()
        # The rest of such a body is of no use, and may be endless.
        has_rest = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if has_rest or self.transport.is_closing():
            self._end_soon()
        self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way: none has come, or the last one is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch_head(self) -> None:
        """Give a request's head that has begun to come until the deadline."""
        waits = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not waits and self._head_timer is not None and self.cycle is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif waits and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._late)

    def _late(self) -> None:
        if self._handshake is not None:
            self.transport.abort()
        elif self in self._rooms.spare:
            self.refuse()
        elif not self.transport.is_closing():
            seconds = self._settings.header_timeout_s
            text = f"the request's head did not come in {seconds:g} s (header_timeout_s)"
            self._answer(ApiError(408, text))

    def send_400_response(self, msg: str) -> None:
        self._answer(ApiError(400, f"{msg} It is no HTTP/1.1, or can be misread."))

    def _answer(self, error: ApiError, lingers: bool = True) -> None:
        """Answer without the application, and close.

        Args:
            lingers: Read on for a while and drop what comes: were it left unread, the system might
                drop the answer.
        """
        if self._has_answered:
            return
        self._has_answered = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = msgspec.json.encode(error.body())
            again = f"Retry-After: {RETRY_AFTER_S}\r\n" if error.status == 503 else ""
            head = (
                f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\n{again}"
                f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        if lingers and self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()
        self._end_soon()

    def _end_soon(self, again: bool = False) -> None:
        """Close for good once the client sends or reads nothing more that is of use."""
        if not again and self._end_timer is not None:
            return
        self._end_timer, left = None, self.transport.get_write_buffer_size()
        if again and not 0 < left < self._unread_bytes:
            self.transport.abort()
        else:
            self._unread_bytes = left
            self._end_timer = self.loop.call_later(LINGER_S, self._end_soon, True)


class StrictBuffer(ReceiveBuffer):
    """What has been received and not read; raises ``LocalProtocolError``, as h11's readers do, of
    which h11 makes a ``RemoteProtocolError``."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head or of trailers, once all of them are there."""
        if self._data[:2] == END[:2]:
            self._extract(2)
            return []
        seen = self._multiple_lines_search
        end = self._data.find(END, max(0, seen - 3))
        stop = len(self._data) if end < 0 else end + 2
        if ODD.search(self._data, max(0, seen - 2), stop):
            raise h11.LocalProtocolError("a line does not end in CRLF, or is folded")
        if end < 0:
            self._multiple_lines_search = len(self._data)
            return None
        lines = self._extract(end + len(END))[: -len(END)].split(END[:2])
        _check_length(lines)
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line before a chunk."""
        feed = self._data.find(b"\n")
        if feed < 0:
            return None
        line = self._extract(feed + 1)
        if not CHUNK_HEAD.fullmatch(line):
            raise h11.LocalProtocolError("a chunk's size is not one")
        return line


def _check_length(lines: list[bytearray]) -> None:
    """Refuse a head that tells the length of its body in two ways."""
    fields = [line.partition(b":") for line in lines[1:]]
    told = [(bytes(name).lower(), value) for name, _, value in fields]
    told = [(name, value) for name, value in told if name in LENGTHS]
    if len(told) > 1 or any(name == LENGTHS[0] and b"," in value for name, value in told):
        raise h11.LocalProtocolError("the body has two lengths")
    if lines[0].endswith(b"HTTP/1.0") and any(name == LENGTHS[1] for name, _ in told):
        raise h11.LocalProtocolError("HTTP/1.0 has no Transfer-Encoding")


def most_connections(settings: ServerSettings) -> int:
    """How many connections may be open; allows this process the descriptors that these need, if
    the system does."""
    # Beside a holder that has all of them, others find as many again.
    asked = 2 * settings.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = asked + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted == asked + OTHER_DESCRIPTORS:
        return settings.max_connections
    others = max(LEAST_DESCRIPTORS, min(OTHER_DESCRIPTORS, wanted // 2))
    most = min(settings.max_connections, max(1, (wanted - others) // 2))
    log.warning(
        "the system allows %d open files (ulimit -n): %d connections may be open, not "
        "max_connections",
        wanted,
        most,
    )
    return most
