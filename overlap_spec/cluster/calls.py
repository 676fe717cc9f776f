"""A request on its way to a replica, and the messages of its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

# What a scope has that every process can read.
PLAIN = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
# Time that a route has to notice that its client has gone.
LEAVE_S = 5.0

Messages = list[Message]


@dataclass(frozen=True)
class HttpCall:
    """One HTTP request, for a replica.

    Attributes:
        scope: ASGI's, as plain data.
        body: All of it.
        blocks: Of its prompt; see :mod:`overlap_spec.cluster.prefixes`.
        avoid: Names of replicas that have just failed it.
    """

    scope: dict[str, Any]
    body: bytes = b""
    blocks: tuple[int, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """A replica's whole answer."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


def plain_scope(scope: Scope) -> dict[str, Any]:
    """What another process needs of a scope."""
    found = {name: scope[name] for name in PLAIN if name in scope}
    found["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return found


async def run_call(app: ASGIApp, call: HttpCall) -> AsyncGenerator[Messages]:
    """Pass a request to an application; its messages, all that have come at a time. Raises as the
    application does. If the iterator is closed or its task cancelled, the application learns that
    the client has gone, and has a moment to end."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    whole: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if whole:
            return whole.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        queue.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(call.scope), receive, send)
        finally:
            queue.put_nowait(None)

    task = asyncio.ensure_future(run())
    try:
        more = True
        while more:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            more = batch[-1] is not None
            messages = [message for message in batch if message is not None]
            if messages:
                yield messages
        await task
    finally:
        gone.set()
        if not task.done():
            await _leave(task)


async def _leave(task: asyncio.Future[None]) -> None:
    await asyncio.wait({task}, timeout=LEAVE_S)
    task.cancel()
    with contextlib.suppress(BaseException):
        await task


async def run_whole(app: ASGIApp, call: HttpCall, replica: str) -> Answer:
    """Pass a request to an application, and wait for its whole answer."""
    status, headers, body = 500, [], bytearray()
    async for messages in run_call(app, call):
        for message in messages:
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
    return Answer(replica, status, headers, bytes(body))
