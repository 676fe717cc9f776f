"""Reading a request's JSON body in a time that its bytes bound."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# Twice the tokens of the longest contexts; reading so many values takes some tens of milliseconds.
MOST_VALUES = 2**18


def count_values(body: bytes) -> int:
    """At least the number of JSON values in a body, also of JSON text inside its strings."""
    return 1 + sum(body.count(mark) for mark in (b",", b"[", b"{"))


class BodyRequest(Request):
    """A request whose JSON is read without the collector of reference cycles, which would go over
    hundreds of thousands of new lists again and again."""

    async def json(self) -> Any:
        """The body as plain data."""
        body = await self.body()
        collects = gc.isenabled()
        gc.disable()
        try:
            return json.loads(body)
        finally:
            if collects:
                gc.enable()


class BodyRoute(APIRoute):
    """A route that gives its handler a :class:`BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return read
