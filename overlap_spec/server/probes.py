"""Probes of the server's health, which find room where there is none for others."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.server.errors import ApiError, error_response

PROBE_PATHS = ("/health", "/ping")


def is_probe(scope: Scope) -> bool:
    """Whether a request asks for no more than the server's health."""
    return scope["method"] in ("GET", "HEAD") and scope["path"] in PROBE_PATHS


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

        if is_probe(scope):
            await self._app(scope, receive, last)
        else:
            self._refused()
            await error_response(self._otherwise, scope["path"])(scope, receive, last)
