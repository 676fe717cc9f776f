"""Starts a server from the flags of ``overlap-spec serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.tools.formats import guess_format
from overlap_spec.hub import find_folder, is_hub_name
from overlap_spec.server.run import serve
from overlap_spec.server.settings import ServerSettings
from overlap_spec.tokenizer import read_template

LEVELS = ("debug", "info", "warning", "error")
# Format of the embedded model's tool calls.
EMBEDDED_CALLS = "embedded"


@dataclass(frozen=True)
class ServerPlan:
    """What a server is made of, as plain data: this process need not be the one that runs it.

    Attributes:
        settings: The server's.
        engine: Arguments of :class:`AsyncEngine`.
    """

    settings: ServerSettings
    engine: dict[str, Any]

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, as far as they are known before it starts."""
        known = EngineConfig.__dataclass_fields__
        return EngineConfig.build(**{n: v for n, v in self.engine.items() if n in known})


def plan(**flags: Any) -> ServerPlan:
    """What flags of ``overlap-spec serve`` ask for.

    Args:
        flags: Fields of :class:`ServerSettings` and :class:`EngineConfig`, and ``chat_template``,
            which is its text; one that is not given has its default.

    Raises:
        ConfigError: names the flag at fault.
    """
    model, template = flags.get("model"), flags.pop("chat_template", None)
    flags["served_model_name"] = flags.get("served_model_name") or served_name(model)
    if flags.get("tool_call_parser") is None:
        flags["tool_call_parser"] = guess_parser(model, template)
    known = EngineConfig.__dataclass_fields__
    settings = ServerSettings(**{name: v for name, v in flags.items() if name not in known})
    engine = {name: value for name, value in flags.items() if name in known}
    if engine.get("mask_deadline_ms") == 0:
        engine["mask_deadline_ms"] = None
    engine |= {
        "model": model,
        "chat_template": template,
        "max_queued_requests": settings.max_queued_requests,
        "stall_timeout_s": settings.stall_timeout_s,
    }
    made = ServerPlan(settings, engine)
    if settings.served_model_name in made.config.adapters:
        name = settings.served_model_name
        raise ConfigError(f"lora_modules: {name!r} is the served model's name: take another")
    return made


def chat_template_of(path: Path | None) -> str | None:
    """The text of a file with a chat template; ConfigError if it cannot be read."""
    try:
        return None if path is None else path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"chat_template {path}: {error}") from None


def launch(plan: ServerPlan, log_level: str) -> None:
    """Serve one engine; see ``overlap_spec.cli.serve``; ConfigError names the flag at fault."""
    serve(AsyncEngine(**plan.engine), plan.settings, log_level)


def check_level(log_level: str) -> None:
    """Raise ConfigError if there is no such level."""
    if log_level not in LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(LEVELS)}: {log_level!r}")


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
