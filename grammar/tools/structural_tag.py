"""Reads structural tags: the classes have the supported formats, with their fields and defaults.

Formats and semantics are xgrammar's (0.2.8): inside a tag, free text of `any_text` and
`triggered_tags` never contains what ends the tag; triggered tags with `at_least_one` start with a
tag. Formats over tokens instead of text, limits on the length of free text and other styles are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import check
from overlap_spec.grammar.schemas.metaschema import check_schema
from overlap_spec.grammar.schemas.source import canonical, check_text, json_path, read_json

Style = Literal["json", "qwen_xml", "glm_xml", "cohere_xml", "kimi_k3_xml"]
_DEEPEST = 64
Solid = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Solid], Meta(max_length=1024)]
SomeTexts = Annotated[list[Solid], Meta(min_length=1, max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Elements = Annotated[list["Form"], Meta(min_length=1, max_length=1024)]
Tags = Annotated[list["Tag"], Meta(min_length=1, max_length=1024)]


class _Form(
    msgspec.Struct,
    forbid_unknown_fields=True,
    tag=lambda name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(),
):
    """A format, whose type is its name in lower case."""


class ConstString(_Form):
    value: str


class JsonSchema(_Form):
    json_schema: dict[str, Any] | bool
    style: Style = "json"
    any_order: bool = False

    def __post_init__(self) -> None:
        if self.any_order:
            raise ValueError("any_order is not supported, only false")
        with _named("json_schema"):
            check_schema(self.json_schema)
            check_text("json_schema", canonical(self.json_schema))


class Regex(_Form):
    pattern: str

    def __post_init__(self) -> None:
        with _named("pattern"):
            check(self.pattern)
            check_text("regex", self.pattern)


class Grammar(_Form):
    """EBNF."""

    grammar: Solid


class AnyText(_Form):
    excludes: Texts = []


class Sequence(_Form):
    elements: Elements


class Or(_Form):
    elements: Elements


class Optional(_Form):
    content: Form


class Plus(_Form):
    content: Form


class Star(_Form):
    content: Form


class Repeat(_Form):
    """Of ``max`` -1 as often as one likes."""

    min: Count
    max: Annotated[int, Meta(ge=-1, lt=2**31)]
    content: Form

    def __post_init__(self) -> None:
        if self.max != -1 and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")


class Tag(_Form):
    begin: str
    content: Form
    end: str | Annotated[list[str], Meta(min_length=1, max_length=1024)]

    def __post_init__(self) -> None:
        self.end = [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(_Form):
    triggers: SomeTexts
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []

    def __post_init__(self) -> None:
        _check_apart(self.triggers)
        for i, tag in enumerate(self.tags):
            count = sum(map(tag.begin.startswith, self.triggers))
            if count != 1:
                raise ValueError(f"tags[{i}].begin: {tag.begin!r} starts with {count} triggers")


class TagsWithSeparator(_Form):
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Form):
    rules: Annotated[list[tuple[Solid, Form]], Meta(min_length=1, max_length=1024)]
    loop: bool = True
    excludes: Texts = []

    def __post_init__(self) -> None:
        _check_apart([text for text, _ in self.rules])


Form = (
    ConstString | JsonSchema | Regex | Grammar | AnyText | Sequence | Or | Optional | Plus | Star
    | Repeat | Tag | TriggeredTags | TagsWithSeparator | Dispatch
)  # fmt: skip


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    format: Form
    type: Literal["structural_tag"] = "structural_tag"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag in the older form; its schema may be JSON text."""

    begin: str
    schema: Any
    end: str


class Older(msgspec.Struct, forbid_unknown_fields=True):
    """The older form."""

    structures: list[Structure]
    triggers: SomeTexts
    type: Literal["structural_tag"] = "structural_tag"

    @property
    def format(self) -> Form:
        """The same in the newer form."""
        tags: list[Tag] = []
        for one in self.structures:
            text = one.schema if isinstance(one.schema, str) else None
            schema = one.schema if text is None else read_json(text, "structural_tag")
            tags.append(Tag(one.begin, JsonSchema(schema), one.end))
        return TriggeredTags(self.triggers, tags)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Name a field in the error of what is in it, which msgspec tells with its path."""
    try:
        yield
    except GrammarError as error:
        raise ValueError(f"{field}: {error}") from error


def read_tags(spec: Any) -> dict[str, Any]:
    """The format of a structural tag, with all defaults filled in.

    Raises:
        GrammarError: names the path of the first error.
    """
    if isinstance(spec, str):
        spec = read_json(spec, "structural_tag")
    is_older = isinstance(spec, Mapping) and ("structures" in spec or "triggers" in spec)
    kind: type[Older | StructuralTag] = Older if is_older else StructuralTag
    try:
        form = msgspec.convert(spec, kind).format
        found: dict[str, Any] = msgspec.to_builtins(form)
    except (msgspec.ValidationError, ValueError) as error:
        raise GrammarError(f"structural tag: {error}", "structural_tag") from error
    except RecursionError as error:
        raise _too_deep() from error
    return found


def schemas_of(form: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """The schemas inside a format that `read_tags` has read, with their paths.

    Raises:
        GrammarError: it is nested too deep.
    """
    if path.count(".") > _DEEPEST:
        raise _too_deep()
    parts = form.items() if isinstance(form, dict) else enumerate(form)
    for key, part in parts:
        here = json_path(path, key)
        if key == "json_schema":
            yield here, part
        elif isinstance(part, dict | list | tuple):
            yield from schemas_of(part, here)


def _check_apart(triggers: list[str]) -> None:
    # The shorter one would always match first, or at the same position.
    for i, trigger in enumerate(triggers):
        for other in triggers[:i] + triggers[i + 1 :]:
            if trigger in other:
                raise ValueError(f"{trigger!r} is part of {other!r}")


def _too_deep() -> GrammarError:
    return GrammarError("the structural tag is nested too deep", "structural_tag")
