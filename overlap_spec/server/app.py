"""The ASGI application: routes, error handlers and limits around one engine."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.grammar.spec import AdditionalProperties
from overlap_spec.server import admin, sglang
from overlap_spec.server.body import BodyRoute
from overlap_spec.server.chat import chat_completions
from overlap_spec.server.completions import completions
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.docs_page import docs_page
from overlap_spec.server.errors import ApiError, Json, add_handlers
from overlap_spec.server.keys import Keys
from overlap_spec.server.messages import count_tokens, messages
from overlap_spec.server.metrics import Metrics
from overlap_spec.server.middleware import GuardMiddleware
from overlap_spec.server.openapi import describe
from overlap_spec.server.protocol.base import OpenAIBody
from overlap_spec.server.protocol.chat import ChatBody
from overlap_spec.server.protocol.messages import CountBody, MessagesBody
from overlap_spec.server.protocol.responses import ResponsesBody
from overlap_spec.server.protocol.text import (
    AbortBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from overlap_spec.server.responses import responses
from overlap_spec.server.service import ClientGone, Service
from overlap_spec.server.settings import ServerSettings
from overlap_spec.server.under_way import requests_under_way

# Nginx's status for a closed connection; no client reads it, only logs and metrics.
CLIENT_CLOSED_REQUEST = 499
# The first of January 2026, in seconds.
DEPRECATED_SINCE = "@1767225600"


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application around an engine, which the caller starts and closes."""
    keys = Keys(settings)
    additional = cast("AdditionalProperties", engine.config.additional_properties)
    service = Service(engine, settings, Metrics(), Constraints(settings, additional))

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
            # Clients send headers of their own, such as x-stainless-lang.
            allow_headers=["*"],
            expose_headers=["Deprecation", "Retry-After"],
        )
    describe(app)
    return app


def marked(response: Response, body: OpenAIBody) -> Response:
    """A response that says so where the body has fields that are deprecated (RFC 9745)."""
    if body.is_deprecated:
        response.headers["Deprecation"] = DEPRECATED_SINCE
    return response


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", summary="OpenAI's chat completions.")
    async def _chat(body: ChatBody, request: Request) -> Response:
        return marked(await chat_completions(service, body, request), body)

    @app.post("/v1/completions", summary="OpenAI's text completions.")
    async def _completions(body: CompletionBody, request: Request) -> Response:
        return marked(await completions(service, body, request), body)

    @app.post("/v1/responses", summary="OpenAI's responses; nothing is stored.")
    async def _responses(body: ResponsesBody, request: Request) -> Response:
        return await responses(service, body, request)

    @app.get("/v1/responses/{response_id}", summary="Always 404: nothing is stored.")
    async def _response(response_id: str) -> Response:
        message = f"there is no response {response_id!r}: nothing is stored"
        raise ApiError(404, message, "response_id", code="response_not_found")

    @app.post("/v1/messages", summary="Anthropic's messages.")
    async def _messages(body: MessagesBody, request: Request) -> Response:
        return await messages(service, body, request)

    @app.post("/generate", summary="SGLang's completions of raw texts.")
    async def _generate(body: GenerateBody, request: Request) -> Response:
        return await sglang.generate(service, body, request)

    @app.post("/abort_request", summary="Abort requests under way.")
    async def _abort(body: AbortBody, request: Request) -> Response:
        return await sglang.abort_request(service, body, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", summary="The served model.")
    async def _models() -> Response:
        return admin.models(service)

    @app.get("/v1/models/{model:path}", summary="The served model, by its name.")
    async def _model(model: str) -> Response:
        service.check_model(model)
        return Json(admin.model_card(service))

    @app.post("/tokenize", summary="Token ids of a text or a chat.")
    async def _tokenize(body: TokenizeBody, request: Request) -> Response:
        return await admin.tokenize(service, body, request)

    @app.post("/v1/messages/count_tokens", summary="Tokens that messages have as a prompt.")
    async def _count(body: CountBody, request: Request) -> Response:
        return await count_tokens(service, body, request)

    @app.post("/detokenize", summary="Text of token ids.")
    async def _detokenize(body: DetokenizeBody, request: Request) -> Response:
        return await admin.detokenize(service, body, request)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="Whether the engine accepts requests.")
    async def _health() -> Response:
        return admin.health(service)

    @app.get("/ping", summary="As /health.")
    async def _ping() -> Response:
        return admin.health(service)

    @app.get("/version", summary="The project's version.")
    async def _version() -> Response:
        return admin.version()

    @app.get("/health_generate", summary="Whether the engine can generate a token now.")
    async def _health_generate(request: Request) -> Response:
        return await admin.health_generate(service, request)

    @app.get("/metrics", summary="Prometheus metrics.")
    async def _metrics() -> Response:
        return await admin.prometheus(service)

    @app.get("/server_info", summary="Settings and state of server and engine.")
    async def _server_info() -> Response:
        return await admin.server_info(service)

    @app.get("/get_server_info", summary="As /server_info.")
    async def _get_server_info() -> Response:
        return await admin.server_info(service)

    @app.get("/get_model_info", summary="What the model is.")
    async def _model_info() -> Response:
        return admin.model_info(service)

    @app.post("/flush_cache", summary="Forget computed prompts; for the administrator.")
    async def _flush(request: Request) -> Response:
        return await admin.flush_cache(service, request)

    @app.get("/requests", summary="Where the requests under way stand; others' for admins alone.")
    async def _requests(request: Request) -> Response:
        return await requests_under_way(service, request)

    @app.get("/timeline", summary="Spans of the engine's last steps.")
    async def _timeline(steps: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
        return await admin.timeline(service, steps)

    @app.get("/docs", include_in_schema=False)
    async def _docs() -> Response:
        return docs_page(app.openapi())

    @app.get("/", include_in_schema=False)
    async def _page() -> Response:
        return admin.page()

    @app.get("/playground/{name}", include_in_schema=False)
    async def _page_file(name: str) -> Response:
        return admin.page_file(name)
