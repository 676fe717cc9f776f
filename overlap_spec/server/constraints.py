"""Resolves the constraint fields of a body to one grammar."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.grammar.spec import AdditionalProperties, Grammar
from overlap_spec.server.grammar_reader import GrammarReader
from overlap_spec.server.protocol.base import (
    Constraint,
    GenerationBody,
    OpenAIBody,
    StructuredOutputs,
)
from overlap_spec.server.protocol.chat import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
)
from overlap_spec.server.protocol.task import ToolAsk
from overlap_spec.server.settings import ServerSettings

# Sources longer than this are read in another process, in bytes: reading them would block the loop.
LONG_SOURCE = 512
# Of what was read there, the latest are kept, in bytes of their sources.
KEPT_BYTES = 4 * 2**20
# Kinds of constraints by vLLM's names, and what else each takes.
MAKERS: dict[str, Callable[..., Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
    "json_object": Grammar.json_object,
    "structural_tag": Grammar.structural_tag,
}
OPTIONS = {
    "json": ("whitespace", "best_effort", "key_order", "formats", "additional_properties"),
    "choice": ("probabilities", "faithful"),
    "json_object": ("whitespace",),
    "structural_tag": ("whitespace", "additional_properties"),
}
STRUCTURED_OPTIONS = (
    "probabilities",
    "faithful",
    "key_order",
    "formats",
    "additional_properties",
)
SGLANGS_NAMES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class ResolvedConstraint(NamedTuple):
    """The grammar that a body asks for (None: free text), and the field that it comes from."""

    grammar: Grammar | None = None
    field: str | None = None


class ConstraintCandidate(NamedTuple):
    """A constraint that a body's field has, not yet read; ``make`` can be pickled."""

    field: str
    source: Any
    make: partial[Grammar]


class Constraints:
    """Resolves constraints under the server's limits and defaults.

    Args:
        settings: The server's.
        additional_properties: As :class:`Grammar` has it, unless a request says.
    """

    def __init__(
        self, settings: ServerSettings, additional_properties: AdditionalProperties = "closed"
    ) -> None:
        self.settings = settings
        self.additional_properties = additional_properties
        self.reader = GrammarReader()
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._kept_bytes = 0

    async def of(
        self, body: Constraint, form: Any = None, form_field: str = "response_format"
    ) -> ResolvedConstraint:
        """The grammar that a body asks for.

        Args:
            form: Its response format, if it has one.
            form_field: The field that this comes from.

        Raises:
            InvalidRequest: more than one, or one that is too large or broken; names the field.
        """
        candidates = _distinct(self._candidates(body) + self._formats(form, form_field))
        if len(candidates) > 1:
            names = " and ".join(candidate.field for candidate in candidates)
            raise InvalidRequest(f"{names}: send one constraint", candidates[1].field)
        if not candidates:
            return ResolvedConstraint()
        return ResolvedConstraint(await self._read(candidates[0]), candidates[0].field)

    async def tools(self, ask: ToolAsk, otherwise: ResolvedConstraint) -> ResolvedConstraint:
        """The grammar of a body with tools; ``otherwise`` constrains an answer without a call."""
        tools, choice = ask.tools, ask.choice
        field, choice_field = ask.fields
        if not tools:
            for name, value in ((choice_field, choice), ("parallel_tool_calls", ask.parallel)):
                if field == "tools" and value not in (None, "none"):
                    raise InvalidRequest(f"{name} goes with {field}", name)
            return otherwise
        parser = self.settings.tool_call_parser
        if parser is None:
            raise InvalidRequest(
                "this server has no tool_call_parser for its model: start it with "
                "--tool-call-parser",
                field,
            )
        choice = "auto" if choice is None else choice

        make = partial(
            Grammar.tools,
            tools,
            choice=choice,
            parallel=ask.parallel is not False,
            format=parser,
            otherwise=otherwise.grammar if choice == "auto" else None,
            whitespace=self.settings.whitespace,
            additional_properties=self.additional_properties,
        )
        made = await self._read(ConstraintCandidate(field, tools, make))
        if choice == "none" and otherwise.grammar:
            return otherwise
        return ResolvedConstraint(made, field)

    async def _read(self, candidate: ConstraintCandidate) -> Grammar:
        name, source, make = candidate
        size = _size(name, source)
        limit = self.settings.max_schema_bytes
        if size > limit:
            raise GrammarError(
                f"the constraint has {size} bytes; {limit} are allowed (max_schema_bytes)", name
            )
        try:
            if size > LONG_SOURCE:
                grammar = await self._read_elsewhere(make)
            else:
                grammar = make()
            grammar.source.encode()
            return grammar
        except RecursionError:
            raise GrammarError("the constraint is nested too deeply", name) from None
        except UnicodeError as error:
            raise GrammarError(f"the constraint is not valid Unicode: {error}", name) from None
        except GrammarError as error:
            inside = error.param or ""
            own = name == "tools" and inside.startswith(("tools", "tool_choice"))
            param = inside if own else name
            raise GrammarError(str(error), param) from None

    async def _read_elsewhere(self, make: Callable[[], Grammar]) -> Grammar:
        call = pickle.dumps(make)
        grammar = self._kept.get(call)
        if grammar is not None:
            self._kept.move_to_end(call)
            return grammar
        grammar = await self.reader.read(call)
        if call not in self._kept:
            self._kept[call] = grammar
            self._kept_bytes += len(call)
            while self._kept_bytes > KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(oldest)
        return grammar

    def _candidates(self, body: Constraint) -> list[ConstraintCandidate]:
        """Those that a body has besides its response format."""
        candidates = [
            self._candidate(name, kind, value)
            for name, kind in SGLANGS_NAMES.items()
            if (value := getattr(body, name)) is not None
        ]
        if isinstance(body, GenerationBody) and body.structured_outputs is not None:
            candidates.append(self._structured(body.structured_outputs))
        if isinstance(body, OpenAIBody):
            candidates += [
                self._candidate(f"guided_{kind}", kind, value)
                for kind, value in body.guided.items()
            ]
        return candidates

    def _formats(self, form: Any, name: str) -> list[ConstraintCandidate]:
        """That of a response format, if it is one."""
        match form:
            case JsonObjectFormat(schema_=None):
                return [self._candidate(name, "json_object", True)]
            case JsonObjectFormat():
                return [self._candidate(name, "json", form.schema_)]
            case JsonSchemaFormat():
                schema, strict = form.json_schema.schema_, form.json_schema.strict
                best_effort = None if strict is None else not strict
                return [self._candidate(name, "json", schema, best_effort=best_effort)]
            case StructuralTagFormat():
                tag = form.model_dump(exclude_none=True)
                return [self._candidate(name, "structural_tag", tag)]
        return []

    def _structured(self, given: StructuredOutputs) -> ConstraintCandidate:
        """vLLM's ``structured_outputs``."""
        values = {kind: getattr(given, kind if kind != "json" else "json_") for kind in MAKERS}
        kinds = [kind for kind, value in values.items() if value is not None and value is not False]
        if len(kinds) != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(MAKERS)}; "
                f"it has {', '.join(kinds) or 'none'}",
                "structured_outputs",
            )
        kind = kinds[0]
        options = {name: getattr(given, name) or None for name in STRUCTURED_OPTIONS}
        for name, value in options.items():
            wanted = [each for each, taken in OPTIONS.items() if name in taken]
            if value is not None and kind not in wanted:
                field = f"structured_outputs.{name}"
                raise InvalidRequest(f"{field} goes with {' or '.join(wanted)}", field)
        if given.disable_any_whitespace is not None:
            options["whitespace"] = "compact" if given.disable_any_whitespace else "bounded"
        return self._candidate(f"structured_outputs.{kind}", kind, values[kind], **options)

    def _candidate(self, field: str, kind: str, value: Any, **options: Any) -> ConstraintCandidate:
        """A constraint of a kind of :data:`MAKERS`; None is the default."""
        taken: dict[str, Any] = {
            "whitespace": self.settings.whitespace,
            "best_effort": self.settings.best_effort,
            "additional_properties": self.additional_properties,
        }
        taken |= {name: option for name, option in options.items() if option is not None}
        keywords = {name: taken[name] for name in OPTIONS.get(kind, ()) if name in taken}
        values = () if kind == "json_object" else (value,)
        return ConstraintCandidate(field, value, partial(MAKERS[kind], *values, **keywords))


def _distinct(candidates: list[ConstraintCandidate]) -> list[ConstraintCandidate]:
    """The candidates without those that an earlier one says too: some clients send a constraint
    under its old and its new name."""
    found: list[ConstraintCandidate] = []
    for candidate in candidates:
        call = candidate.make
        if not any(
            (call.func, call.args, call.keywords)
            == (other.make.func, other.make.args, other.make.keywords)
            for other in found
        ):
            found.append(candidate)
    return found


def _size(name: str, source: Any) -> int:
    """Bytes of a constraint's text; GrammarError if it is not valid text."""
    try:
        return len(source.encode() if isinstance(source, str) else msgspec.json.encode(source))
    except OverflowError:
        return len(json.dumps(source))
    except RecursionError:
        raise GrammarError("the constraint is nested too deeply", name) from None
    except (UnicodeError, ValueError) as error:
        raise GrammarError(f"the constraint is not valid text: {error}", name) from None
