"""overlap-spec: structured generation at speculative speed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_spec.async_engine import AsyncEngine
    from overlap_spec.config import EngineConfig
    from overlap_spec.engine import Engine
    from overlap_spec.errors import (
        CheckpointError,
        ConfigError,
        EngineUnavailable,
        GrammarError,
        InvalidRequest,
        OverlapSpecError,
        QueueFull,
        RequestFailed,
    )
    from overlap_spec.generator import Generator
    from overlap_spec.grammar.spec import Grammar
    from overlap_spec.types import Delta, Output, SamplingParams, Verdict

__version__ = "0.1.0"

# What is no error.
_HOMES = {
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineConfig": "config",
    "Generator": "generator",
    "Grammar": "grammar.spec",
    **dict.fromkeys(("Delta", "Output", "SamplingParams", "Verdict"), "types"),
}

__all__ = [
    "AsyncEngine",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineUnavailable",
    "Generator",
    "Grammar",
    "GrammarError",
    "InvalidRequest",
    "Output",
    "OverlapSpecError",
    "QueueFull",
    "RequestFailed",
    "SamplingParams",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    # Names load on first use, so that `import overlap_spec` needs neither torch nor a grammar.
    if name in __all__:
        home = _HOMES.get(name, "errors")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
