"""Routes that do not generate for clients: models, tokens, health, metrics, state, playground."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import FileResponse, Response

from overlap_spec.errors import EngineUnavailable, InvalidRequest
from overlap_spec.memory import rss_bytes
from overlap_spec.server.errors import ApiError, Json
from overlap_spec.server.metrics import FrontState
from overlap_spec.server.middleware import IS_ADMIN, OWNER
from overlap_spec.server.protocol import MOST_ENTRIES, Body, Count, Items, Label
from overlap_spec.server.service import Service, Serving, routes
from overlap_spec.types import SamplingParams

PAGE = Path(__file__).parent / "playground" / "index.html"
PAGE_TYPES = {".css": "text/css", ".js": "text/javascript"}
# What the playground's page loads; nothing else is handed out.
PAGE_FILES = {path.name: path for path in PAGE.parent.glob("*") if path.suffix in PAGE_TYPES}
# A page and scripts of two versions would not fit each other.
UNCACHED = {"Cache-Control": "no-cache"}
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
PROBE_TIMEOUT_S = 20.0
# After which /health no longer answers for the engine.
SILENCE_S = 10.0
# What a scrape may wait for the engine, and its state as a whole.
SCRAPE_TIMEOUT_S, STATE_TIMEOUT_S = 1.0, 10.0
# Of a key's hash: tells clients apart, and is no key.
TAG_CHARACTERS = 8
UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready."}}
TEXT_PAGE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
# Of /tokenize, whose text may be longer than the context, in characters.
LONGEST_TEXT = 2**20


class TokenizeBody(Body):
    """A text or a chat to tokenise."""

    example: ClassVar[Mapping[str, Any]] = {"prompt": "Hello"}

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[Items[dict[str, Any]], Field(max_length=MOST_ENTRIES)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """Token ids to decode."""

    example: ClassVar[Mapping[str, Any]] = {"tokens": [72, 101]}

    model: Label | None = None
    tokens: Annotated[Items[Count], Field(max_length=2**18)]


router = routes()


@router.get("/v1/models")
async def models(service: Serving) -> Response:
    """The served model and its adapters, as OpenAI's list of models."""
    cards = [model_card(service, name) for name in service.models]
    return Json({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}")
async def one_model(service: Serving, model: str) -> Response:
    """The served model, or one of its adapters, if that is its name."""
    return Json(model_card(service, service.check_model(model)))


def model_card(service: Service, name: str) -> dict[str, Any]:
    """A model's entry in the list."""
    served, folder = service.settings.served_model_name, service.engine.config.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "overlap-spec",
        "root": served if folder is None else str(folder),
        "parent": None if folder is None else served,
        "max_model_len": service.engine.context_length,
    }


@router.post("/tokenize")
async def tokenize(service: Serving, body: TokenizeBody, http: Request) -> Response:
    """Token ids of a text, or of a chat in the model's template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    tokenizer = service.engine.tokenizer
    if body.messages is not None:
        engine = service.engine
        engine.input_processor.check_length(body.messages)
        work = partial(engine.input_processor.prompt_ids, body.messages)
    else:
        assert body.prompt is not None
        if len(body.prompt) > LONGEST_TEXT:
            message = f"{len(body.prompt)} characters; at most {LONGEST_TEXT} are allowed"
            raise InvalidRequest(message, "prompt")
        work = partial(tokenizer.encode, body.prompt, body.add_special_tokens)
    ids = await service.run_until_disconnect(http, service.engine.preparation.run(work))
    length = service.engine.context_length
    return Json({"tokens": ids, "count": len(ids), "max_model_len": length})


@router.post("/detokenize")
async def detokenize(service: Serving, body: DetokenizeBody, http: Request) -> Response:
    """Text of token ids, without special tokens."""
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    highest = max(body.tokens, default=0)
    if highest >= tokenizer.vocab_size:
        message = f"token {highest} is outside the vocabulary of {tokenizer.vocab_size}"
        raise InvalidRequest(message, "tokens")
    work = partial(tokenizer.decode, body.tokens)
    text = await service.run_until_disconnect(http, service.engine.preparation.run(work))
    return Json({"text": text, "prompt": text})


@router.get("/ping", description="As /health.", responses=UNREADY)
@router.get("/health", responses=UNREADY)
async def health(service: Serving) -> Response:
    """Status 200 while the engine accepts requests, else 503, with the engine's health."""
    engine = service.engine
    status = "silent" if is_silent(service) else engine.health
    ready = status == "ready"
    return Json({"status": status, "restarts": engine.restarts}, 200 if ready else 503)


def is_silent(service: Service) -> bool:
    """Whether the engine should be there and has stopped, or is stuck."""
    return service.engine.health == "ready" and service.engine.silence_s > SILENCE_S


@router.get("/health_generate")
async def health_generate(service: Serving, request: Request) -> Response:
    """Status 200 if the engine can generate a token now."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)

    async def probe() -> None:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output = await service.engine.generate("health", None, sampling)
        if output.error is not None:
            raise ApiError(503, output.error, code="engine_unavailable")

    await service.run_until_disconnect(request, probe())
    return Json({"status": "ready"})


@router.get("/metrics", responses=TEXT_PAGE)
async def prometheus(service: Serving) -> Response:
    """All metrics in Prometheus's text format; of an engine that does not answer, its last."""
    engine, metrics = service.engine, service.metrics
    state = await _snapshot(service, SCRAPE_TIMEOUT_S)
    if state is None and engine.health == "ready":
        state = metrics.snapshot
    front = FrontState(
        engine_up=engine.health == "ready" and not is_silent(service),
        engine_restarts=engine.restarts,
        engine_silence_s=engine.silence_s,
        open_requests=len(engine.open_requests),
        resident_bytes=rss_bytes(),
    )
    return Response(metrics.render(state, front), media_type=PROMETHEUS)


@router.get("/get_server_info", description="As /server_info.")
@router.get("/server_info")
async def server_info(service: Serving) -> Response:
    """Settings and state of server and engine."""
    engine, settings = service.engine, dataclasses.asdict(service.settings)
    files = ("api_key_file", "admin_api_key_file", "ssl_certfile", "ssl_keyfile")
    for name in ("api_key", "admin_api_key", *files):
        settings[name] = "set" if settings[name] is not None else None
    state = await _snapshot(service, STATE_TIMEOUT_S)
    config = dataclasses.asdict(engine.config)
    speculation = state["speculation"] if state else {}
    active = speculation.get("active", {})
    return Json(
        {
            "version": metadata.version("overlap-spec"),
            "status": engine.health,
            "restarts": engine.restarts,
            "served_model_name": service.settings.served_model_name,
            "max_model_len": engine.context_length,
            "overlap": config["overlap"],
            "speculative_algorithm": engine.config.drafter,
            # The active ones: the launch settings are under `engine`.
            "speculative_num_steps": active.get("steps", config["num_steps"]),
            "speculative_policy": speculation.get("policy"),
            "speculative_reason": active.get("reason"),
            "speculative_estimated_accept_length": active.get("estimated_accept_length"),
            "speculative_observed_accept_length": speculation.get("observed_accept_length"),
            "speculative_estimated_step_ms": active.get("estimated_step_ms"),
            "speculative_observed_step_ms": speculation.get("observed_step_ms"),
            "speculative_eagle_topk": active.get("top_k", config["eagle_topk"]),
            "speculative_num_draft_tokens": active.get("nodes", config["num_draft_tokens"]),
            "speculative_accept_threshold_single": config["threshold_single"],
            "speculative_accept_threshold_acc": config["threshold_acc"],
            "speculative_relaxed_topk": config["relaxed_topk"],
            "speculative_relaxed_delta": config["relaxed_delta"],
            "avg_spec_accept_length": service.metrics.accept_length,
            "hidden_fraction": state["hidden_fraction"] if state else None,
            "open_requests": len(engine.open_requests),
            "token_origins": True,
            "engine": config,
            "server": settings,
            "state": state,
        }
    )


@router.get("/version")
async def version() -> Response:
    """The project's version."""
    return Json({"version": metadata.version("overlap-spec")})


@router.get("/get_model_info")
async def model_info(service: Serving) -> Response:
    """What the model is, under SGLang's names."""
    config = service.engine.config
    return Json(
        {
            "model_path": config.model,
            "tokenizer_path": str(config.target_path),
            "served_model_name": service.settings.served_model_name,
            "is_generation": True,
            "max_model_len": service.engine.context_length,
            "vocab_size": service.engine.tokenizer.vocab_size,
            "speculative_algorithm": config.drafter,
            "tool_call_parser": service.settings.tool_call_parser,
            "reasoning_parser": service.settings.reasoning_parser,
            "chat_template_switches": sorted(service.engine.tokenizer.switches),
        }
    )


@router.post("/flush_cache")
async def flush_cache(service: Serving, http: Request) -> Response:
    """Forget computed prompts, for the administrator: the reply says how many pages were free of
    running requests, and are forgotten."""
    if not http.scope[IS_ADMIN]:
        message = "the cache is shared with other clients: send the key of --admin-api-key"
        raise ApiError(403, message, code="not_admin")
    pages = await service.run_until_disconnect(http, service.engine.flush_cache())
    return Json({"flushed_pages": pages})


@router.get("/requests")
async def requests_under_way(service: Serving, http: Request) -> Response:
    """The engine's totals, and where the client's own requests stand; the administrator's key shows
    everybody's. Figures alone: no prompt, no output, no schema."""
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


@router.get("/timeline")
async def timeline(service: Serving, steps: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """Spans of the engine's last steps, in nanoseconds on one clock."""
    return Json({"spans": await service.engine.timeline(steps)})


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The playground's page, if it is installed."""
    if not PAGE.is_file():
        raise ApiError(404, "this installation has no playground; the API is under /v1")
    return FileResponse(PAGE, media_type="text/html", headers=UNCACHED)


@router.get("/playground/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """A script or style sheet of the playground."""
    path = PAGE_FILES.get(name)
    if path is None:
        raise ApiError(404, f"the playground has no file {name!r}")
    return FileResponse(path, media_type=PAGE_TYPES[path.suffix], headers=UNCACHED)


async def _snapshot(service: Service, timeout_s: float) -> dict[str, Any] | None:
    if is_silent(service):
        return None
    try:
        async with asyncio.timeout(timeout_s):
            return await service.engine.snapshot()
    except (EngineUnavailable, TimeoutError):
        return None
