"""The server's OpenAPI document: FastAPI's, with this server's errors instead of its 422."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from overlap_spec.server.errors import has_anthropic_errors

TEXT = {"type": "string"}
NULLABLE = {"type": ["string", "null"]}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "properties": fields}


ERROR = _object(error=_object(message=TEXT, type=TEXT, param=NULLABLE, code=NULLABLE))
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
STATUSES = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The server must not be called by this name (`Host`), or this needs the admin's key.",
    "404": "No such route or model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait; `Retry-After` says when to try again.",
    "500": "Internal error.",
    "503": "The engine is not available, or memory is short; `Retry-After` says when to try again.",
    "504": "The request took too long.",
}


def describe(app: FastAPI) -> None:
    """Serve the document at ``/openapi.json``."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    whole = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas = whole["components"]["schemas"]
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in whole["paths"].items():
        name = "AnthropicError" if has_anthropic_errors(path) else "Error"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["200"] = _good(path)
            for status, about in STATUSES.items():
                responses[status] = {"description": about, "content": content}
            if path in ("/health", "/ping"):
                responses["503"] = _good(path) | {"description": "Not ready."}
    return whole


def _good(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if path in STREAMS:
        # No schema: it would describe the whole stream and not one event.
        content["text/event-stream"] = {}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    return {"description": "Done.", "content": content}
