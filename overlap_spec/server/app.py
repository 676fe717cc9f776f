"""The ASGI application: routes, error handlers and limits around one engine."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.grammar.spec import AdditionalProperties
from overlap_spec.server import admin, chat, completions, messages, responses, sglang
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.errors import ERRORS, add_handlers
from overlap_spec.server.keys import Keys
from overlap_spec.server.metrics import Metrics
from overlap_spec.server.middleware import GuardMiddleware
from overlap_spec.server.reference import markdown
from overlap_spec.server.service import ClientGone, Service
from overlap_spec.server.settings import ServerSettings

# Nginx's status for a closed connection; no client reads it, only logs and metrics.
CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application around an engine, which the caller starts and closes."""
    keys = Keys(settings)
    additional = cast("AdditionalProperties", engine.config.additional_properties)
    service = Service(engine, settings, Metrics(), Constraints(settings, additional))

    app = FastAPI(
        title="overlap-spec",
        version="1",
        responses=ERRORS,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.service = service
    add_handlers(app)

    async def gone(_: Request, __: Exception) -> Response:
        service.metrics.gone.inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, gone)
    for each in (chat, completions, responses, messages, sglang, admin):
        app.include_router(each.router)
    app.add_middleware(
        GuardMiddleware,
        settings=settings,
        keys=keys,
        rejected=lambda status: service.metrics.rejected.labels(str(status)).inc(),
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            # Clients send headers of their own, such as x-stainless-lang.
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app


def document() -> dict[str, Any]:
    """The server's OpenAPI document; needs no engine that runs."""
    return create_app(AsyncEngine(), ServerSettings()).openapi()


if __name__ == "__main__":
    print(markdown(document()), end="")
