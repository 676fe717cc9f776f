"""For `make docs`: what pages and docstrings write for readers of the repository."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|meth|func|attr|data):(?=<code>)")
# A file of the repository, which the site does not have.
ELSEWHERE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """See MkDocs: links to files outside of the pages become their text."""
    return ELSEWHERE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """See MkDocs: docstrings name things in Sphinx's way, of which the site shows the name."""
    return ROLE.sub("", html)
