"""Checks that every HTTP request passes before its route: API key and body size."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.server.body import MOST_VALUES, count_values
from overlap_spec.server.errors import ApiError, error_response
from overlap_spec.server.settings import ServerSettings

# Health probes carry no key, and the playground's page asks its user for it.
OPEN_PATHS = ("/", "/health")


class GuardMiddleware:
    """ASGI middleware that rejects with 401 and 413, and reports all error statuses.

    Args:
        rejected: Called with the status of every response of 400 and above.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, rejected: Callable[[int], None]
    ) -> None:
        self.app, self._rejected = app, rejected
        self._limit = settings.max_body_bytes
        key = settings.api_key
        self._expected = f"Bearer {key}".encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self._pass(scope, receive, self._counted(send))

    def _counted(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._rejected(message["status"])
            await send(message)

        return counted

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        error = self._check(scope["path"], scope["method"], headers)
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limit:
                await error_response(self._too_large())(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        body = b"".join(chunks)
        chunks.clear()
        if count_values(body) > MOST_VALUES:
            error = ApiError(413, f"the body has more than {MOST_VALUES} values")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    def _check(self, path: str, method: str, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            return self._too_large()
        if self._expected is None or path in OPEN_PATHS or method == "OPTIONS":
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return None
        message = "no or a wrong API key: send `Authorization: Bearer KEY`"
        return ApiError(401, message, code="invalid_api_key")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over {self._limit} bytes (max_body_bytes)")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body that was read, and then the client's next messages."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed
