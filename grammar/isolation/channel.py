"""Messages between the processes: a small JSON header and, where there is more, a file in memory.

A message is one datagram, so neither side can be held up in the middle of one, whatever happens
to the other. Bodies travel as descriptors of files in memory and are read without waiting.
"""

from __future__ import annotations

import array
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 1 << 16
RIGHTS_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


@dataclass(frozen=True)
class Message:
    """What came: plain data, and a descriptor that now belongs to the receiver, or -1."""

    header: dict[str, Any]
    fd: int = -1


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; neither is inherited by a program that is started."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, fd: int = -1, /, **header: Any) -> None:
    """Send a header, and a descriptor with it; both stay the caller's.

    Raises:
        OSError: the other side is gone, or does not read.
    """
    data = json.dumps(header, ensure_ascii=False).encode(errors="replace")
    if len(data) > HEADER_BYTES:
        raise ValueError(f"a header of {len(data)} bytes")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    end.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def send_body(end: socket.socket, body: bytes, /, **header: Any) -> None:
    """Send a header and any number of bytes."""
    fd = os.memfd_create("grammar")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(body)
        send(end, fd, **header)
    finally:
        os.close(fd)


def receive(end: socket.socket) -> Message | None:
    """The next message; None where the other side is gone.

    Raises:
        BlockingIOError: nothing has come, and the end does not block.
    """
    try:
        data, rights, _, _ = end.recvmsg(HEADER_BYTES, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other side went with messages of ours unread; its own last words are still here.
        data, rights, _, _ = end.recvmsg(HEADER_BYTES, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    fds = array.array("i")
    for _, _, raw in rights:
        fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return Message(json.loads(data), fds[0] if fds else -1)


def read_body(message: Message) -> bytes:
    """The body of a message, which is closed by that."""
    with os.fdopen(message.fd, "rb") as file:
        file.seek(0)
        return file.read()


def drop_body(message: Message) -> None:
    """Close a body unread."""
    if message.fd >= 0:
        os.close(message.fd)
