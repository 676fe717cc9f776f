"""Arguments of the application, as values or as text, to settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from overlap_spec.cluster.settings import ClusterSettings
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError, unknown
from overlap_spec.server.launch import ServerPlan, chat_template_of, plan
from overlap_spec.server.settings import ServerSettings

# Of the HTTP server, which is Ray Serve's, or of the command alone.
ELSEWHERE = {
    "host": "http_options of Ray Serve",
    "port": "http_options of Ray Serve",
    "ssl_certfile": "http_options of Ray Serve",
    "ssl_keyfile": "http_options of Ray Serve",
    "max_connections": "a proxy in front of Ray Serve",
    "trusted_proxies": "a proxy in front of Ray Serve",
    "header_timeout_s": "a proxy in front of Ray Serve",
    "idle_timeout_s": "keep_alive_timeout_s in http_options of Ray Serve",
    "ray_address": "the cluster that Ray Serve runs on",
}


def read_arguments(arguments: dict[str, Any]) -> tuple[ServerPlan, ClusterSettings]:
    """The settings that flags of ``overlap-spec serve``, by their names in Python, ask for.
    ConfigError names one that is unknown or wrong."""
    types: dict[str, Any] = {}
    for settings in (EngineConfig, ServerSettings, ClusterSettings):
        types |= get_type_hints(settings)
    types |= {"chat_template": Path | None, "served_model_name": str | None}
    # Ray Serve listens, on an address that this application is not told.
    values: dict[str, Any] = {"host": "0.0.0.0", "replicas": 1}
    for name, given in arguments.items():
        if name in ELSEWHERE:
            raise ConfigError(f"{name} is not the application's: set it for {ELSEWHERE[name]}")
        if name not in types:
            raise ConfigError(unknown("argument", name, types.keys() - ELSEWHERE))
        values[name] = _typed(name, given, types[name])
    known = ClusterSettings.__dataclass_fields__
    cluster = {name: values.pop(name) for name in known if name in values}
    values["chat_template"] = chat_template_of(values.get("chat_template"))
    return plan(**values), ClusterSettings(**cluster)


def _typed(name: str, given: Any, kind: Any) -> Any:
    # Text stands for any value on a command line: `none` for nothing.
    if isinstance(given, str) and given.lower() == "none":
        given = None
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ConfigError(f"{name}: {given!r}: {why}") from None
