"""Grammars as values: the constraint on a request's output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import MOST_CHECKED, check
from overlap_spec.grammar.parsing import lark
from overlap_spec.grammar.reasoning.reply import answer_of
from overlap_spec.grammar.schemas.functions import arguments_type, is_function
from overlap_spec.grammar.schemas.metaschema import check_schema
from overlap_spec.grammar.schemas.outputs import pattern_text, schema_of, texts_of, value_of
from overlap_spec.grammar.schemas.source import canonical, check_text, json_path, read_json
from overlap_spec.grammar.schemas.unheld import warnings_of
from overlap_spec.grammar.tools.definitions import read_tools
from overlap_spec.grammar.tools.stream import ToolReply, parse_reply
from overlap_spec.grammar.tools.structural_tag import read_tags, schemas_of

Kind = Literal[
    "json_schema",
    "json_object",
    "regex",
    "ebnf",
    "choice",
    "structural_tag",
    "tools",
    "after_thinking",
]
Whitespace = Literal["compact", "bounded"] | int
KeyOrder = Literal["schema", "any"]
Formats = Literal["assertion", "annotation"]
AdditionalProperties = Literal["closed", "schema"]
_OPTIONS: dict[str, Any] = {
    "key_order": KeyOrder,
    "formats": Formats,
    "additional_properties": AdditionalProperties,
}
_PACKED = ("kind", "source", "whitespace", "best_effort", *_OPTIONS)


@dataclass(frozen=True)
class Grammar:
    """A constraint on a request's whole output; create one with the class methods.

    Frozen, hashable, and picklable if `output` is. Two grammars are equal if their fields other
    than `output` are.

    Args:
        kind: The language of `source`.
        source: Canonical text: a JSON schema, a pattern, EBNF, a JSON list of choices, or JSON
            that describes tags, tools, or what comes after the thinking.
        whitespace: White space between JSON tokens: `"compact"` has none, `"bounded"` allows a
            line break and up to 16 spaces at each position, a number means the exact layout of
            `json.dumps(indent=…)`.
        best_effort: Leave out schema keywords that cannot be enforced, instead of refusing them.
            The finished output is then validated against the whole schema: `Output.verdict`.
        apart: Let equal items and keys through where `distinct.matcher` refuses them; set by the
            compiler, which wraps what is compiled so.
        output: The type that `parse` returns, or None for plain JSON values.
        probabilities: Of a choice: tell how probable each text is, in `Output.choices`.
        faithful: Of a choice: choose by the probability of the whole text.
        warnings: What the grammar asks for and nothing holds: formats that nobody knows.
        key_order: Order of an object's members: `"schema"`, or `"any"`, where each set of members
            needs a rule, so that an object may name 9. Fixed values keep theirs, and so do items
            that must differ.
        formats: What a schema's `format` is: `"assertion"`, held as `schemas/formats.py` has it, or
            `"annotation"`, as drafts 2019-09 and 2020-12 have it by default: nothing is held.
        additional_properties: Members that a schema does not name: `"closed"`, an object that names
            some has no others, unless the schema says `additionalProperties`, `patternProperties`
            or `unevaluatedProperties` of it; `"schema"`, it has them as JSON Schema says.
    """

    kind: Kind
    source: str
    whitespace: Whitespace = "compact"
    best_effort: bool = False
    apart: bool = False
    output: Any = field(default=None, compare=False, repr=False)
    probabilities: bool = False
    faithful: bool = False
    warnings: tuple[str, ...] = field(default=(), compare=False, repr=False)
    key_order: KeyOrder = "schema"
    formats: Formats = "assertion"
    additional_properties: AdditionalProperties = "closed"

    def __post_init__(self) -> None:
        check_text(self.kind, self.source)
        for name, known in _OPTIONS.items():
            value, options = getattr(self, name), get_args(known)
            if value not in options:
                wrong = f"{name} {value!r} is not {' or '.join(map(repr, options))}"
                raise GrammarError(wrong, name)
        for name in ("probabilities", "faithful"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise GrammarError(f"{name} must be true or false: {value!r}", name)
            if value and self.kind != "choice":
                raise GrammarError(f"{name} is for a choice, and this is {self.kind}", name)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the optional parts that it asks for (`overlap_spec/worker/extras`)."""
        return ("choices",) if self.probabilities or self.faithful else ()

    @classmethod
    def json_schema(
        cls,
        schema: Any,
        *,
        whitespace: Whitespace = "compact",
        best_effort: bool = False,
        key_order: KeyOrder = "schema",
        formats: Formats = "assertion",
        additional_properties: AdditionalProperties = "closed",
    ) -> Grammar:
        """JSON that is valid under a schema.

        Args:
            schema: A schema as dict, bool or JSON text; or a type, whose instances `parse` then
                returns: a pydantic model, dataclass, TypedDict, Enum, `Literal[…]`, `Union`,
                `list[…]`, `int` and the like. A function: its arguments, as a dict.
            whitespace, best_effort, key_order, formats, additional_properties: See the class.

        Raises:
            GrammarError: the schema is invalid; names the path.
        """
        output = None
        if isinstance(schema, str):
            schema = read_json(schema)
        elif isinstance(schema, Mapping):
            schema = dict(schema)
        elif not isinstance(schema, bool):
            output = arguments_type(schema) if is_function(schema) else schema
            schema = schema_of(output)
        check_schema(schema)
        source, layout = canonical(schema), _layout(whitespace)
        unheld = warnings_of(schema, formats=formats == "assertion")
        return cls(
            "json_schema",
            source,
            layout,
            best_effort,
            output=output,
            warnings=unheld,
            key_order=key_order,
            formats=formats,
            additional_properties=additional_properties,
        )

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "compact") -> Grammar:
        """Any JSON object."""
        return cls("json_object", "", _layout(whitespace))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that the pattern matches in full, as ECMA-262 reads it and Python too: `\\d` and
        `\\w` are ASCII, `.` stops at `\\n`, `\\r` and the two line ends of Unicode.

        Raises:
            GrammarError: the pattern does not parse, or has a construct that is not supported. Of
                one of more than 8,192 characters the compile says so.
        """
        check(pattern)
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """Text of an EBNF grammar in GBNF's dialect, whose start rule is `root`, or of a Lark
        grammar, whose start rule is `start` (`grammar/parsing/lark.py` has what is read of it).

        Raises:
            GrammarError: the text is empty, or Lark that has an error or is not supported. The
                compile checks EBNF, and Lark of more than 8,192 characters.
        """
        if not text.strip():
            raise GrammarError("the EBNF grammar is empty; it needs a rule named root", "ebnf")
        if len(text) <= MOST_CHECKED and lark.is_lark(text):
            lark.read(text)
        return cls("ebnf", text)

    @classmethod
    def choice(
        cls, options: Iterable[str], *, probabilities: bool = False, faithful: bool = False
    ) -> Grammar:
        """One of the given texts.

        Args:
            options: The texts; of equal ones the first counts.
            probabilities: Tell how probable each text is, in `Output.choices`. The output itself
                stays as it would be.
            faithful: Choose by the probability of the whole text, instead of token by token: the
                most probable one at temperature 0, else a draw. (A mask over each token draws
                from another distribution: it does not see that all that follows is improbable.)

        Raises:
            GrammarError: there is no option, or one is not a non-empty text.
        """
        texts = list(options)
        if isinstance(options, str) or not texts:
            raise GrammarError("choice needs a list of at least one text", "choice")
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise GrammarError(f"choice[{i}]: {text!r} is not a non-empty text", "choice")
        source = json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False)
        return cls("choice", source, probabilities=probabilities, faithful=faithful)

    @classmethod
    def structural_tag(
        cls,
        spec: Mapping[str, Any] | str,
        *,
        whitespace: Whitespace = "compact",
        additional_properties: AdditionalProperties = "closed",
    ) -> Grammar:
        """Text with tags whose content is constrained.

        Args:
            spec: `{"type": "structural_tag", "format": {…}}` as published by xgrammar, or the
                older `{"structures": [{"begin", "schema", "end"}], "triggers": […]}` (with or
                without its `type`), as dict or JSON text.
                `overlap_spec.grammar.tools.structural_tag` has the supported formats.
            whitespace, additional_properties: See the class; for all JSON inside.

        Raises:
            GrammarError: a field is unknown, missing or of the wrong type, or an inner schema or
                pattern is invalid; names the path.
        """
        tags = read_tags(spec)
        unheld = tuple(
            warning for path, schema in schemas_of(tags) for warning in warnings_of(schema, path)
        )
        return cls(
            "structural_tag",
            canonical(tags),
            _layout(whitespace),
            warnings=unheld,
            additional_properties=additional_properties,
        )

    @classmethod
    def tools(
        cls,
        tools: Sequence[Any],
        *,
        choice: Any = "auto",
        parallel: bool = True,
        format: str = "hermes",
        strict: bool | None = None,
        otherwise: Grammar | None = None,
        whitespace: Whitespace = "compact",
        additional_properties: AdditionalProperties = "closed",
    ) -> Grammar:
        """Tool calls, in a model's own syntax.

        Arguments follow the tool's `parameters`. A strict tool is enforced exactly or refused.
        For any other tool, keywords that cannot be enforced are left out; if the schema is still
        not supported, any JSON object is allowed.

        Args:
            tools: OpenAI tool definitions, `{"type": "function", "function": {…}}`, or plain
                functions, whose signatures and docstrings make them.
            choice: As OpenAI's `tool_choice`. `"auto"`: free text, calls, or text before calls;
                free text never contains the start of a call, so that every call is complete.
                `"required"`: at least one call. `"none"`: free text. A name, or
                `{"type": "function", "function": {"name": …}}`: exactly one call of that tool.
                `{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`: these
                tools only, with its mode.
            parallel: Whether there may be more than one call.
            format: The syntax of calls: a file name in `grammar/tools/formats`, or
                `"package.module:NAME"` of a `ToolFormat` of your own.
            strict: Overrides the tools' own `strict` (default false).
            otherwise: With `"auto"`: the grammar of replies without calls, instead of free text.
                A reply that starts as a call does is read as a call.
            whitespace, additional_properties: See the class; for the arguments.

        Raises:
            GrammarError: names the field at fault.
        """
        source = read_tools(tools, choice, parallel, format, strict)
        if otherwise is not None:
            if source["choice"] != "auto":
                raise GrammarError('otherwise needs choice "auto"', "tool_choice")
            source["otherwise"] = otherwise._packed("tools")
        output = None if otherwise is None else otherwise.output
        unheld = () if otherwise is None else otherwise.warnings
        for name, parameters, _ in source["tools"]:
            unheld += warnings_of(parameters, json_path("$", name))
        return cls(
            "tools",
            canonical(source),
            _layout(whitespace),
            output=output,
            warnings=unheld,
            additional_properties=additional_properties,
        )

    @classmethod
    def of(
        cls,
        output_type: Any,
        *,
        whitespace: Whitespace = "compact",
        additional_properties: AdditionalProperties = "closed",
    ) -> Grammar:
        """The grammar of an output type, whose values `parse` returns.

        A Grammar is returned unchanged; a compiled `re.Pattern` is a regex; `Literal[…]` and
        Enums of texts are the bare texts; `dict` is any JSON object, a dict value is a schema;
        anything else is treated as by `json_schema`. `str` is free text, which needs no grammar.

        Raises:
            GrammarError: the type has no grammar.
        """
        if isinstance(output_type, Grammar):
            return output_type
        if isinstance(output_type, re.Pattern):
            return cls.regex(pattern_text(output_type))
        if output_type is str:
            raise GrammarError("str is free text, which needs no grammar", "output_type")
        if output_type is dict:
            return cls.json_object(whitespace=whitespace)
        texts = texts_of(output_type)
        if texts is not None:
            return cls("choice", cls.choice(texts).source, output=output_type)
        return cls.json_schema(
            output_type, whitespace=whitespace, additional_properties=additional_properties
        )

    def after_thinking(self, end: str = "</think>", begin: str | None = None) -> Grammar:
        """This grammar after a model's thinking: any text up to the first `end`, then at most two
        line breaks, then this grammar.

        The output cannot end inside the thinking: stop tokens are legal only if this grammar may
        end. If the chat template has closed the thinking already, use the grammar unwrapped.

        Args:
            end: The marker that ends the thinking.
            begin: None: the output starts inside the thinking (a model may still write its
                opening marker). A marker: the output thinks only if it starts with the marker;
                otherwise this grammar holds from the start.

        Raises:
            GrammarError: a marker is empty, or the grammar is wrapped already.
        """
        if self.kind == "after_thinking":
            raise GrammarError("the grammar is after_thinking already", "thinking")
        for marker in (end, begin):
            if marker is not None and (not isinstance(marker, str) or not marker):
                raise GrammarError(f"{marker!r} is not a thinking marker", "thinking")
        source = {"end": end, "begin": begin, "inner": self._packed("thinking")}
        return Grammar(
            "after_thinking", canonical(source), output=self.output, warnings=self.warnings
        )

    @property
    def inner(self) -> Grammar | None:
        """The grammar after the thinking, or instead of tool calls; None if there is none."""
        if self.kind not in ("after_thinking", "tools"):
            return None
        source = json.loads(self.source)
        packed = source.get("otherwise" if self.kind == "tools" else "inner")
        if packed is None:
            return None
        return replace(Grammar.unpacked(packed), output=self.output)

    def parse(self, text: str) -> Any:
        """The value of a finished output: an instance of `output` if it is set, a JSON value for
        schemas and objects, a `ToolReply` for tools, the inner grammar's value for thinking, else
        the text itself.

        Raises:
            ValueError: the text is incomplete, or not valid under `output`.
        """
        if self.kind == "tools":
            reply = parse_reply(text, json.loads(self.source)["format"])
            if reply.calls and not reply.calls[-1].is_whole:
                raise ValueError(f"the call of {reply.calls[-1].name} is cut off")
            if self.inner is None or reply.calls:
                return reply
            return ToolReply(text, parsed=self.inner.parse(text))
        if self.kind == "after_thinking":
            assert self.inner is not None
            return self.inner.parse(answer_of(self.source, text))
        if self.output is None:
            return json.loads(text) if self.kind in ("json_schema", "json_object") else text
        if self.kind not in ("json_schema", "json_object"):
            return value_of(self.output, text)
        from pydantic import TypeAdapter

        return TypeAdapter(self.output).validate_json(text)

    def _packed(self, around: str) -> list[Any]:
        """What the source of a grammar ``around`` has of this one; a weighed choice is no part."""
        for name in ("probabilities", "faithful"):
            if getattr(self, name):
                raise GrammarError(
                    f"{name} needs a choice that is the whole output, and this one is "
                    f"part of a grammar with {around}",
                    name,
                )
        return [getattr(self, name) for name in _PACKED]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> Grammar:
        """A grammar from what stands of it in the source of one around it."""
        return cls(**dict(zip(_PACKED, packed, strict=True)))


def _layout(whitespace: Whitespace) -> Whitespace:
    is_indent = isinstance(whitespace, int) and not isinstance(whitespace, bool)
    if whitespace in ("compact", "bounded") or (is_indent and 0 <= int(whitespace) <= 8):
        return whitespace
    raise GrammarError(
        f"whitespace {whitespace!r} is not 'compact', 'bounded' or an indent from 0 to 8",
        "whitespace",
    )
