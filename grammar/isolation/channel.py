"""Messages between processes: a header and a body, in a memory file where it is large.

A message is one datagram, so neither side can block in the middle of one, whatever happens to the
other. Large bodies travel as file descriptors of memory files and are read without waiting.
"""

from __future__ import annotations

import os
import socket
import stat
from functools import cache
from typing import Literal, TypeVar

import msgspec

from overlap_spec.grammar.isolation.limits import FailureKind

MESSAGE_BYTES, INLINE_BYTES = 2**16, 2**12
Header = TypeVar("Header", bound=msgspec.Struct)
# Bytes, or the file that has them.
Body = bytes | int


class Order(msgspec.Struct, frozen=True):
    """To the server: a job as body, who asks for it and its kind; without a body, that it is not
    wanted any more. A worker gets the body alone."""

    number: int = 0
    holder: str = ""
    kind: str = ""


class Word(msgspec.Struct, frozen=True):
    """From a worker or the server: what came of a job.

    Attributes:
        number: The job; below 0 it is about none.
        failed: Why there is no body; `refused` where a GrammarError was raised.
        reason, param: Of an error.
        goes_on: Whether the worker takes another job.
        state: The server's `FIGURES`.
    """

    number: int = -1
    failed: FailureKind | Literal["refused"] | None = None
    reason: str = ""
    param: str | None = None
    goes_on: bool = False
    state: tuple[int, ...] = ()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; child programs do not inherit them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, header: msgspec.Struct, body: Body | None = None) -> None:
    """Send a header and a body of any size; its file stays the caller's.

    Raises:
        OSError: the other side is gone, its buffer is full, or the body is over this process's
            limit of a file's size.
    """
    if isinstance(body, bytes) and len(body) > INLINE_BYTES:
        with os.fdopen(os.memfd_create("grammar"), "wb") as file:
            file.write(body)
            file.flush()
            send(end, header, file.fileno())
        return
    fds = [body] if isinstance(body, int) else []
    message = header, body if isinstance(body, bytes) else None
    socket.send_fds(end, [msgspec.msgpack.encode(message)], fds, socket.MSG_NOSIGNAL)


def receive(end: socket.socket, kind: type[Header]) -> tuple[Header, Body | None] | None:
    """The next message's header and body, whose file is now the receiver's; None if the other side
    is gone.

    Raises:
        BlockingIOError: no message is waiting, and the socket does not block.
        ValueError: what was sent is no such message.
    """
    try:
        data, fds, *_ = socket.recv_fds(end, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side ended with our messages unread; its last messages are still here.
        data, fds, *_ = socket.recv_fds(end, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    body: Body | None = fds[0] if fds else None
    try:
        header, inline = _decoder(kind).decode(data)
    except msgspec.DecodeError as error:
        drop(body)
        raise ValueError(str(error)) from None
    return header, inline if body is None else body


@cache
def _decoder(kind: type[Header]) -> msgspec.msgpack.Decoder[tuple[Header, bytes | None]]:
    return msgspec.msgpack.Decoder(tuple[kind, bytes | None])  # type: ignore[valid-type]


def read(body: Body, most_bytes: int | None = None) -> bytes:
    """The bytes of a body, whose file is closed.

    Args:
        most_bytes: Longest body; None: of any length, from those who are trusted.

    Raises:
        ValueError: the body is longer, or is no file.
    """
    if isinstance(body, bytes):
        return body
    with os.fdopen(body, "rb") as file:
        found = os.fstat(body)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("its body is no file")
        if most_bytes is not None and found.st_size > most_bytes:
            raise ValueError(f"its body has {found.st_size} bytes")
        file.seek(0)
        return file.read(-1 if most_bytes is None else most_bytes)


def drop(body: Body | None) -> None:
    """Let a body go that nobody has read."""
    if isinstance(body, int):
        os.close(body)
