"""``/requests``: where the requests under way stand, for those who may know."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from overlap_spec.errors import EngineUnavailable
from overlap_spec.server.admin import is_silent
from overlap_spec.server.errors import Json
from overlap_spec.server.middleware import IS_ADMIN, OWNER
from overlap_spec.server.service import Service

# Of a key's hash: tells clients apart, and is no key.
TAG_CHARACTERS = 8


async def requests_under_way(service: Service, http: Request) -> Response:
    """The engine's totals, and where the client's own requests stand; the administrator's key shows
    everybody's. Figures alone: no prompt, no output, no schema.

    Raises:
        EngineUnavailable: there is no engine, or it does not answer.
    """
    if is_silent(service):
        raise EngineUnavailable("the engine does not answer: try again in some seconds")
    state = await service.run_until_disconnect(http, service.engine.standings())
    owner, is_admin = http.scope[OWNER], http.scope[IS_ADMIN]
    known = {
        handle.request.id: (of, label)
        for (of, label), handles in service.by_label.items()
        for handle in handles
    }
    shown = []
    for standing in state["requests"]:
        # Requests of the server itself have no label.
        of, label = known.get(standing["id"], ("server", None))
        if is_admin or of == owner:
            row = standing | {"id": label, "client": _tag(of), "own": of == owner}
            shown.append(row)
    totals = _totals(service, state)
    return Json(
        {
            "time_ms": time.monotonic_ns() / 1e6,
            "totals": totals,
            "requests": shown,
            "not_shown": max(totals["open"] - len(shown), 0),
            "is_admin": is_admin,
        }
    )


def _totals(service: Service, state: Mapping[str, Any]) -> dict[str, Any]:
    """Of all clients together, as ``/server_info`` tells them too."""
    speculation, config = state["speculation"], service.engine.config
    active = speculation.get("active", {})
    return {
        "open": state["open"] + state["compiling"],
        "running": state["running"],
        "waiting": state["waiting"],
        "compiling": state["compiling"],
        "max_running_requests": config.max_running_requests,
        "output_tokens": state["output_tokens"],
        "pages_in_use": state["pages_in_use"],
        "pages": state["pages"],
        "page_tokens": config.page_size,
        "steps": state["steps"],
        "step_ms": speculation["observed_step_ms"],
        "accept_length": speculation["observed_accept_length"],
        "draft_steps": active.get("steps", config.num_steps),
        "draft_nodes": active.get("nodes", config.num_draft_tokens),
        "hidden_fraction": state["hidden_fraction"],
    }


def _tag(owner: str) -> str:
    """A client as the administrator may call it: a key by the start of its hash."""
    kind, _, name = owner.partition(" ")
    return f"key {name[:TAG_CHARACTERS]}" if kind == "key" else owner
