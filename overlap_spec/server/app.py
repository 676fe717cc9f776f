"""The ASGI application: routes, error handlers and limits around one engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.grammar.spec import AdditionalProperties
from overlap_spec.server import admin, sglang
from overlap_spec.server.body import BodyRoute
from overlap_spec.server.chat import chat_completions
from overlap_spec.server.completions import completions
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.errors import add_handlers
from overlap_spec.server.keys import Keys
from overlap_spec.server.messages import count_tokens, messages
from overlap_spec.server.metrics import Metrics
from overlap_spec.server.middleware import GuardMiddleware
from overlap_spec.server.openapi import describe
from overlap_spec.server.protocol.base import OpenAIBody
from overlap_spec.server.reference import markdown, page
from overlap_spec.server.responses import no_response, responses
from overlap_spec.server.service import ClientGone, Service
from overlap_spec.server.settings import ServerSettings

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
    for method, path, handler, summary in ROUTES:
        app.add_api_route(
            path,
            _bound(handler, service),
            methods=[method],
            summary=summary,
            include_in_schema=bool(summary),
        )

    @functools.cache
    def docs() -> str:
        return page(app.openapi())

    @app.get("/docs", include_in_schema=False)
    def _docs() -> Response:
        # In a thread, as the first time it takes some tenths of a second.
        return HTMLResponse(docs())

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


def _bound(handler: Callable[..., Any], service: Service) -> Callable[..., Any]:
    """A handler as FastAPI calls it: without its first parameter, the service."""
    own = inspect.signature(handler, eval_str=True)

    async def call(**given: Any) -> Response:
        found = handler(service, **given)
        response: Response = await found if inspect.isawaitable(found) else found
        body = given.get("body")
        if isinstance(body, OpenAIBody) and body.is_deprecated:
            # As RFC 9745 has it.
            response.headers["Deprecation"] = DEPRECATED_SINCE
        return response

    _, *others = own.parameters.values()
    call.__signature__ = own.replace(parameters=others)  # type: ignore[attr-defined]
    call.__name__ = handler.__name__
    return call


# Method, path, handler, and what the reference says of it, if it is in there.
ROUTES: tuple[tuple[str, str, Callable[..., Any], str], ...] = (
    ("POST", "/v1/chat/completions", chat_completions, "OpenAI's chat completions."),
    ("POST", "/v1/completions", completions, "OpenAI's text completions."),
    ("POST", "/v1/responses", responses, "OpenAI's responses; nothing is stored."),
    ("GET", "/v1/responses/{response_id}", no_response, "Always 404: nothing is stored."),
    ("POST", "/v1/messages", messages, "Anthropic's messages."),
    ("POST", "/generate", sglang.generate, "SGLang's completions of raw texts."),
    ("POST", "/abort_request", sglang.abort_request, "Abort requests under way."),
    ("GET", "/v1/models", admin.models, "The served model."),
    ("GET", "/v1/models/{model:path}", admin.one_model, "The served model, by its name."),
    ("POST", "/tokenize", admin.tokenize, "Token ids of a text or a chat."),
    ("POST", "/v1/messages/count_tokens", count_tokens, "Tokens that messages have as a prompt."),
    ("POST", "/detokenize", admin.detokenize, "Text of token ids."),
    ("GET", "/health", admin.health, "Whether the engine accepts requests."),
    ("GET", "/ping", admin.health, "As /health."),
    ("GET", "/version", admin.version, "The project's version."),
    (
        "GET",
        "/health_generate",
        admin.health_generate,
        "Whether the engine can generate a token now.",
    ),
    ("GET", "/metrics", admin.prometheus, "Prometheus metrics."),
    ("GET", "/server_info", admin.server_info, "Settings and state of server and engine."),
    ("GET", "/get_server_info", admin.server_info, "As /server_info."),
    ("GET", "/get_model_info", admin.model_info, "What the model is."),
    ("POST", "/flush_cache", admin.flush_cache, "Forget computed prompts; for the administrator."),
    (
        "GET",
        "/requests",
        admin.requests_under_way,
        "Where the requests under way stand; others' for admins alone.",
    ),
    ("GET", "/timeline", admin.timeline, "Spans of the engine's last steps."),
    ("GET", "/", admin.page, ""),
    ("GET", "/playground/{name}", admin.page_file, ""),
)


def document() -> dict[str, Any]:
    """The server's OpenAPI document; needs no engine that runs."""
    return create_app(AsyncEngine(), ServerSettings()).openapi()


if __name__ == "__main__":
    print(markdown(document()), end="")
