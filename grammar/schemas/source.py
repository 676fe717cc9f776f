"""The source of a grammar: JSON input, and its canonical text."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from overlap_spec.errors import GrammarError


def check_text(kind: str, text: str) -> None:
    """Check that a grammar's source is text that UTF-8 can encode.

    Raises:
        GrammarError: a surrogate without its partner.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise GrammarError(
            f"the {kind} grammar has {half!r}, half a surrogate pair, which is not text", kind
        ) from error


def canonical(schema: Any) -> str:
    """A JSON value as compact text.

    Raises:
        GrammarError: the value is not JSON.
    """
    # Keeps the order of keys: members are written in that order.
    try:
        return json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}", "schema") from error


def read_json(text: str, param: str = "schema") -> Any:
    """Parse JSON; `param` names the field in errors.

    Raises:
        GrammarError: it is not JSON, or nested too deep.
    """
    what = param.replace("_", " ")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"the {what} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}", param
        ) from error
    except RecursionError as error:
        raise GrammarError(f"the {what} is nested too deep", param) from error


def json_path(path: str, *keys: str | int) -> str:
    """A path with keys appended: `$.properties.age`, `$.items[0]`, `$['a b']`."""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        else:
            plain = key.replace("$", "_").isidentifier()
            path += f".{key}" if plain else f"[{key!r}]"
    return path


def loads(text: str) -> Any:
    """JSON with numbers as Decimal."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def key_of(value: Any) -> str:
    """A key that equal JSON values share: 1 and 1.0 are equal, 1 and true are not.

    Args:
        value: As `loads` reads it.
    """
    if isinstance(value, Decimal) and value.is_finite():
        # Not by `normalize` or `abs`, which round to 28 digits.
        whole, _, fraction = f"{value.copy_abs():f}".partition(".")
        fraction = fraction.rstrip("0")
        sign = "-" if value < 0 else ""
        return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"
    if isinstance(value, list):
        return f"[{','.join(map(key_of, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{key_of(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value, ensure_ascii=False)
