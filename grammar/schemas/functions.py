"""Plain functions as types and tools: what their signatures and docstrings say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NotRequired, get_type_hints

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.schemas.outputs import schema_of

Function = Callable[..., Any]
# What only a call by position, or of any number of arguments, could fill.
_NAMELESS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


# Whether a value is a function or a method, and no type.
is_function = inspect.isroutine


def arguments_type(function: Function) -> Any:
    """A TypedDict of a function's arguments by name, of which those with a default may be absent.

    Raises:
        GrammarError: an argument has no name, or an annotation that means nothing.
    """
    from pydantic import ConfigDict
    from typing_extensions import TypedDict

    fields: dict[str, Any] = {}
    for name, parameter in _parameters(function).items():
        has_default = parameter.default is not inspect.Parameter.empty
        fields[name] = NotRequired[parameter.annotation] if has_default else parameter.annotation
    # Type checkers want the name and fields of each TypedDict in the source.
    make: Any = TypedDict
    made = make(_name(function), fields)
    made.__pydantic_config__ = ConfigDict(extra="forbid")
    made.__doc__ = inspect.getdoc(function)
    return made


def as_tool(function: Function) -> dict[str, Any]:
    """OpenAI's tool definition of a function: its name, docstring and arguments.

    Raises:
        GrammarError: as :func:`arguments_type`, or an annotation has no JSON schema.
    """
    from pydantic import TypeAdapter

    schema = schema_of(arguments_type(function))
    for name in ("title", "description"):
        schema.pop(name, None)
    for name, parameter in _parameters(function).items():
        if parameter.default is not inspect.Parameter.empty:
            # One that JSON cannot write is the function's own affair.
            with suppress(Exception):
                adapter = TypeAdapter[Any](type(parameter.default))
                written = adapter.dump_python(parameter.default, mode="json")
                schema["properties"][name]["default"] = written
    told = {"name": _name(function), "parameters": schema}
    about = inspect.getdoc(function)
    if about:
        told["description"] = about
    return {"type": "function", "function": told}


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    """A function's parameters by name, with what their annotations stand for."""
    name = _name(function)
    try:
        given, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (ValueError, TypeError, NameError) as error:
        raise GrammarError(f"the arguments of {name} are not known: {error}", "schema") from error
    found = {}
    for parameter in given.parameters.values():
        if parameter.kind in _NAMELESS:
            raise GrammarError(
                f"{name}: {str(parameter)!r} has no name that a JSON object could have: give the "
                "function named arguments alone",
                "schema",
            )
        annotation = hints.get(parameter.name, Any)
        found[parameter.name] = parameter.replace(annotation=annotation)
    return found


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", None) or repr(function))
