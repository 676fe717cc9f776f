"""What a request may say: a grammar as a value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlap_spec.errors import GrammarError

Kind = Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
Whitespace = Literal["compact", "bounded"] | int


@dataclass(frozen=True)
class Grammar:
    """A constraint on a request's whole output; make one with the class methods.

    Frozen, hashable, and picklable where `output` is. Two grammars are equal if they allow the
    same texts as written; `output` takes no part.

    Args:
        kind: Which language `source` is in.
        source: Canonical text: a JSON schema, a pattern, EBNF, or a JSON list of choices.
        whitespace: White space between the tokens of JSON: `"compact"` has none, `"bounded"`
            allows a line break and up to 16 spaces at each place, a number asks for the exact
            layout of `json.dumps(indent=…)`.
        best_effort: Leave out schema keywords that cannot be held to, instead of refusing them.
        output: The type that `parse` returns, or None for plain JSON values.
    """

    kind: Kind
    source: str
    whitespace: Whitespace = "compact"
    best_effort: bool = False
    output: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def json_schema(
        cls, schema: Any, *, whitespace: Whitespace = "compact", best_effort: bool = False
    ) -> Grammar:
        """JSON that is valid under a schema.

        Args:
            schema: A schema as dict, bool or JSON text, or a pydantic model, dataclass or
                TypedDict, whose schema is taken and whose instances `parse` returns.
            whitespace: See the class.
            best_effort: See the class.

        Raises:
            GrammarError: the schema is broken; names the place in it.
        """
        output = None
        if isinstance(schema, str):
            schema = _read_json(schema)
        elif isinstance(schema, Mapping):
            schema = dict(schema)
        elif not isinstance(schema, bool):
            output, schema = schema, _schema_of(schema)
        _check_schema(schema)
        return cls("json_schema", _canonical(schema), _layout(whitespace), best_effort, output)

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "compact") -> Grammar:
        """Any JSON object."""
        return cls("json_object", "", _layout(whitespace))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that the pattern matches from end to end.

        Raises:
            GrammarError: the pattern does not parse, or has a construct that is not supported.
        """
        from overlap_spec.grammar.lowering.regex import parse

        parse(pattern)
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """Text of an EBNF grammar in GBNF's dialect; the start rule is `root`.

        Raises:
            GrammarError: the text is empty. Syntax is checked when it is compiled.
        """
        if not text.strip():
            raise GrammarError("the EBNF grammar is empty; it needs a rule named root", "ebnf")
        return cls("ebnf", text)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Grammar:
        """One of the given texts.

        Raises:
            GrammarError: no option, or one that is not a non-empty text.
        """
        texts = list(options)
        if isinstance(options, str) or not texts:
            raise GrammarError("choice needs a list of at least one text", "choice")
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise GrammarError(f"choice[{i}]: {text!r} is not a non-empty text", "choice")
        return cls("choice", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))

    def parse(self, text: str) -> Any:
        """The value of a finished output: an instance of `output` where there is one, a JSON
        value for schemas and objects, the text itself otherwise.

        Raises:
            ValueError: the text is not whole, or not valid under `output`.
        """
        if self.kind not in ("json_schema", "json_object"):
            return text
        if self.output is None:
            return json.loads(text)
        from pydantic import TypeAdapter

        return TypeAdapter(self.output).validate_json(text)


def _canonical(schema: Any) -> str:
    # The order of keys stays: it is the order in which members are written.
    try:
        return json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the schema is not JSON: {error}", "schema") from error


def _layout(whitespace: Whitespace) -> Whitespace:
    is_indent = isinstance(whitespace, int) and not isinstance(whitespace, bool)
    if whitespace in ("compact", "bounded") or (is_indent and 0 <= int(whitespace) <= 8):
        return whitespace
    raise GrammarError(
        f"whitespace {whitespace!r} is not 'compact', 'bounded' or an indent from 0 to 8",
        "whitespace",
    )


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"the schema is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
            "schema",
        ) from error


def _schema_of(source: Any) -> Any:
    from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    from typing_extensions import is_typeddict

    known = isinstance(source, type) and (
        issubclass(source, BaseModel) or dataclasses.is_dataclass(source)
    )
    if not known and not is_typeddict(source):
        raise GrammarError(
            f"{source!r} is not a schema: give a dict, JSON text, a pydantic model, a dataclass "
            "or a TypedDict",
            "schema",
        )
    try:
        return TypeAdapter(source).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise GrammarError(f"{source.__name__} has no JSON schema: {error}", "schema") from error


def _check_schema(schema: Any) -> None:
    from jsonschema import SchemaError, validators

    from overlap_spec.grammar.lowering.keywords import step

    if not isinstance(schema, dict | bool):
        raise GrammarError(f"$: a schema is an object or a boolean, not {schema!r}", "schema")
    default = validators.Draft202012Validator
    try:
        validators.validator_for(schema, default).check_schema(schema)  # type: ignore[arg-type]
    except SchemaError as error:
        path = step("$", *error.absolute_path)
        reason = error.message
        if error.absolute_path and error.absolute_path[-1] == "type":
            reason = f"{error.instance!r} is not a JSON Schema type"
        raise GrammarError(f"{path}: {reason}", "schema") from error
