"""For `make docs`: docstrings name things in Sphinx's way, of which the site shows the name."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|meth|func|attr|data):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """See MkDocs."""
    return ROLE.sub("", html)
