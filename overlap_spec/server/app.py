"""The ASGI application: routes, error handlers and limits around one engine."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.server import admin, sglang
from overlap_spec.server.body import BodyRoute
from overlap_spec.server.chat import chat_completions
from overlap_spec.server.completions import completions
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.errors import Json, add_handlers
from overlap_spec.server.keys import Keys
from overlap_spec.server.metrics import Metrics
from overlap_spec.server.middleware import GuardMiddleware
from overlap_spec.server.openapi import describe
from overlap_spec.server.protocol.chat import ChatBody
from overlap_spec.server.protocol.text import (
    AbortBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from overlap_spec.server.service import ClientGone, Service
from overlap_spec.server.settings import ServerSettings

# Nginx's status for a closed connection; no client reads it, only logs and metrics.
CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application around an engine, which the caller starts and closes."""
    keys = Keys(settings)
    service = Service(engine, settings, Metrics(), Constraints(settings))

    app = FastAPI(title="overlap-spec", docs_url=None, redoc_url=None)
    app.state.service = service
    app.router.route_class = BodyRoute
    add_handlers(app)

    async def gone(_: Request, __: Exception) -> Response:
        service.metrics.gone.inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGone, gone)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
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
            allow_headers=["Authorization", "Content-Type"],
        )
    describe(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def _chat(body: ChatBody, request: Request) -> Response:
        return await chat_completions(service, body, request)

    @app.post("/v1/completions")
    async def _completions(body: CompletionBody, request: Request) -> Response:
        return await completions(service, body, request)

    @app.post("/generate")
    async def _generate(body: GenerateBody, request: Request) -> Response:
        return await sglang.generate(service, body, request)

    @app.post("/abort_request")
    async def _abort(body: AbortBody, request: Request) -> Response:
        return await sglang.abort_request(service, body, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def _models() -> Response:
        return admin.models(service)

    @app.get("/v1/models/{model:path}")
    async def _model(model: str) -> Response:
        service.check_model(model)
        return Json(admin.model_card(service))

    @app.post("/tokenize")
    async def _tokenize(body: TokenizeBody, request: Request) -> Response:
        return await admin.tokenize(service, body, request)

    @app.post("/detokenize")
    async def _detokenize(body: DetokenizeBody, request: Request) -> Response:
        return await admin.detokenize(service, body, request)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def _health() -> Response:
        return admin.health(service)

    @app.get("/health_generate")
    async def _health_generate(request: Request) -> Response:
        return await admin.health_generate(service, request)

    @app.get("/metrics")
    async def _metrics() -> Response:
        return await admin.prometheus(service)

    @app.get("/server_info")
    async def _server_info() -> Response:
        return await admin.server_info(service)

    @app.get("/timeline")
    async def _timeline(steps: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
        return await admin.timeline(service, steps)

    @app.get("/", include_in_schema=False)
    async def _page() -> Response:
        return admin.page()
