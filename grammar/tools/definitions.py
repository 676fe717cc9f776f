"""Validates a request's tools.

`read_tools` makes the canonical source of `Grammar.tools`, `lowering/composite.py` lowers it, and
`stream.py` parses replies. `formats/` has one file per format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.schemas.functions import as_tool, is_function
from overlap_spec.grammar.schemas.metaschema import check_schema
from overlap_spec.grammar.tools.formats import load_format

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def read_tools(
    tools: Sequence[Any], choice: Any, parallel: bool, format: str, strict: bool | None
) -> dict[str, Any]:
    """The canonical description of a request's tools: `tools` as `[name, parameters, strict]`,
    `choice` as `"auto"`, `"required"`, `"none"`, or `["name"]` of the tool to call.

    Raises:
        GrammarError: names the field at fault.
    """
    load_format(format)
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence) or not tools:
        raise GrammarError("tools must be a list of at least one tool", "tools")
    found = [_read_tool(tool, f"tools[{i}]", strict) for i, tool in enumerate(tools)]
    names: dict[str, None] = {}
    for i, (name, *_) in enumerate(found):
        if name in names:
            raise GrammarError(f"tools[{i}].function.name: {name!r} is a duplicate", "tools")
        names[name] = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _read_allowed(choice, names)
        found = [tool for tool in found if tool[0] in allowed]
    return {
        "tools": found,
        "choice": _read_choice(choice, names),
        "parallel": bool(parallel),
        "format": format,
    }


def _read_tool(tool: Any, path: str, strict: bool | None) -> list[Any]:
    if is_function(tool):
        tool = as_tool(tool)
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise GrammarError(f'{path} must be {{"type": "function", "function": {{…}}}}', "tools")
    _only(tool, {"type", "function"}, path)
    if tool.get("type", "function") != "function":
        raise GrammarError(f'{path}.type: {tool["type"]!r} is not "function"', "tools")
    function, path = tool["function"], f"{path}.function"
    _only(function, {"name", "description", "parameters", "strict"}, path)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise GrammarError(
            f"{path}.name: {name!r} is not 1 to 64 letters, digits, '_', '-' and '.'", "tools"
        )
    own = function.get("strict")
    if not isinstance(own, bool | None):
        raise GrammarError(f"{path}.strict: {own!r} is not true or false", "tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise GrammarError(f"{path}.parameters: must be an object", "tools")
    if parameters.get("type", "object") != "object":
        raise GrammarError(f'{path}.parameters.type: must be "object"', "tools")
    # Arguments are an object even if the schema does not say so.
    schema = dict(parameters) if "$ref" in parameters else {"type": "object", **parameters}
    try:
        check_schema(schema)
    except GrammarError as error:
        raise GrammarError(f"{path}.parameters: {error}", "tools") from error
    return [name, schema, bool(own if strict is None else strict)]


def _read_allowed(choice: Mapping[str, Any], names: Mapping[str, None]) -> tuple[str, set[str]]:
    _only(choice, {"type", "allowed_tools"}, "tool_choice")
    path, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise GrammarError(f'{path} needs a mode, "auto" or "required"', "tool_choice")
    _only(allowed, {"mode", "tools"}, path)
    tools = allowed.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise GrammarError(f"{path}.tools must be a list of at least one tool", "tool_choice")
    return str(allowed["mode"]), {
        _named(tool, f"{path}.tools[{i}]", names) for i, tool in enumerate(tools)
    }


def _read_choice(choice: Any, names: Mapping[str, None]) -> str | list[str]:
    if choice in ("auto", "required", "none"):
        return str(choice)
    return [_named(choice, "tool_choice", names)]


def _named(choice: Any, path: str, names: Mapping[str, None]) -> str:
    """The name of one of the tools, or of `{"type": "function", "function": {"name": …}}`."""
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping):
            raise GrammarError(
                f'{path} must be {{"type": "function", "function": {{"name": …}}}}', "tool_choice"
            )
        _only(choice, {"type", "function"}, path)
        _only(function, {"name"}, f"{path}.function")
        name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise GrammarError(
            f"{path}: {name!r} is not one of the tools ({', '.join(names)})", "tool_choice"
        )
    return name


def _only(value: Mapping[str, Any], known: set[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise GrammarError(f"{path}.{key} is unknown", path.partition("[")[0].partition(".")[0])
