"""``python -m overlap_spec.server.print_reference`` prints the tables of ``docs/http.md``."""

from __future__ import annotations

from typing import Any

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.server.app import create_app
from overlap_spec.server.reference import markdown
from overlap_spec.server.settings import ServerSettings


def document() -> dict[str, Any]:
    """The server's OpenAPI document; needs no engine that runs."""
    return create_app(AsyncEngine(), ServerSettings()).openapi()


if __name__ == "__main__":
    print(markdown(document()), end="")
