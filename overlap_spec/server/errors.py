"""Errors in OpenAI's form: ``{"error": {message, type, param, code}}``, and in Anthropic's under
its paths: ``{"type": "error", "error": {type, message}}``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from overlap_spec.errors import EngineUnavailable, InvalidRequest, OverlapSpecError, QueueFull
from overlap_spec.grammar.isolation.limits import CompileFailure

RETRY_AFTER_S = 1
# Messages quote what was sent, which may be megabytes.
LONGEST_MESSAGE, LONGEST_PARAM, LONGEST_VALUE = 2000, 200, 80
# Errors of a running request that its own grammar causes; any other is the server's.
GRAMMAR_ERRORS = ("RequestFailed", "GrammarFailed")
# Routes whose errors have Anthropic's form; their types by status.
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# As the OpenAPI document shows them.
class NamedError(BaseModel):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error."""

    error: NamedError


class KindOfError(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: KindOfError


STATUSES: dict[int | str, str] = {
    "4XX": "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The server must not be called by this name (`Host`), or this needs the admin's key.",
    404: "No such route or model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    500: "Internal error.",
    503: "The engine is not available, or memory is short; `Retry-After` says when to try again.",
    504: "The request took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": about, "model": Error} for status, about in STATUSES.items()
}
ANTHROPIC_ERRORS = {status: told | {"model": AnthropicError} for status, told in ERRORS.items()}


class ApiError(OverlapSpecError):
    """An error with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The error as plain data."""
        text, param = self._told()
        return {"error": {"message": text, "type": self.kind, "param": param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error as plain data in Anthropic's form, where the message names the field."""
        otherwise = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_KINDS.get(self.status, otherwise)
        return {"type": "error", "error": {"type": kind, "message": self._told()[0]}}

    def _told(self) -> tuple[str, str | None]:
        """The message, and the field that it names."""
        text, param = cut(str(self), LONGEST_MESSAGE), self.param
        if param is not None:
            param = cut(param, LONGEST_PARAM)
        if param and not text.startswith(param):
            text = f"{param}: {text}"
        return text, param


def cut(text: str, most: int) -> str:
    """A text of at most so many characters, and a mark where more is left out."""
    return text if len(text) <= most else f"{text[:most]}…"


class Json(Response):
    """Plain data as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The JSON text; NaN and infinity become null."""
        return msgspec.json.encode(content)


def as_api_error(error: Exception) -> ApiError:
    """Any error as the client sees it."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return from_validation(error)
        case QueueFull() | CompileFailure(kind="busy"):
            return ApiError(429, text, code="queue_full", kind="rate_limit_error")
        case CompileFailure(kind="no_memory"):
            return ApiError(503, text, code="out_of_memory", kind="service_unavailable")
        case EngineUnavailable() | CompileFailure(kind="closed" | "unavailable"):
            return ApiError(503, text, code="engine_unavailable", kind="service_unavailable")
        case CompileFailure():
            # Over a limit, or too much for a backend: the grammar is at fault.
            return ApiError(400, text, error.param, code=f"grammar_{error.kind}")
        case InvalidRequest():
            return ApiError(400, text, error.param)
        case TimeoutError():
            text = "the request took longer than request_timeout_s, and was aborted"
            return ApiError(504, text, code="timeout", kind="timeout_error")
    return ApiError(500, f"{type(error).__name__}: {error}" if text else type(error).__name__)


def error_response(error: ApiError, path: str) -> Json:
    """An error as a response of the route at ``path``; transient errors carry Retry-After."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    body = error.anthropic_body() if has_anthropic_errors(path) else error.body()
    return Json(body, error.status, headers)


def has_anthropic_errors(path: str) -> bool:
    """Whether the errors of the route at ``path`` have Anthropic's form."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def add_handlers(app: FastAPI) -> None:
    """Turn every exception of a route into an error in its form."""

    async def told(request: Request, error: Exception) -> Response:
        path = request.url.path
        if not isinstance(error, HTTPException):
            return error_response(as_api_error(error), path)
        message, headers = str(error.detail), error.headers or {}
        if error.status_code == 404:
            message = "there is no such route"
        elif error.status_code == 405:
            allowed = headers.get("Allow")
            message = f"there is no {request.method} {path}: this path takes {allowed}"
        response = error_response(ApiError(error.status_code, message), path)
        response.headers.update(headers)
        return response

    kinds = (RequestValidationError, HTTPException, OverlapSpecError, TimeoutError, Exception)
    for kind in kinds:
        app.add_exception_handler(kind, told)


def from_validation(error: RequestValidationError) -> ApiError:
    """The deepest of pydantic's errors: in a union, that of the member that fits best, which in a
    list got furthest, and whose type is that of the value.

    There are few: lists stop at their first wrong item, and no dict has more than some thousands.
    """
    where, item = max(((_where(i, error.body), i) for i in error.errors()), key=_fit)
    own = item.get("ctx", {}).get("error")
    if isinstance(own, InvalidRequest):
        if own.param:
            inside = {"loc": (*item["loc"], own.param), "type": "missing"}
            where = _where(inside, error.body)
        return ApiError(400, str(own), where or None)
    if item["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {item['ctx']['error']}")
    return ApiError(400, _message(item, where), where or None)


def _message(item: Any, where: str) -> str:
    """What one of pydantic's errors says to a client, which knows nothing of Python."""
    context = item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            return "unknown field"
        case "missing":
            return "the field is required" if where else "the body must be a JSON object"
        case "model_attributes_type" | "model_type" if not where:
            return "the body must be a JSON object (Content-Type: application/json)"
        case "model_attributes_type" | "model_type":
            return "must be a JSON object"
        case "union_tag_not_found":
            is_object = isinstance(item["input"], dict)
            return f"needs a {context['discriminator']}" if is_object else "must be a JSON object"
        case "none_required":
            return "is not supported: leave it out, or send null"
        case "literal_error" | "union_tag_invalid":
            found = context.get("tag", item["input"])
            given = repr(found) if isinstance(found, str) else msgspec.json.encode(found).decode()
            allowed = context.get("expected") or context["expected_tags"]
            return f"{cut(given, LONGEST_VALUE)} is not supported: send {allowed}"
    return str(item["msg"]).replace(" after validation", "")


def _fit(found: tuple[str, Any]) -> tuple[int, list[int], bool]:
    """How well the member of a union fits that one of pydantic's errors is of."""
    where, item = found
    places = [part for part in item["loc"] if isinstance(part, int)]
    return where.count(".") + where.count("["), places, not item["type"].endswith("_type")


def _where(item: Any, body: Any) -> str:
    """The field of one of pydantic's errors, in the body or in the path or query."""
    kind, *inside = item["loc"]
    if kind != "body":
        return ".".join(map(str, inside))
    return place(tuple(inside), body, item["type"] == "missing")


def place(loc: tuple[int | str, ...], body: Any, missing: bool) -> str:
    """A path such as ``messages[0].content`` from pydantic's location.

    Parts that are not in the body are pydantic's names of union members, and are left out, except
    for the last part if that is the ``missing`` field itself. So are those before a field of an
    object whose type they are.
    """
    path = ""
    for index, part in enumerate(loc):
        last = missing and index == len(loc) - 1
        if isinstance(body, dict) and part == body.get("type") and index + 1 < len(loc):
            after, at_end = loc[index + 1], missing and index == len(loc) - 2
            if at_end or after in body:
                continue
        if isinstance(body, list) and isinstance(part, int):
            path += f"[{part}]"
            body = body[part] if part < len(body) else None
        elif isinstance(body, dict) and (part in body or last) and isinstance(part, str):
            path += f".{part}" if path else part
            body = body.get(part)
    return path
