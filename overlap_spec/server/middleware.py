"""Checks that every HTTP request passes before its route: host, API key, and the body's size; and
the reading of its JSON in a time that its bytes bound."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.memory import MemoryCeiling, collector_off
from overlap_spec.server.errors import ApiError, error_response
from overlap_spec.server.keys import Keys, holder_of
from overlap_spec.server.loop_turns import Turnstile
from overlap_spec.server.settings import ServerSettings
from overlap_spec.shares import HOLDER, Shares

# Keys of a request's scope: who asks, and whether as administrator.
OWNER, IS_ADMIN = "overlap_spec.owner", "overlap_spec.is_admin"
PROBE_PATHS = ("/health", "/ping")
# Health probes carry no key, and the playground's page asks its user for it.
OPEN_PATHS, OPEN_FOLDER = ("/", *PROBE_PATHS), "/playground/"
# Twice the tokens of the longest contexts; reading so many values takes some tens of milliseconds.
MOST_VALUES = 2**18
# Larger ones take turns, in bytes.
LARGE_BODY = 2**16
# Key of the request's scope under which the guard leaves its `Turnstile`.
OWN_TURN = "overlap_spec.own_turn"


class GuardMiddleware:
    """ASGI middleware that rejects requests, and reports all error statuses.

    Args:
        keys: That clients may have; who a client is goes into the request's scope (`OWNER`).
        rejected: Called with the status of every response of 400 and above.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keys: Keys, rejected: Callable[[int], None]
    ) -> None:
        self.app, self._rejected, self._keys = app, rejected, keys
        self._limit, self._body_timeout_s = settings.max_body_bytes, settings.body_timeout_s
        self._own_turn = Turnstile()
        # Bytes of the bodies whose requests have not been answered yet.
        self.bodies = Shares(settings.max_bodies_bytes)
        self._ceiling = MemoryCeiling(settings.max_front_bytes, collects=True)
        # Requests under way that may hold memory.
        self._under_way = 0
        self._names = _allowed_names(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        given = _credentials(dict(scope["headers"]))
        scope[OWNER], scope[IS_ADMIN] = self._keys.owner(given, address), self._keys.is_admin(given)
        holder = holder_of(scope[OWNER] or f"address {address}")
        HOLDER.set(holder)
        body = HeldBody(self.bodies, holder)
        self._under_way += 1
        try:
            await self._pass(scope, receive, self._counted(send, body), body)
        finally:
            self._under_way -= 1
            body.release()

    def _counted(self, send: Send, body: HeldBody) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A stream may go on for minutes, and does not need its body any more.
                body.release()
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._rejected(message["status"])
            await send(message)

        return counted

    async def _pass(self, scope: Scope, receive: Receive, send: Send, held: HeldBody) -> None:
        method, body = scope["method"], b""
        try:
            self._check(scope)
            if _takes_body(scope):
                chunks = await self._read(receive, held)
                if chunks is None:
                    return
                if held.size > LARGE_BODY:
                    await self._own_turn()
                body = b"".join(chunks)
                del chunks
                if count_values(body) > MOST_VALUES:
                    raise ApiError(413, f"the body has more than {MOST_VALUES} values")
                scope[OWN_TURN] = self._own_turn
            elif method == "HEAD":
                # As GET; uvicorn leaves out the answer's body.
                scope = {**scope, "method": "GET"}
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, held: HeldBody) -> list[bytes] | None:
        """The whole body in pieces; None if the client has gone."""
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while (message := await receive())["type"] == "http.request":
                    chunks.append(message.get("body", b""))
                    if held.size + len(chunks[-1]) > self._limit:
                        raise self._too_large()
                    if not held.add(len(chunks[-1])):
                        text = f"all bodies in flight exceed {self.bodies.most} bytes"
                        text += " (max_bodies_bytes)"
                        raise ApiError(429, text, code="queue_full", kind="rate_limit_error")
                    if not message.get("more_body", False):
                        return chunks
        except TimeoutError:
            text = f"the body did not come in {self._body_timeout_s:g} s (body_timeout_s)"
            raise ApiError(408, text) from None
        return None

    def _check(self, scope: Scope) -> None:
        """Raise ApiError where a request's head says that it is not served."""
        headers, path, method = dict(scope["headers"]), scope["path"], scope["method"]
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            raise self._too_large()
        if not _takes_body(scope) and (int(length) or b"transfer-encoding" in headers):
            raise ApiError(413, f"{method} {path} takes no body: send none")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            text = "the body is encoded: send it as it is, without Content-Encoding"
            raise ApiError(415, text, code="unsupported_encoding")
        host = headers.get(b"host", b"").decode("latin-1")
        if self._names is not None and not _is_local(name := _name(host), self._names):
            message = f"this server is not called {name!r}: start it with --allowed-host {name}"
            raise ApiError(403, message, code="host_not_allowed")
        # Without others under way, nothing would be freed by waiting.
        if _takes_body(scope) and self._under_way > 1 and self._ceiling.is_reached():
            most = self._ceiling.most_bytes
            text = f"the server's front has over {most} bytes of memory (max_front_bytes)"
            raise ApiError(503, text, code="out_of_memory", kind="service_unavailable")
        needs_key = self._keys.are_asked_for and not _is_open(path) and method != "OPTIONS"
        if needs_key and scope[OWNER] is None:
            message = "no or a wrong API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            raise ApiError(401, message, code="invalid_api_key")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over {self._limit} bytes (max_body_bytes)")


class HeldBody:
    """The bytes of one body, as they are counted to who sends them."""

    def __init__(self, bodies: Shares, holder: str) -> None:
        self._bodies, self._holder = bodies, holder
        self.size = 0

    def add(self, size: int) -> bool:
        """Count bytes that have come, if there is room for them."""
        if not self._bodies.has_room(self._holder, size):
            return False
        self.size += size
        self._bodies.add(self._holder, size)
        return True

    def release(self) -> None:
        """Count no byte any longer."""
        self._bodies.add(self._holder, -self.size)
        self.size = 0


def _takes_body(scope: Scope) -> bool:
    """Whether a body is read at all."""
    return scope["method"] == "POST" and not _is_open(scope["path"])


def _is_open(path: str) -> bool:
    """Whether no key is needed."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _credentials(headers: dict[bytes, bytes]) -> bytes:
    """The key that was sent, as ``Authorization`` has it; Anthropic's clients have a header of
    their own."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", b"" if key is None else b"Bearer " + key)


def _allowed_names(settings: ServerSettings) -> frozenset[str] | None:
    """Names besides those of loopback that ``Host`` may have; None allows any.

    Without this check, a web page could call a server on its reader's loopback address by a name of
    the page's own that resolves to it (DNS rebinding).
    """
    if settings.allowed_hosts or _is_local(settings.host, frozenset()):
        return frozenset(name.lower() for name in settings.allowed_hosts)
    return None


def _is_local(name: str, also: frozenset[str]) -> bool:
    if name == "localhost" or name in also:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """The name in a ``Host`` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body that was read, and then the client's next messages."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed


def count_values(body: bytes) -> int:
    """At least the number of JSON values in a body, also of JSON text inside its strings.

    A field counts thrice, as a new text is made of its name, and an object six times, as it is
    checked by itself.
    """
    values = body.count(b",") + body.count(b"[")
    return 1 + values + 2 * body.count(b":") + 6 * body.count(b"{")


class BodyRequest(Request):
    """A request whose JSON is read without the collector of reference cycles, which would go over
    hundreds of thousands of new lists again and again."""

    async def json(self) -> Any:
        """The body as plain data. A large one is read in a turn of the loop of its own, and what
        the caller does with it is done in another."""
        body = await self.body()
        if len(body) <= LARGE_BODY:
            return _read(body)
        own_turn = self.scope[OWN_TURN]
        await own_turn()
        with collector_off():
            data = _read(body)
        await own_turn()
        return data


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte {error.start} is {body[error.start]:#x}"
    except RecursionError:
        why = "nested too deeply"
    except ValueError as error:
        why = f"not read: {error}"
    raise HTTPException(400, f"the body is {why}")


class BodyRoute(APIRoute):
    """A route that gives its handler a :class:`BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return read


class ProbesOnly:
    """An application that answers probes, and all else with an error, which it tells; each answer
    is the last of its connection."""

    def __init__(self, app: ASGIApp, otherwise: ApiError, refused: Callable[[], None]) -> None:
        self._app, self._otherwise, self._refused = app, otherwise, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        if scope["method"] in ("GET", "HEAD") and scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, last)
        else:
            self._refused()
            await error_response(self._otherwise, scope["path"])(scope, receive, last)
