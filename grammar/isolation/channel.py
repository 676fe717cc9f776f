"""Messages between processes: a small header, and a memory file for anything larger.

A message is one datagram, so neither side can block in the middle of one, whatever happens to the
other. Bodies travel as file descriptors of memory files and are read without waiting.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import Literal, TypeVar

import msgspec

from overlap_spec.grammar.isolation.limits import FailureKind

HEADER_BYTES = 1 << 16
Header = TypeVar("Header", bound=msgspec.Struct)


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


def send(end: socket.socket, header: msgspec.Struct, body: bytes | int = -1) -> None:
    """Send a header and a body of any size: bytes, or a file, which the caller keeps; -1: none.

    Raises:
        OSError: the other side is gone, its buffer is full, or the body is over this process's
            limit of a file's size.
    """
    if isinstance(body, bytes):
        with os.fdopen(os.memfd_create("grammar"), "wb") as file:
            file.write(body)
            file.flush()
            send(end, header, file.fileno())
        return
    fds = [body] if body >= 0 else []
    socket.send_fds(end, [msgspec.msgpack.encode(header)], fds, socket.MSG_NOSIGNAL)


def receive(end: socket.socket, kind: type[Header]) -> tuple[Header, int] | None:
    """The next message's header and its body's file, which the receiver now owns, or -1; None if
    the other side is gone.

    Raises:
        BlockingIOError: no message is waiting, and the socket does not block.
        ValueError: what was sent is no such message.
    """
    try:
        data, fds, *_ = socket.recv_fds(end, HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side ended with our messages unread; its last messages are still here.
        data, fds, *_ = socket.recv_fds(end, HEADER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    fd = fds[0] if fds else -1
    try:
        return msgspec.msgpack.decode(data, type=kind), fd
    except msgspec.DecodeError as error:
        drop(fd)
        raise ValueError(str(error)) from None


def read(fd: int, most_bytes: int | None = None) -> bytes:
    """Read a body and close it.

    Args:
        most_bytes: Longest body; None: of any length, from those who are trusted.

    Raises:
        ValueError: the body is longer, or is no file.
    """
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("its body is no file")
        if most_bytes is not None and found.st_size > most_bytes:
            raise ValueError(f"its body has {found.st_size} bytes")
        file.seek(0)
        return file.read(-1 if most_bytes is None else most_bytes)


def drop(fd: int) -> None:
    """Close a body without reading it."""
    if fd >= 0:
        os.close(fd)
