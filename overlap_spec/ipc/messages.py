"""Messages between the engine's client and its server: msgpack over one pair of ZeroMQ sockets.

The client numbers its requests and queries, and the server answers under these numbers. All
results of one step travel in one `EngineOutputs`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from overlap_spec.engine.input_processor import Limits
from overlap_spec.grammar.isolation.limits import FailureKind
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Delta, Output, Request

QueryKind = Literal["snapshot", "requests", "timeline", "flush_cache"]


class LaunchArgs(msgspec.Struct):
    """First line of the server's standard input, as JSON: the client's Unix socket, in a private
    folder, and the engine's settings."""

    address: str
    settings: dict[str, Any]


class AddRequest(msgspec.Struct, tag=True):
    """Compile the grammar of a request, and queue it.

    ``request.id`` is the client's number. The grammar is a field of its own, because
    ``Request.grammar`` names no type to decode.
    """

    request: Request
    grammar: Grammar | None


class AbortRequest(msgspec.Struct, tag=True):
    """End a request; the output so far follows."""

    id: int


class Query(msgspec.Struct, tag=True):
    """Ask for the engine's state as plain data, with where each request stands or without, for the
    spans of its last `steps`, or to forget the computed pages that no request holds."""

    id: int
    what: QueryKind
    steps: int = 0


class Shutdown(msgspec.Struct, tag=True):
    """Abort all requests and end the process."""


ToServer = AddRequest | AbortRequest | Query | Shutdown


class EngineReady(msgspec.Struct, tag=True):
    """The engine is loaded; `config` holds its settings with their defaults filled in."""

    limits: Limits
    vocab_size: int
    config: dict[str, Any]


class LoadFailed(msgspec.Struct, tag=True):
    """The engine cannot be loaded: the error's class and message."""

    error_type: str
    message: str


class RejectedRequest(msgspec.Struct):
    """A request whose grammar cannot be compiled.

    `error_type` is the error's class; `failure` is set if the compile itself failed (timeout,
    memory, crash …) instead of refusing the grammar.
    """

    id: int
    error_type: str
    message: str
    param: str | None
    failure: FailureKind | None = None


class RequestDelta(msgspec.Struct):
    """The next piece of a request's output."""

    id: int
    delta: Delta


class FinishedRequest(msgspec.Struct):
    """A request's whole output, without what its pieces had (`logprobs`, `prompt_logprobs`) and
    without `parsed`; `error_type` is the class of the exception whose text is `output.error`."""

    id: int
    output: Output
    error_type: str | None


class EngineOutputs(msgspec.Struct, tag=True):
    """Everything since the last message, to be handled in this order; `queued` are the numbers of
    requests that have been compiled and queued."""

    rejected: list[RejectedRequest] = []
    queued: list[int] = []
    deltas: list[RequestDelta] = []
    finished: list[FinishedRequest] = []


class Heartbeat(msgspec.Struct, tag=True):
    """The engine's loop goes on, though it has nothing to tell."""


class QueryResult(msgspec.Struct, tag=True):
    """The result of the `Query` of this number."""

    id: int
    data: dict[str, Any]


ToClient = EngineReady | LoadFailed | EngineOutputs | Heartbeat | QueryResult

encode = msgspec.msgpack.Encoder().encode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
