"""The routes and their fields in Markdown, from the server's OpenAPI document.

``python -m overlap_spec.server.app`` prints it for ``docs/http.md``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_spec.server.protocol import Constraint, GenerationBody, OpenAIBody, Sampling

# Fields that several bodies have, which are shown once: title, whose they are, and their names.
COMMON = (*Sampling.model_fields, *Constraint.model_fields)
SHARED = (
    ("Sampling and constraints", "Every route that generates takes these.", frozenset(COMMON)),
    (
        "Under v1",
        "Every route under `/v1` that generates takes these.",
        frozenset(GenerationBody.model_fields) - set(COMMON),
    ),
    (
        "Of chats and texts",
        "`/v1/chat/completions` and `/v1/completions` take these.",
        frozenset(OpenAIBody.model_fields) - set(GenerationBody.model_fields),
    ),
)
# What holds where a field is not sent. A switch is off and all else is not there, unless it stands
# here; the model's is that of its generation_config.json.
DEFAULTS = {
    "temperature": "the model's, else 1",
    "top_p": "the model's, else 1",
    "top_k": "the model's, else -1 (all)",
    "repetition_penalty": "the model's, else 1",
    "min_p": "0",
    "presence_penalty": "0",
    "frequency_penalty": "0",
    "min_tokens": "0",
    "min_new_tokens": "0",
    "top_logprobs": "0",
    "top_logprobs_num": "0",
    "priority": "0",
    "n": "1",
    "best_of": "1",
    "seed": "drawn",
    "sampling_seed": "drawn",
    "model": "the served one",
    "max_tokens": "what the context leaves",
    "max_completion_tokens": "what the context leaves",
    "max_output_tokens": "what the context leaves",
    "max_new_tokens": "what the context leaves",
    "complete": "true, unless `--no-complete`",
    "speculate": "true",
    "thinking_budget": "no limit",
    "tpot_slo_ms": "`--tpot-slo-ms`",
    "cache_salt": "the API key",
    "tool_choice": "auto, with tools",
    "parallel_tool_calls": "true",
    "NamedSchema.strict": "true, unless `--best-effort`",
    "SchemaFormat.strict": "true, unless `--best-effort`",
    "disable_any_whitespace": "`--whitespace`",
    "additional_properties": "`--additional-properties`",
    "key_order": "schema",
    "formats": "assertion",
    "effort": "the template's",
    "reasoning_effort": "the template's",
    "thinking": "the template's",
    "rid": "drawn",
    "request_id": "drawn",
    "separate_reasoning": "true",
    "add_generation_prompt": "true",
}
REF = "#/components/schemas/"
URL = "http://127.0.0.1:30000"
# A value for each variable of a path; the model is the embedded one.
IN_PATHS = {"model": "overlap-spec", "response_id": "resp_1"}


def markdown(document: dict[str, Any]) -> str:
    """The routes of an OpenAPI document, and the objects inside their bodies by name."""
    schemas = document["components"]["schemas"]
    lines, bodies = ["## Routes", ""], set[str]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = _body(operation)
            bodies.add(name)
            given = schemas[name] if name else _parameters(operation)
            shown = _examples(method, path, given.get("examples", [None])[0])
            lines += _section(f"{method.upper()} {path}", _line(operation), given, shown)
    for title, about, names in SHARED:
        lines += [f"## {title}", "", about, ""]
        every = next(each["properties"] for each in schemas.values() if _has(each, names))
        lines += _rows({"properties": {name: every[name] for name in every if name in names}})
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
        "required": [each["name"] for each in given if each.get("required")],
        "properties": {
            each["name"]: each["schema"] | {"description": f"In the {each['in']}."}
            for each in given
        },
    }


def _examples(method: str, path: str, body: Mapping[str, Any] | None) -> list[str]:
    """A call of a route by curl."""
    for name, value in IN_PATHS.items():
        path = path.replace(f"{{{name}}}", value)
    curl = f"curl -s {URL}{path}"
    if body is not None:
        curl += f" \\\n  -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    elif method == "post":
        curl += " -X POST"
    return ["```bash", curl, "```", ""]


def _section(
    title: str, about: str, schema: dict[str, Any], shown: Sequence[str] = ()
) -> list[str]:
    """A route, or an object inside bodies, with its fields and those that it refuses."""
    lines = [f"### {title}", "", *([about, ""] if about else []), *shown]
    own = schema.get("properties", {})
    held = [(title, names) for title, _, names in SHARED if _has(schema, names)]
    for _, names in held:
        own = {name: one for name, one in own.items() if name not in names}
    lines += _rows(schema | {"properties": own})
    if held:
        places = [f"[{title.lower()}](#{title.lower().replace(' ', '-')})" for title, _ in held]
        lines += [f"And all fields of: {', '.join(places)}.", ""]
    if refused := schema.get("x-refused"):
        told = [f"`{name}` ({why})" for name, why in refused.items()]
        lines += [f"Refused by name: {'; '.join(told)}.", ""]
    return lines


def _has(schema: dict[str, Any], names: frozenset[str]) -> bool:
    return bool(names <= schema.get("properties", {}).keys())


def _rows(schema: dict[str, Any]) -> list[str]:
    """The fields of an object as a table."""
    required, properties = schema.get("required", ()), schema.get("properties", {})
    if not properties:
        return []
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name in sorted(properties, key=lambda name: name not in required):
        default = _default(schema.get("title", ""), name, properties[name])
        default = "required" if name in required else default
        cells = (f"`{name}`", _type(properties[name]), default, _line(properties[name]))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {row} |")
    return [*lines, ""]


def _default(whose: str, name: str, schema: dict[str, Any]) -> str:
    """What holds where a field is not sent; empty where that is nothing."""
    if schema.get("default") is not None:
        return _value(schema["default"])
    otherwise = "false" if _type(schema) == "boolean" else ""
    return DEFAULTS.get(f"{whose}.{name}", DEFAULTS.get(name, otherwise))


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
