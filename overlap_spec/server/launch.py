"""Starts a server from the flags of ``overlap-spec serve``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.tool_formats import guess_format
from overlap_spec.hub import find_folder, is_hub_name
from overlap_spec.server.run import serve
from overlap_spec.server.settings import ServerSettings, Whitespace
from overlap_spec.tokenizer import read_template

LEVELS = ("debug", "info", "warning", "error")
# Format of the embedded model's tool calls.
EMBEDDED_CALLS = "embedded"


def launch(
    *,
    chat_template: str | None,
    stall_timeout_s: float,
    log_level: str,
    cors_origin: list[str] | None,
    allowed_host: list[str] | None,
    mask_deadline_ms: float,
    served_model_name: str | None,
    tool_call_parser: str | None,
    whitespace: Whitespace,
    **flags: Any,
) -> None:
    """Serve with the flags of the command line; see ``overlap_spec.cli.serve``.

    Raises:
        ConfigError: names the flag at fault.
    """
    if log_level not in LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(LEVELS)}: {log_level!r}")
    model = flags["model"]
    if tool_call_parser is None:
        tool_call_parser = guess_parser(model, chat_template)
    known = {field.name for field in fields(EngineConfig)}
    server = {name: value for name, value in flags.items() if name not in known}
    settings = ServerSettings(
        **server,
        served_model_name=served_model_name or served_name(model),
        tool_call_parser=tool_call_parser,
        whitespace=whitespace,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
    )
    engine = AsyncEngine(
        chat_template=chat_template,
        max_queued_requests=settings.max_queued_requests,
        stall_timeout_s=stall_timeout_s,
        mask_deadline_ms=mask_deadline_ms or None,
        **{name: value for name, value in flags.items() if name in known},
    )
    serve(engine, settings, log_level)


def served_name(model: str | None) -> str:
    """What clients call the model: its hub name, or its folder's."""
    if model is None:
        return "overlap-spec"
    return model if is_hub_name(model) else Path(model).name


def guess_parser(model: str | None, chat_template: str | None) -> str | None:
    """The format of tool calls that the chat template shows, if it is one of the known."""
    if model is None:
        return EMBEDDED_CALLS
    template = chat_template or read_template(find_folder(model))
    return guess_format(template) if isinstance(template, str) else None
