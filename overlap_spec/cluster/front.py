"""Takes HTTP requests, sends each to a replica, and passes its answer on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.cluster import merged
from overlap_spec.cluster.calls import Answer, HttpCall, Messages, plain_scope
from overlap_spec.cluster.prefixes import blocks_of, prompt_bytes
from overlap_spec.errors import EngineUnavailable, OverlapSpecError
from overlap_spec.server.errors import ApiError, as_api_error, error_response, has_anthropic_errors
from overlap_spec.server.events import DONE, sse
from overlap_spec.server.keys import Keys
from overlap_spec.server.metrics import PREFIX
from overlap_spec.server.middleware import GuardMiddleware
from overlap_spec.server.service import ClientGone, until_disconnect
from overlap_spec.server.settings import ServerSettings

# How often a request is sent to a replica in all, while nothing of its answer has been passed on.
TRIES = 3
# Of a replica's answer: who gave it.
REPLICA_HEADER = b"x-replica"
# What a request to all replicas may take, in seconds.
ALL_TIMEOUT_S = 15.0
# What the front waits beyond the limit that a replica keeps itself, in seconds.
GRACE_S = 5.0
RESPONSES_PATH = "/v1/responses"


class ReplicaLost(OverlapSpecError):
    """The replica that had a request is gone."""


class Replicas(Protocol):
    """The engines, as the front sees them."""

    def respond(self, call: HttpCall) -> AsyncGenerator[Messages]:
        """Have one replica answer.

        Raises:
            ReplicaLost: it went away, before or in the middle of its answer.
            QueueFull, EngineUnavailable: none takes it.
        """

    async def ask_all(self, call: HttpCall, timeout_s: float) -> list[Answer]:
        """The answers of all replicas that gave one in time. EngineUnavailable: there is no
        replica, or one does not answer."""


class Front:
    """The ASGI application in front of all replicas.

    Every route of one server is one of the whole: it is passed to one replica, or, if it is about
    all (health, metrics, state, aborting, the cache), to each, and the answers are merged.

    A request whose replica goes away, or is not ready, is sent to another one, as long as no part
    of the answer has been passed on: a request has no effect but its answer. A stream that has
    begun ends with an error event.
    """

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self._replicas, self._settings = replicas, settings
        self.grace_s = GRACE_S
        self._registry = CollectorRegistry()
        self._rejected = self._counter("requests_rejected", "Rejected HTTP requests.", "status")
        about = "Requests sent to another replica, by what the first one did."
        self._resent = self._counter("requests_resent", about, "why")
        about = "Streams that ended with an error as their replica went away."
        self._broken = self._counter("streams_broken", about)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self._registry)

    def guarded(self) -> ASGIApp:
        """The application behind the checks that every request passes."""

        def rejected(status: object) -> None:
            self._rejected.labels(str(status)).inc()

        return GuardMiddleware(self, self._settings, Keys(self._settings), rejected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a connection of type {scope['type']}")
        call = HttpCall(plain_scope(scope), await Request(scope, receive).body())
        with contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._serve(call, send))

    async def _serve(self, call: HttpCall, send: Send) -> None:
        scope, path = call.scope, call.scope["path"]
        reply = Reply(send, path)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s + self.grace_s):
                key = (scope["method"], path)
                if key == merged.METRICS or key in merged.MERGES:
                    await self._ask_all(key, call, reply)
                else:
                    if scope["method"] == "POST":
                        call = replace(call, blocks=blocks_of(prompt_bytes(call.body)))
                    await self._answer(call, reply)
        except Exception as error:
            if reply.has_begun:
                await reply.fail(as_api_error(error))
            else:
                await error_response(as_api_error(error), path)(scope, _nothing, send)

    async def _ask_all(self, key: tuple[str, str], call: HttpCall, reply: Reply) -> None:
        is_health = merged.MERGES.get(key) is merged.health
        try:
            answers = await self._replicas.ask_all(call, ALL_TIMEOUT_S)
        except EngineUnavailable:
            if not is_health and key != merged.METRICS:
                raise
            answers = []
        if key == merged.METRICS:
            texts = {answer.replica: answer.body for answer in answers if answer.status == 200}
            response = merged.metrics({**texts, "front": generate_latest(self._registry)})
        else:
            response = merged.MERGES[key](answers)
        await response(call.scope, _nothing, reply.send)

    async def _answer(self, call: HttpCall, reply: Reply) -> None:
        why = ""
        for number in range(TRIES):
            try:
                async with contextlib.aclosing(self._replicas.respond(call)) as batches:
                    async for messages in batches:
                        for message in messages:
                            if number < TRIES - 1:
                                _check_ready(message)
                            await reply.send(message)
                return
            except ReplicaLost as lost:
                why = str(lost)
                if reply.has_begun:
                    self._broken.inc()
                    raise EngineUnavailable(why) from lost
                self._resent.labels("lost").inc()
            except _NotReady as unready:
                self._resent.labels("not_ready").inc()
                call = replace(call, avoid=call.avoid | {unready.replica})
        raise EngineUnavailable(f"{TRIES} replicas were lost with this request: {why}")


class _NotReady(Exception):
    """A replica answered with status 503."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


def _check_ready(message: Message) -> None:
    if message["type"] == "http.response.start" and message["status"] == 503:
        raise _NotReady(dict(message["headers"]).get(REPLICA_HEADER, b"").decode())


class Reply:
    """What has been passed on of an answer; ``has_begun``: whether its status has."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self.has_begun = self._is_stream = False
        self._events = 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif self._is_stream:
            # An event ends with an empty line, and JSON text has none.
            self._events += message.get("body", b"").count(b"\n\n")
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End a stream with an error event. ApiError: it is no stream, and can only be broken
        off."""
        if not self._is_stream:
            raise error
        if self._path == RESPONSES_PATH:
            told = {**error.body()["error"], "type": "error", "sequence_number": self._events}
            last = b"".join(sse(told, named=True))
        elif has_anthropic_errors(self._path):
            last = b"".join(sse(error.anthropic_body(), named=True))
        else:
            last = b"".join(sse(error.body())) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        what = (await receive())["type"]
        await send({"type": f"{what}.complete"})
        if what == "lifespan.shutdown":
            return
