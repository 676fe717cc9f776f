"""HTTP/1.1 as strict as its standard: what two servers could read differently is refused.

h11 takes a bare line feed for the end of a line, joins folded lines, and prefers one of two
lengths. A proxy that reads these otherwise would see other requests than this server (request
smuggling).
"""

from __future__ import annotations

import re

import h11
from h11._receivebuffer import ReceiveBuffer

END = b"\r\n\r\n"
# A line feed or carriage return alone, or a line that goes on with the one before it.
ODD = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\n[ \t]")
CHUNK_HEAD = re.compile(rb"[0-9A-Fa-f]{1,16}(;[^\r\n]*)?\r\n")
LENGTHS = (b"content-length", b"transfer-encoding")


class StrictConnection(h11.Connection):
    """The server's side of a connection; what it cannot read for certain is a
    ``RemoteProtocolError``."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._receive_buffer = StrictBuffer()


class StrictBuffer(ReceiveBuffer):
    """What has been received and not read; raises ``LocalProtocolError``, as h11's readers do."""

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
