"""Flags that several commands share: fields of settings, with their types, defaults, help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from overlap_spec.cluster.settings import ROUTINGS, ClusterSettings
from overlap_spec.config import (
    ADDITIONAL_PROPERTIES,
    AUTO_MODE,
    DTYPES,
    OVERLAP_MODES,
    QUANTIZATIONS,
    EngineConfig,
    drafter_names,
    helps,
)
from overlap_spec.errors import ConfigError
from overlap_spec.load.settings import MODES, WORKLOADS
from overlap_spec.server.settings import ServerSettings

MODEL, SPECULATION, GRAMMAR = "Model", "Speculation", "Grammar"
BATCH, OUTPUT, SAMPLING = "Batch and memory", "Output", "Sampling"
ADDRESS, BOUNDS = "Address and access", "Bounds"
CLUSTER = "Replicas"


def _panels(words: Mapping[str, str]) -> dict[str, str]:
    return {name: panel for panel, names in words.items() for name in names.split()}


# Fields of the settings that are flags → their panel in the help.
ENGINE_FLAGS = _panels(
    {
        MODEL: "model dtype quantization device threads tensor_parallel_size context_length",
        SPECULATION: "algorithm draft num_steps eagle_topk num_draft_tokens adaptive "
        "tpot_slo_ms threshold_single threshold_acc relaxed_topk relaxed_delta",
        GRAMMAR: "overlap grammar_backend additional_properties complete",
        BATCH: "mem_fraction_static max_running_requests chunked_prefill_size",
    }
)
SERVING_ENGINE_FLAGS = _panels(
    {
        MODEL: "lora_modules",
        BATCH: "max_total_tokens memory_limit_bytes",
        GRAMMAR: "grammar_cache_bytes mask_deadline_ms mask_timeout_s",
        SPECULATION: "ngram_max_matching_size ngram_public_pool ngram_keep_all ngram_use_oldest "
        "ngram_pool_bytes slots_earlier",
    }
)
# Flags that the environment may have instead, which other processes cannot see.
FROM_ENVIRONMENT = ("api_key", "admin_api_key")
# `serve` declares the model's name itself: its default goes by the model.
SERVER_FLAGS = {
    name: BOUNDS if name.startswith("max_") or name.endswith("_s") else ADDRESS
    for name in ServerSettings.__dataclass_fields__
    if name != "served_model_name"
} | _panels({OUTPUT: "tool_call_parser reasoning_parser", GRAMMAR: "best_effort whitespace"})
SERVER_HELP = {name: help.text for name, help in helps(ServerSettings).items()}
CLUSTER_FLAGS = dict.fromkeys(ClusterSettings.__dataclass_fields__, CLUSTER)
# What a shell completes behind a flag.
VALUES: dict[str, Callable[[], list[str]]] = {
    "algorithm": lambda: [*drafter_names(), "none"],
    "additional_properties": lambda: list(ADDITIONAL_PROPERTIES),
    "overlap": lambda: [AUTO_MODE, *OVERLAP_MODES],
    "dtype": lambda: list(DTYPES),
    "quantization": lambda: list(QUANTIZATIONS),
    "routing": lambda: list(ROUTINGS),
    "device": lambda: ["auto", "cpu", "cuda"],
    "workload": lambda: list(WORKLOADS),
    "mode": lambda: list(MODES),
}
Command = TypeVar("Command", bound=Callable[..., Any])


def with_flags(settings: Any, flags: Mapping[str, str]) -> Callable[[Command], Command]:
    """Give a command fields of a settings class as flags, with their types, defaults and help.

    The command takes them as keywords. Of several decorators the lowest flags come first. A field
    that is a tuple is a flag that is repeated, named as one of its items.

    Args:
        flags: Names of fields → their panel in the help.
    """
    types, about = get_type_hints(settings), helps(settings)
    none = inspect.Parameter.empty
    defaults = {f.name: none if f.default is MISSING else f.default for f in fields(settings)}
    added = []
    for name, panel in flags.items():
        kind, default, own, text = types[name], defaults[name], about[name].flags, about[name].text
        if kind == tuple[str, ...]:
            kind, default = list[str], []
            own = own or (f"--{one_of(name).replace('_', '-')}",)
            text += " Repeat it."
        elif name == "whitespace":
            kind = str
        option = typer.Option(
            *own,
            help=text,
            rich_help_panel=panel,
            autocompletion=VALUES.get(name),
            envvar=f"OVERLAP_SPEC_{name.upper()}" if name in FROM_ENVIRONMENT else None,
        )
        added.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, option],
            )
        )

    def add(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return command

    return add


def one_of(name: str) -> str:
    """The name of one item of a field that has several."""
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")


def engine_flags(*names: str) -> dict[str, str]:
    """Some of :data:`ENGINE_FLAGS`."""
    return {name: ENGINE_FLAGS[name] for name in names}


with_engine = with_flags(EngineConfig, ENGINE_FLAGS)


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of the command's flags from a file.

    Raises:
        ConfigError: the file cannot be read, or a key is not a flag.
    """
    if path is not None:
        context.default_map = config_values(path, context.command.params)
    return path


def _as_flags(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """A file of TensorRT-LLM's with its speculation in this project's names; others as they are."""
    if "speculative_config" not in data:
        return data
    from overlap_spec.tensorrt_llm import settings_of

    rest = {name: value for name, value in data.items() if name != "speculative_config"}
    if rest.pop("disable_overlap_scheduler", False):
        rest["overlap"] = "none"
    try:
        return rest | settings_of(data["speculative_config"])
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None


def config_values(path: Path, params: Any) -> dict[str, Any]:
    """Values of a YAML or TOML file by parameter name; keys are flags, with or without dashes."""
    import tomllib

    import yaml

    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeError, yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: a mapping of flags to values is expected")
    data = _as_flags(path, data)
    names = {}
    for param in params:
        for flag in [param.name, *param.opts]:
            names[flag.lstrip("-").replace("-", "_")] = param
    values = {}
    for key, value in data.items():
        param = names.get(str(key).lstrip("-").replace("-", "_"))
        if param is None or param.name in ("config", "help"):
            raise ConfigError(f"--config {path}: unknown key {key!r}; keys are named as the flags")
        if isinstance(value, list) != (param.multiple is True):
            raise ConfigError(f"--config {path}: {key}: one value or a list, as the flag takes it")
        values[param.name] = value
    return values
