"""Prints what ``docs/http.md`` has of the server's routes: ``python -m`` this module."""

from __future__ import annotations

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.server.app import create_app
from overlap_spec.server.reference import markdown
from overlap_spec.server.settings import ServerSettings

if __name__ == "__main__":
    # The engine is never started.
    print(markdown(create_app(AsyncEngine(), ServerSettings()).openapi()), end="")
