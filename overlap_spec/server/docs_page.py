"""``/docs``: the routes and their fields as one page, which needs nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from starlette.responses import HTMLResponse, Response

from overlap_spec.server.reference import Table, tables

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8884; padding: .25rem .5rem; text-align: left;
  vertical-align: top }
summary { cursor: pointer; padding: .3rem 0 }
code { font-family: ui-monospace, monospace }
:root { color-scheme: light dark }
"""


def docs_page(document: dict[str, Any]) -> Response:
    """The page of an OpenAPI document."""
    routes, parts = tables(document)
    title = f"{escape(document['info']['title'])}: HTTP API"
    body = [f"<h1>{title}</h1>", '<p><a href="openapi.json">openapi.json</a></p>']
    body += ["<h2>Routes</h2>", *(_details(table) for table in routes)]
    body += ["<h2>Objects</h2>", *(_details(table) for table in parts)]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width">'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'
    return HTMLResponse(page)


def _details(table: Table) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(row.name)}</code></td><td>{escape(row.type)}</td>"
        f"<td>{escape(row.about)}</td></tr>"
        for row in table.rows
    )
    refused = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>refused</td><td>{escape(why)}</td></tr>"
        for name, why in table.refused.items()
    )
    inside = f"<table>{rows}{refused}</table>" if rows or refused else ""
    head = f"<summary><code>{escape(table.title)}</code> {escape(table.about)}</summary>"
    return f"<details>{head}{inside}</details>"
