"""Output types: their JSON schemas, their texts, and the values of outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from overlap_spec.errors import GrammarError


def schema_of(source: Any) -> Any:
    """The JSON schema of a type, as pydantic writes and parses it (`type_schemas`).

    Raises:
        GrammarError: it is not a type, or has no JSON schema.
    """
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

    from overlap_spec.grammar.schemas.type_schemas import TypeSchemas

    if source is None:
        raise GrammarError("None is not a schema: give a dict, JSON text or a type", "schema")
    try:
        return TypeAdapter(source).json_schema(schema_generator=TypeSchemas)
    except PydanticInvalidForJsonSchema as error:
        raise GrammarError(f"{_name(source)} has no JSON schema: {error}", "schema") from error
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        # What follows its first line is for those who write pydantic's own types.
        reason = str(error).partition("\n")[0]
        raise GrammarError(
            f"{_name(source)} is not a schema: give a dict, JSON text, or a type such as a "
            f"pydantic model, a dataclass or list[int] ({reason})",
            "schema",
        ) from error


def value_of(output: Any, text: str) -> Any:
    """The member of a `Literal` or an Enum of texts with a given text.

    Raises:
        ValueError: there is none.
    """
    if isinstance(output, type) and issubclass(output, Enum):
        return output(text)
    if text not in get_args(output):
        raise ValueError(f"{text!r} is not one of {get_args(output)}")
    return text


def pattern_text(pattern: re.Pattern[Any]) -> str:
    """The source of a compiled pattern.

    Raises:
        GrammarError: it matches bytes, or has flags.
    """
    if not isinstance(pattern.pattern, str) or pattern.flags & ~re.UNICODE:
        raise GrammarError(f"{pattern!r}: give a str pattern without flags", "output_type")
    return pattern.pattern


def texts_of(output_type: Any) -> list[str] | None:
    """The texts of a `Literal` or an Enum of non-empty texts; None for any other type."""
    values: list[Any] = []
    if get_origin(output_type) is Literal:
        values = list(get_args(output_type))
    elif isinstance(output_type, type) and issubclass(output_type, Enum):
        values = [member.value for member in output_type]
    plain = values and all(isinstance(value, str) and value for value in values)
    return values if plain else None


def _name(source: Any) -> str:
    if isinstance(source, Mapping):
        return "a mapping"
    return getattr(source, "__name__", None) or repr(source)
