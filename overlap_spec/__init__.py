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

_HOMES = {
    "AsyncEngine": "async_engine",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Delta": "types",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineUnavailable": "errors",
    "Generator": "generator",
    "Grammar": "grammar.spec",
    "GrammarError": "errors",
    "InvalidRequest": "errors",
    "Output": "types",
    "OverlapSpecError": "errors",
    "QueueFull": "errors",
    "RequestFailed": "errors",
    "SamplingParams": "types",
    "Verdict": "types",
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
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
