"""Tool calls: what a format is, what callers ask for, and replies read back.

`read_tools` makes the canonical source of `Grammar.tools`, `structural.py` lowers it,
`tool_stream.py` reads replies while they come. One file in `tool_formats/` a format.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlap_spec.errors import GrammarError

if TYPE_CHECKING:
    from overlap_spec.grammar.spec import Grammar

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True)
class ToolFormat:
    """How a model spells its calls. A reply with calls is, without the spaces:

        opening begin NAME middle ARGUMENTS end (separator begin NAME middle ARGUMENTS end)* close

    Args:
        starts: Texts that start calls; every opening + `begin` starts with one of them.
        anywhere: Whether calls may follow free text, which then holds none of `starts`. If not,
            calls stand at the start of the reply, and free text does not begin with `starts`.
        begin: Before the name.
        middle: Between name and arguments.
        end: After the arguments.
        openings: Texts, one of which stands before the first call.
        separator: Between two calls: white space, with at most one other character.
        close: After the last call: nothing, or one character.
        markers: Parts that are single tokens, often special ones, in real tokenizers.
    """

    starts: tuple[str, ...]
    anywhere: bool
    begin: str
    middle: str
    end: str
    openings: tuple[str, ...] = ("",)
    separator: str = ""
    close: str = ""
    markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the JSON text as the model wrote it; it is partial where
    `is_whole` is false, which a reply that was cut off can have as its last call."""

    name: str
    arguments: str
    is_whole: bool = True


@dataclass(frozen=True)
class ToolReply:
    """A reply: `content` is the text outside of calls; `parsed` is the value of the grammar that
    stood in place of calls (`Grammar.tools(otherwise=…)`), where there are none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    parsed: Any = None


def load_format(name: str) -> ToolFormat:
    """A format by its file's name (hyphen is underscore, case does not matter), or
    `"package.module:NAME"`.

    Raises:
        GrammarError: there is none.
    """
    from overlap_spec.grammar import tool_formats

    if not isinstance(name, str):
        raise GrammarError(f"{name!r} is not the name of a tool format", "tool_format")
    module_name, colon, attribute = name.partition(":")
    if colon:
        try:
            found = getattr(importlib.import_module(module_name), attribute, None)
        except ImportError as error:
            raise GrammarError(f"tool format {name!r}: {error}", "tool_format") from error
    else:
        wanted = name.lower().replace("-", "_")
        if wanted not in tool_formats.names():
            known = ", ".join(tool_formats.names())
            raise GrammarError(f"unknown tool format {name!r}; there are: {known}", "tool_format")
        found = importlib.import_module(f"{tool_formats.__name__}.{wanted}").FORMAT
    if not isinstance(found, ToolFormat):
        raise GrammarError(f"{name!r} is not a tool format: it must be a ToolFormat", "tool_format")
    return found


def parse_reply(text: str, format: str | ToolFormat) -> ToolReply:
    """A whole reply, read back. What is not spelled as a call is content, unchanged; white space
    between the parts of a call is free, whatever the format asks for when generating."""
    from overlap_spec.grammar.tool_stream import CallStream

    stream = CallStream(format)
    stream.push(text)
    stream.finish()
    return stream.reply


def reply_of(grammar: Grammar, text: str) -> ToolReply:
    """What `Grammar.parse` returns for tools.

    Raises:
        ValueError: the last call is cut off, or the text is not valid under `otherwise`.
    """
    reply = parse_reply(text, json.loads(grammar.source)["format"])
    if reply.calls and not reply.calls[-1].is_whole:
        raise ValueError(f"the call of {reply.calls[-1].name} is cut off")
    if grammar.inner is None or reply.calls:
        return reply
    return ToolReply(text, parsed=grammar.inner.parse(text))


def read_tools(
    tools: Sequence[Any], choice: Any, parallel: bool, format: str, strict: bool | None
) -> dict[str, Any]:
    """The canonical description of a request's tools: `tools` as `[name, parameters, strict]`,
    `choice` as `"auto"`, `"required"`, `"none"`, or `["name"]` of the one to call.

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
            raise GrammarError(f"tools[{i}].function.name: {name!r} is there twice", "tools")
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
    from overlap_spec.grammar.spec import check_schema

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
        raise GrammarError(f"{path}.parameters: a schema is an object", "tools")
    if parameters.get("type", "object") != "object":
        raise GrammarError(f'{path}.parameters.type: arguments are an "object"', "tools")
    # Arguments are an object also where the schema does not say so.
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
            f"{path}: {name!r} is none of the tools ({', '.join(names)})", "tool_choice"
        )
    return name


def _only(value: Mapping[str, Any], known: set[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise GrammarError(f"{path}.{key} is unknown", path.partition("[")[0].partition(".")[0])
