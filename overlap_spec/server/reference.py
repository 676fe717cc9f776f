"""The routes and their fields as tables, from the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

REF = "#/components/schemas/"


@dataclass(frozen=True)
class FieldRow:
    """A field of a body, or a parameter of a path or query; ``about`` is one line."""

    name: str
    type: str
    about: str


@dataclass(frozen=True)
class Table:
    """A route, or an object inside bodies.

    Attributes:
        title: Method and path, or the object's name.
        about: One line.
        rows: Its fields.
        refused: Fields of other servers that are refused by name → what to do instead.
    """

    title: str
    about: str
    rows: tuple[FieldRow, ...]
    refused: dict[str, str]


def tables(document: dict[str, Any]) -> tuple[list[Table], list[Table]]:
    """The routes of an OpenAPI document, and the objects inside their bodies by name."""
    schemas = document["components"]["schemas"]
    routes, bodies = [], set[str]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title, about = f"{method.upper()} {path}", operation["summary"]
            name = _body(operation)
            if name is None:
                rows = tuple(_parameters(operation))
                routes.append(Table(title, about, rows, {}))
                continue
            bodies.add(name)
            schema = schemas[name]
            refused = schema.get("x-refused", {})
            routes.append(Table(title, about, tuple(_fields(schema)), refused))
    parts = [
        Table(name, _line(schema), tuple(_fields(schema)), schema.get("x-refused", {}))
        for name, schema in sorted(schemas.items())
        if name not in bodies and not name.endswith("Error")
    ]
    return routes, parts


def _body(operation: dict[str, Any]) -> str | None:
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref")
    return None if reference is None else str(reference).removeprefix(REF)


def _parameters(operation: dict[str, Any]) -> Iterator[FieldRow]:
    for given in operation.get("parameters", ()):
        about = f"In the {given['in']}."
        yield FieldRow(given["name"], _type(given["schema"]), about)


def _fields(schema: dict[str, Any]) -> Iterator[FieldRow]:
    required, properties = schema.get("required", ()), schema.get("properties", {})
    for name in sorted(properties, key=lambda name: name not in required):
        inner = properties[name]
        notes = ["Required." if name in required else "", _line(inner)]
        yield FieldRow(name, _type(inner), " ".join(filter(None, notes)))


def _line(schema: dict[str, Any]) -> str:
    return " ".join(schema.get("description", "").split())


def _type(schema: dict[str, Any]) -> str:
    """A schema in words, such as ``string | list of integer (at least 1)``."""
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


def markdown(document: dict[str, Any]) -> str:
    """All tables as Markdown."""
    routes, parts = tables(document)
    lines = ["## Routes", ""]
    for table in routes:
        lines += _section(table)
    lines += ["## Objects", ""]
    for table in parts:
        lines += _section(table)
    return "\n".join(lines).rstrip() + "\n"


def _section(table: Table) -> list[str]:
    lines = [f"### {table.title}", ""]
    if table.about:
        lines += [table.about, ""]
    if table.rows:
        lines += ["| field | type | |", "|---|---|---|"]
        for row in table.rows:
            kind = row.type.replace("|", "\\|")
            lines.append(f"| `{row.name}` | {kind} | {row.about.replace('|', chr(92) + '|')} |")
        lines.append("")
    if table.refused:
        told = "; ".join(f"`{name}` ({why})" for name, why in table.refused.items())
        lines += [f"Refused by name: {told}.", ""]
    return lines
