"""Validates structural tags, field by field.

Supported formats with their fields (defaults in brackets):

    const_string         value
    json_schema          json_schema, [style "json"; or one of STYLES], [any_order false]
    regex                pattern
    grammar              grammar (EBNF)
    any_text             [excludes]
    sequence, or         elements
    optional, plus, star content
    repeat               min, max (-1: no bound), content
    tag                  begin, content, end (a text, or a list of texts)
    triggered_tags       triggers, tags, [at_least_one], [stop_after_first], [excludes]
    tags_with_separator  tags, separator, [at_least_one], [stop_after_first]
    dispatch             rules (pairs of text and format), [loop true], [excludes]

Formats and semantics are xgrammar's (0.2.8): inside a tag, free text of `any_text` and
`triggered_tags` never contains what ends the tag; triggered tags with `at_least_one` start with a
tag. Formats over tokens instead of text, limits on the length of free text and other styles are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import check
from overlap_spec.grammar.schemas.metaschema import check_schema
from overlap_spec.grammar.schemas.source import canonical, check_text, json_path, read_json

STYLES = ("json", "qwen_xml", "glm_xml", "cohere_xml", "kimi_k3_xml")
_DEEPEST = 64
_MOST = 1024
_REQUIRED = object()
Read = Callable[[Any, str], Any]


def read_tags(spec: Any) -> dict[str, Any]:
    """The format of a structural tag, with all defaults filled in.

    Raises:
        GrammarError: names the path of the first error.
    """
    if isinstance(spec, str):
        spec = read_json(spec, "structural_tag")
    spec = _mapping(spec, "$")
    if spec.get("type", "structural_tag") != "structural_tag":
        raise _error("$.type", f'{spec["type"]!r} is not "structural_tag"')
    if "structures" in spec or "triggers" in spec:
        return _legacy(spec)
    _known(spec, {"type", "format"}, "$")
    return _format(_field(spec, "format", "$"), "$.format")


def schemas_of(form: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """The schemas inside a format that `read_tags` has read, with their paths."""
    parts = form.items() if isinstance(form, dict) else enumerate(form)
    for key, part in parts:
        here = json_path(path, key)
        if key == "json_schema":
            yield here, part
        elif isinstance(part, dict | list):
            yield from schemas_of(part, here)


def _legacy(spec: Mapping[str, Any]) -> dict[str, Any]:
    _known(spec, {"type", "structures", "triggers"}, "$")
    structures, tags = _field(spec, "structures", "$"), []
    if not isinstance(structures, list):
        raise _error("$.structures", "must be a list")
    for i, structure in enumerate(structures):
        path = f"$.structures[{i}]"
        structure = _mapping(structure, path)
        _known(structure, {"begin", "schema", "end"}, path)
        schema = _field(structure, "schema", path)
        if isinstance(schema, str):
            schema = read_json(schema, "structural_tag")
        content = {"type": "json_schema", "json_schema": schema}
        ends = {name: _field(structure, name, path) for name in ("begin", "end")}
        tags.append({"type": "tag", "content": content, **ends})
    triggers = _field(spec, "triggers", "$")
    return _format({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "$")


def _format(value: Any, path: str) -> dict[str, Any]:
    value = _mapping(value, path)
    if path.count(".") > _DEEPEST:
        raise _error(path, "nested too deep")
    kind = _field(value, "type", path)
    if not isinstance(kind, str) or kind not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise _error(f"{path}.type", f"{kind!r} is not supported; known are: {known}")
    fields = _FIELDS[kind]
    _known(value, {"type", *fields}, path)
    out: dict[str, Any] = {"type": kind}
    for name, (read, default) in fields.items():
        given = _field(value, name, path) if default is _REQUIRED else value.get(name, default)
        out[name] = read(given, f"{path}.{name}")
    if kind == "triggered_tags":
        _check_triggers(out, path)
    elif kind == "repeat" and out["max"] != -1 and out["max"] < out["min"]:
        raise _error(path, f"max {out['max']} is below min {out['min']}")
    elif kind == "dispatch":
        _check_apart([pattern for pattern, _ in out["rules"]], f"{path}.rules")
    return out


def _check_triggers(out: dict[str, Any], path: str) -> None:
    _check_apart(out["triggers"], f"{path}.triggers")
    for i, tag in enumerate(out["tags"]):
        fitting = [t for t in out["triggers"] if tag["begin"].startswith(t)]
        if len(fitting) != 1:
            raise _error(
                f"{path}.tags[{i}].begin", f"{tag['begin']!r} starts with {len(fitting)} triggers"
            )


def _check_apart(triggers: list[str], path: str) -> None:
    # The shorter one would always match first, or at the same position.
    for i, trigger in enumerate(triggers):
        for other in triggers[:i] + triggers[i + 1 :]:
            if trigger in other:
                raise _error(path, f"{trigger!r} is part of {other!r}")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _error(path, f"{value!r} is not a text")
    return value


def _solid(value: Any, path: str) -> str:
    if not _text(value, path):
        raise _error(path, "must not be empty")
    return str(value)


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _error(path, f"{value!r} is not true or false")
    return value


def _count(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**31:
        raise _error(path, f"{value!r} is not a count")
    return value


def _least(value: Any, path: str) -> int:
    if _count(value, path) < 0:
        raise _error(path, f"{value!r} is not a count")
    return int(value)


def _list_of(read: Read, least: int = 0) -> Read:
    def read_list(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= _MOST:
            raise _error(path, f"must be a list of {least} to {_MOST}")
        return [read(part, f"{path}[{i}]") for i, part in enumerate(value)]

    return read_list


def _tag(value: Any, path: str) -> dict[str, Any]:
    # Older clients leave out the type of a tag inside a list of tags.
    found = _format({"type": "tag", **_mapping(value, path)}, path)
    if found["type"] != "tag":
        raise _error(f"{path}.type", f'{found["type"]!r} is not "tag"')
    return found


def _pair(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _error(path, "must be a pair of a text and a format")
    return [_solid(value[0], f"{path}[0]"), _format(value[1], f"{path}[1]")]


def _ends(value: Any, path: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    ends: list[str] = _list_of(_text, 1)(value, path)
    return ends


def _schema(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping | bool):
        raise _error(path, f"{value!r} is not a schema")
    try:
        schema = value if isinstance(value, bool) else dict(value)
        check_schema(schema)
        check_text("json_schema", canonical(schema))
    except GrammarError as error:
        raise _error(path, str(error)) from error
    return value


def _pattern(value: Any, path: str) -> str:
    try:
        check(_text(value, path))
        check_text("regex", value)
    except GrammarError as error:
        raise _error(path, str(error)) from error
    return str(value)


def _style(value: Any, path: str) -> str:
    if value not in STYLES:
        raise _error(path, f"{value!r} is not supported; known are: {', '.join(STYLES)}")
    return str(value)


def _in_order(value: Any, path: str) -> bool:
    if value is not False:
        raise _error(path, f"{value!r} is not supported, only False")
    return False


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(path, f"must be an object, not {value!r}")
    return value


def _field(value: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in value:
        raise _error(path, f"has no {name}")
    return value[name]


def _known(value: Mapping[str, Any], known: set[str], path: str) -> None:
    for name in value:
        if name not in known:
            raise _error(f"{path}.{name}", "is unknown")


def _error(path: str, reason: str) -> GrammarError:
    return GrammarError(f"structural tag {path}: {reason}", "structural_tag")


_FLAGS: dict[str, tuple[Read, Any]] = {
    "at_least_one": (_flag, False),
    "stop_after_first": (_flag, False),
}
_EXCLUDES: tuple[Read, Any] = (_list_of(_solid), [])
_CONTENT: tuple[Read, Any] = (_format, _REQUIRED)
_ELEMENTS: tuple[Read, Any] = (_list_of(_format, 1), _REQUIRED)
_TAGS: tuple[Read, Any] = (_list_of(_tag, 1), _REQUIRED)
_FIELDS: dict[str, dict[str, tuple[Read, Any]]] = {
    "const_string": {"value": (_text, _REQUIRED)},
    "json_schema": {
        "json_schema": (_schema, _REQUIRED),
        "style": (_style, "json"),
        "any_order": (_in_order, False),
    },
    "regex": {"pattern": (_pattern, _REQUIRED)},
    "grammar": {"grammar": (_solid, _REQUIRED)},
    "any_text": {"excludes": _EXCLUDES},
    "sequence": {"elements": _ELEMENTS},
    "or": {"elements": _ELEMENTS},
    "optional": {"content": _CONTENT},
    "plus": {"content": _CONTENT},
    "star": {"content": _CONTENT},
    "repeat": {"min": (_least, _REQUIRED), "max": (_count, _REQUIRED), "content": _CONTENT},
    "tag": {"begin": (_text, _REQUIRED), "content": _CONTENT, "end": (_ends, _REQUIRED)},
    "triggered_tags": {
        "triggers": (_list_of(_solid, 1), _REQUIRED),
        "tags": _TAGS,
        **_FLAGS,
        "excludes": _EXCLUDES,
    },
    "tags_with_separator": {"tags": _TAGS, "separator": (_text, _REQUIRED), **_FLAGS},
    "dispatch": {
        "rules": (_list_of(_pair, 1), _REQUIRED),
        "loop": (_flag, True),
        "excludes": _EXCLUDES,
    },
}
