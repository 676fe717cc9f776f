"""What front and engine say to each other: msgpack over one ZeroMQ pair of sockets.

The front numbers its requests; the engine answers under these numbers. All that one step brought
travels in one `News`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from overlap_spec.engine.input_processor import Limits
from overlap_spec.grammar.isolation.limits import FailureKind
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Delta, Output, Request


class Start(msgspec.Struct, tag=True):
    """Compile the grammar of a request, and queue it.

    ``request.id`` is the front's; its grammar goes beside it, as a type that can be decoded.
    """

    request: Request
    grammar: Grammar | None


class Abort(msgspec.Struct, tag=True):
    """End a request; what it has so far is its output, and follows."""

    id: int


class Ask(msgspec.Struct, tag=True):
    """Answer with the engine's state as plain data, or with the spans of its last `steps`."""

    id: int
    what: Literal["snapshot", "timeline"]
    steps: int = 0


class Quit(msgspec.Struct, tag=True):
    """Abort all and end the process."""


ToEngine = Start | Abort | Ask | Quit


class Hello(msgspec.Struct, tag=True):
    """The engine is loaded; `config` holds its settings as they came out."""

    limits: Limits
    vocab_size: int
    config: dict[str, Any]


class Broken(msgspec.Struct, tag=True):
    """The engine cannot be loaded: the error's class and message."""

    kind: str
    message: str


class Refused(msgspec.Struct):
    """A request whose grammar cannot be compiled; `kind` is the error's class, and `failure` says
    more of a compile that ended otherwise than well or in a refusal."""

    id: int
    kind: str
    message: str
    param: str | None
    failure: FailureKind | None = None


class Piece(msgspec.Struct):
    """Output of a request."""

    id: int
    delta: Delta


class Ended(msgspec.Struct):
    """A request's whole output, without `parsed`; `kind` is the class of what ended it wrongly."""

    id: int
    output: Output
    kind: str | None


class News(msgspec.Struct, tag=True):
    """What happened since the last message, in this order; `queued` are requests accepted."""

    refused: list[Refused] = []
    queued: list[int] = []
    pieces: list[Piece] = []
    ended: list[Ended] = []


class Answer(msgspec.Struct, tag=True):
    """The answer to an `Ask`."""

    id: int
    data: dict[str, Any]


ToFront = Hello | Broken | News | Answer

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
