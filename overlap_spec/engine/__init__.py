"""Requests in, constrained text out: input processor, request handles, and the engine itself.

``Engine`` loads on first use: the client's process reads the other modules without a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_spec.engine.engine import Engine as Engine


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from overlap_spec.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
