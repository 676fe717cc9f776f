"""JSON schemas of types that hold what pydantic itself checks.

Pydantic's own schemas say less than its parser asks: any string for a Decimal, any URI for an
`HttpUrl`, a leap second in a datetime. A text under such a schema would not parse. Here these types
have patterns of what parses; all that pydantic dumps is among it, but for Decimals with a bound,
which are numbers here, and URLs of over some hundred characters.
"""

from __future__ import annotations

import re
from contextlib import suppress
from decimal import Decimal
from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from overlap_spec.grammar.automata.dialect import explicit
from overlap_spec.grammar.schemas.formats import BYTE, DATE, HEX, HOUR, MINUTE, PYDANTIC_MAIL

_TIME = rf"{HOUR}:{MINUTE}:{MINUTE}(\.[0-9]{{1,6}})?"
_ZONE = rf"(Z|[+\-]{HOUR}:{MINUTE})"
_ZONES = {"aware": _ZONE, "naive": ""}
# Up to some 9,000 years of days, which a timedelta holds.
_N = "[0-9]{1,3}"
_SECONDS = rf"{_N}(\.[0-9]{{1,6}})?S"
_CLOCK = f"T({_N}H({_N}M)?({_SECONDS})?|{_N}M({_SECONDS})?|{_SECONDS})"
_DURATION = (
    rf"-?P([0-9]{{1,4}}Y({_N}M)?({_N}D)?({_CLOCK})?|{_N}M({_N}D)?({_CLOCK})?"
    rf"|{_N}W|[0-9]{{1,6}}D({_CLOCK})?|{_CLOCK})"
)
_PART = r"([0-9]{1,15}(\.[0-9]{1,15})?)"
_COMPLEX = rf"-?{_PART}([+\-]{_PART}j)?"

_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,20}"
_HOST = rf"(({_LABEL}\.){{0,4}}[A-Za-z](-?[A-Za-z0-9]){{0,20}}|{BYTE}(\.{BYTE}){{3}})"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4})"
_CHAR = rf"([A-Za-z0-9\-._~!$&'()*+,;=:@]|%{HEX}{{2}})"
_USER = rf"(([A-Za-z0-9\-._~]|%{HEX}{{2}}){{1,40}}(:([A-Za-z0-9\-._~]|%{HEX}{{2}}){{0,40}})?@)?"
_AFTER = rf"(/({_CHAR}|/){{0,100}})?(\?({_CHAR}|[/?]){{0,100}})?(#({_CHAR}|[/?]){{0,60}})?"
_LONGEST_URL = 1500
_ANY_SCHEME = r"[A-Za-z][A-Za-z0-9+\-]{0,20}"
_OPAQUE = rf"(mailto|tel|urn):{_CHAR}{{1,200}}"


_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")
# Keys that are no texts, by their type and bound.
_WHOLE = "[1-9][0-9]*"
_KEYS = {
    ("int", None): f"0|-?{_WHOLE}",
    ("int", "ge"): f"0|{_WHOLE}",
    ("int", "gt"): _WHOLE,
    ("int", "le"): f"0|-{_WHOLE}",
    ("int", "lt"): f"-{_WHOLE}",
    ("float", None): rf"-?(0|{_WHOLE})(\.[0-9]+)?(e[+\-]?[0-9]{{1,2}})?",
    ("bool", None): "true|false",
}


class TypeSchemas(GenerateJsonSchema):
    """Pydantic's generator, with what its parser asks of some types."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        found = super().generate_inner(schema)
        # An `EmailStr` says no more of itself than this, and takes less than the format's RFC.
        return {**found, "format": PYDANTIC_MAIL} if found.get("format") == "email" else found

    def str_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().str_schema(schema)
        with suppress(re.error, KeyError):
            # Pydantic's parser has other letters, digits and spaces than ECMA-262.
            both = explicit(found["pattern"], "both")
            if both != explicit(found["pattern"], "ecma"):
                found["pattern"] = both
        return found

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        zone = _ZONES.get(schema.get("tz_constraint"), f"{_ZONE}?")
        return _pattern(f"{DATE}T{_TIME}{zone}")

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        return _pattern(_TIME + _ZONES.get(schema.get("tz_constraint"), f"{_ZONE}?"))

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:  # noqa: ARG002
        return _pattern(_DURATION)

    def complex_schema(self, schema: Any) -> JsonSchemaValue:  # noqa: ARG002
        return _pattern(_COMPLEX)

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        schemes, most = schema.get("allowed_schemes"), schema.get("max_length")
        if most is not None and most < _LONGEST_URL:
            reason = f"a URL of at most {most} characters is not supported"
            raise PydanticInvalidForJsonSchema(reason)
        if schemes == ["file"]:
            return _pattern(f"file://(/{_CHAR}{{1,60}}){{1,10}}")
        text = f"{_schemes(schemes)}://{_USER}{_HOST}(:{_PORT})?{_AFTER}"
        return _pattern(text if schemes else f"({text}|{_OPAQUE})")

    def multi_host_url_schema(self, schema: Any) -> JsonSchemaValue:
        host = f"{_HOST}(:{_PORT})?"
        schemes = _schemes(schema.get("allowed_schemes"))
        return _pattern(f"{schemes}://{_USER}{host}(,{host}){{0,4}}{_AFTER}")

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        keys = schema.get("keys_schema")
        if keys is None:
            return found
        pattern = self.generate_inner(keys).get("pattern")
        if pattern is not None:
            # Pydantic's schema lets further keys through.
            found["propertyNames"] = {"type": "string", "pattern": pattern}
        if keys.get("type") in ("int", "float", "bool"):
            bounds = [name for name in _BOUNDS if keys.get(name) is not None]
            text = _KEYS.get((keys["type"], bounds[0] if bounds else None))
            if text is None or len(bounds) > 1 or any(keys[name] != 0 for name in bounds):
                raise PydanticInvalidForJsonSchema("keys that are numbers may be bounded by 0 only")
            found["propertyNames"] = _pattern(text)
        return found

    def json_schema(self, schema: Any) -> JsonSchemaValue:  # noqa: ARG002
        raise PydanticInvalidForJsonSchema("JSON inside a string (pydantic.Json) is not supported")

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().decimal_schema(schema)
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        ways: list[JsonSchemaValue] = found["anyOf"]
        number = next(way for way in ways if way.get("type") == "number")
        if places is not None and "multipleOf" not in number:
            number["multipleOf"] = float(Decimal(1).scaleb(-places))
        whole = 28 if digits is None else max(digits - (places or 0), 0)
        if digits is not None:
            top = float(10**whole)
            number.setdefault("exclusiveMinimum", -top)
            number.setdefault("exclusiveMaximum", top)
            if places is None:
                number["multipleOf"] = 1
        if any(schema.get(name) is not None for name in _BOUNDS):
            return number
        most = 28 if places is None and digits is None else places or 0
        before = f"(0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        text = f"-?{before}" + (rf"(\.[0-9]{{1,{most}}})?" if most else "")
        return {"anyOf": [number, _pattern(text)]}


def _schemes(allowed: list[str] | None) -> str:
    return f"({'|'.join(map(re.escape, allowed))})" if allowed else _ANY_SCHEME


def _pattern(text: str) -> JsonSchemaValue:
    return {"type": "string", "pattern": f"^({text})$"}
