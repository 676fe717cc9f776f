"""Messages between processes: a small JSON header, and a memory file for anything larger.

A message is one datagram, so neither side can block in the middle of one, whatever happens to the
other. Bodies travel as file descriptors of memory files and are read without waiting.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from typing import Any, NamedTuple

HEADER_BYTES = 1 << 16


class Message(NamedTuple):
    """A received message: plain data, and a file descriptor that the receiver now owns, or -1."""

    header: dict[str, Any]
    fd: int


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; child programs do not inherit them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, fd: int = -1, /, **header: Any) -> None:
    """Send a header and optionally a file descriptor, which the caller keeps.

    Raises:
        OSError: the other side is gone, or its buffer is full.
    """
    data = json.dumps(header, ensure_ascii=False).encode(errors="replace")
    if len(data) > HEADER_BYTES:
        raise ValueError(f"a header of {len(data)} bytes")
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    socket.send_fds(end, [data], [fd] if fd >= 0 else [], flags)


def send_body(end: socket.socket, body: bytes, /, **header: Any) -> None:
    """Send a header and a body of any size; raises OSError, as `send`."""
    with os.fdopen(os.memfd_create("grammar"), "wb") as file:
        file.write(body)
        file.flush()
        send(end, file.fileno(), **header)


def receive(end: socket.socket) -> Message | None:
    """The next message; None if the other side is gone.

    Raises:
        BlockingIOError: no message is waiting, and the socket does not block.
        ValueError: what was sent is no message.
    """
    try:
        data, fds, *_ = socket.recv_fds(end, HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side ended with our messages unread; its last messages are still here.
        data, fds, *_ = socket.recv_fds(end, HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    message = Message({}, fds[0] if fds else -1)
    try:
        message.header.update(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        drop_body(message)
        raise ValueError("the message is no JSON object") from None
    return message


def read_body(message: Message, most_bytes: int | None = None) -> bytes:
    """Read a message's body and close it.

    Args:
        most_bytes: Longest body; None: of any length, from those who are trusted.

    Raises:
        ValueError: the body is longer, or is no file.
    """
    with os.fdopen(message.fd, "rb") as file:
        found = os.fstat(message.fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("its body is no file")
        if most_bytes is not None and found.st_size > most_bytes:
            raise ValueError(f"its body has {found.st_size} bytes")
        file.seek(0)
        return file.read(-1 if most_bytes is None else most_bytes)


def drop_body(message: Message) -> None:
    """Close a message's body without reading it."""
    if message.fd >= 0:
        os.close(message.fd)
