"""Reading a request's JSON body in a time that its bytes bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from overlap_spec.memory import collector_off

# Twice the tokens of the longest contexts; reading so many values takes some tens of milliseconds.
MOST_VALUES = 2**18
# Larger ones take turns, in bytes.
LARGE_BODY = 2**16
# Key of the request's scope under which the guard leaves its `Turnstile`.
OWN_TURN = "overlap_spec.own_turn"


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
            return json.loads(body)
        own_turn = self.scope[OWN_TURN]
        await own_turn()
        data = _read(body)
        await own_turn()
        return data


def _read(body: bytes) -> Any:
    with collector_off():
        return json.loads(body)


class BodyRoute(APIRoute):
    """A route that gives its handler a :class:`BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return read
