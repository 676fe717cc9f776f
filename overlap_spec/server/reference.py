"""The routes and their fields in Markdown, from the server's OpenAPI document.

``python -m overlap_spec.server.app`` prints it for ``docs/http.md``, and ``/docs`` shows it.
FastAPI's own pages load their scripts from another host, which a server without a way out does not
reach, and which would read what its users write.
"""

from __future__ import annotations

from html import escape
from typing import Any

from overlap_spec.server.protocol.base import Constraint, Sampling

# Fields that most bodies have, which are shown once.
COMMON = {*Sampling.model_fields, *Constraint.model_fields}
COMMON_TITLE, COMMON_PLACE = "Sampling and constraints", "sampling-and-constraints"
COMMON_ABOUT = f"And all fields of [{COMMON_TITLE.lower()}](#{COMMON_PLACE})."
REF = "#/components/schemas/"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8884; padding: .25rem .5rem; text-align: left;
  vertical-align: top }
code { font-family: ui-monospace, monospace }
:root { color-scheme: light dark }
"""


def page(document: dict[str, Any]) -> str:
    """The page ``/docs`` of an OpenAPI document."""
    from markdown_it import MarkdownIt

    title = escape(f"{document['info']['title']}: HTTP API")
    body = MarkdownIt("js-default").render(markdown(document))
    body = body.replace(f"<h2>{COMMON_TITLE}", f'<h2 id="{COMMON_PLACE}">{COMMON_TITLE}')
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width">'
    top = f'<h1>{title}</h1><p><a href="openapi.json">openapi.json</a></p>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{top}{body}</body></html>'


def markdown(document: dict[str, Any]) -> str:
    """The routes of an OpenAPI document, and the objects inside their bodies by name."""
    schemas = document["components"]["schemas"]
    lines, bodies = ["## Routes", ""], set[str]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = _body(operation)
            bodies.add(name)
            given = schemas[name] if name else _parameters(operation)
            lines += _section(f"{method.upper()} {path}", operation["summary"], given)
    lines += [f"## {COMMON_TITLE}", ""]
    every = next(each["properties"] for each in schemas.values() if _is_common(each))
    lines += _rows({"properties": {name: every[name] for name in every if name in COMMON}})
    lines += ["## Objects", ""]
    for name, schema in sorted(schemas.items()):
        if name not in bodies and not name.endswith("Error"):
            lines += _section(name, _line(schema), schema)
    return "\n".join(lines).rstrip() + "\n"


def _body(operation: dict[str, Any]) -> str:
    """The name of an operation's body; empty where it has none."""
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return str(reference).removeprefix(REF)


def _parameters(operation: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a path or query as an object's fields."""
    given = operation.get("parameters", ())
    return {
        "properties": {
            each["name"]: each["schema"] | {"description": f"In the {each['in']}."}
            for each in given
        }
    }


def _section(title: str, about: str, schema: dict[str, Any]) -> list[str]:
    """A route, or an object inside bodies, with its fields and those that it refuses."""
    lines = [f"### {title}", "", *([about, ""] if about else [])]
    if _is_common(schema):
        own = {name: one for name, one in schema["properties"].items() if name not in COMMON}
        lines += [*_rows(schema | {"properties": own}), COMMON_ABOUT, ""]
    else:
        lines += _rows(schema)
    if refused := schema.get("x-refused"):
        told = [f"`{name}` ({why})" for name, why in refused.items()]
        lines += [f"Refused by name: {'; '.join(told)}.", ""]
    return lines


def _is_common(schema: dict[str, Any]) -> bool:
    return set(schema.get("properties", {})) >= COMMON


def _rows(schema: dict[str, Any]) -> list[str]:
    """The fields of an object as a table."""
    required, properties = schema.get("required", ()), schema.get("properties", {})
    if not properties:
        return []
    lines = ["| field | type | |", "|---|---|---|"]
    for name in sorted(properties, key=lambda name: name not in required):
        told = ["Required." if name in required else "", _line(properties[name])]
        cells = (_type(properties[name]), " ".join(filter(None, told)))
        kind, said = (cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| `{name}` | {kind} | {said} |")
    return [*lines, ""]


def _line(schema: dict[str, Any]) -> str:
    return " ".join(schema.get("description", "").split())


def _type(schema: dict[str, Any]) -> str:
    """A schema in words, such as ``string | list of integer``."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            kinds = [_type(each) for each in schema[name]]
            return " | ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(_value(value) for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(kind)


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
