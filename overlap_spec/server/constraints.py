"""Resolves the constraint fields of a body to one grammar."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import msgspec

from overlap_spec.errors import EngineUnavailable, GrammarError, InvalidRequest, QueueFull
from overlap_spec.grammar.isolation.jobs import Read
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from overlap_spec.grammar.isolation.pool import make_pool
from overlap_spec.grammar.spec import AdditionalProperties, Grammar
from overlap_spec.server.protocol import Constraint, GenerationBody, OpenAIBody, StructuredOutputs
from overlap_spec.server.settings import ServerSettings
from overlap_spec.server.task import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    ToolAsk,
)
from overlap_spec.shares import HOLDER

# Sources longer than this are read in another process, in bytes: reading them would block the loop.
LONG_SOURCE = 512
# Of what was read there, the latest are kept, in bytes of their sources.
KEPT_BYTES = 4 * 2**20
# One that takes longer than a second leaves its place to the next one, and goes on if one of the
# few slow places is free. Workers stand behind the engine and the loop.
READING = CompileLimits(
    time_s=10.0,
    memory_bytes=2**30,
    result_bytes=2**26,
    fast_s=1.0,
    fast_running=2,
    long_running=2,
    fast_waiting=64,
    long_waiting=0,
    nice=5,
)
# Kinds of constraints by vLLM's names.
KINDS: dict[str, Callable[..., Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
    "json_object": Grammar.json_object,
    "structural_tag": Grammar.structural_tag,
}
MAKERS = KINDS | {"tools": Grammar.tools}
# What else each takes.
OPTIONS = {kind: frozenset(signature(make).parameters) for kind, make in MAKERS.items()}
STRUCTURED_OPTIONS = ("probabilities", "faithful", "key_order", "formats", "additional_properties")
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


class Asked(NamedTuple):
    """A constraint that a body's field has, not yet read: one of :data:`MAKERS`, and its
    arguments."""

    field: str
    kind: str
    source: Any
    options: dict[str, Any]

    @property
    def call(self) -> partial[Grammar]:
        """Makes the grammar; can be pickled."""
        given = () if self.kind == "json_object" else (self.source,)
        return partial(MAKERS[self.kind], *given, **self.options)


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
        self._defaults = {
            "whitespace": settings.whitespace,
            "best_effort": settings.best_effort,
            "additional_properties": additional_properties,
        }
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
        found: list[Asked] = []
        for one in [*self._fields(body), *self._formats(form, form_field)]:
            # Some clients send a constraint under its old and its new name.
            if all(one[1:] != other[1:] for other in found):
                found.append(one)
        if len(found) > 1:
            names = " and ".join(one.field for one in found)
            raise InvalidRequest(f"{names}: send one constraint", found[1].field)
        if not found:
            return ResolvedConstraint()
        return ResolvedConstraint(await self._read(found[0]), found[0].field)

    async def tools(self, ask: ToolAsk, otherwise: ResolvedConstraint) -> ResolvedConstraint:
        """The grammar of a body with tools; ``otherwise`` constrains an answer without a call."""
        tools, choice = ask.tools, ask.choice
        field, choice_field = ask.fields
        if not tools:
            if field == "tools" and choice not in (None, "none"):
                raise InvalidRequest(f"{choice_field} goes with {field}", choice_field)
            return otherwise
        parser = self.settings.tool_call_parser
        if parser is None:
            raise InvalidRequest(
                "this server has no tool_call_parser for its model: start it with "
                "--tool-call-parser",
                field,
            )
        choice = "auto" if choice is None else choice
        asked = self._asked(
            field,
            "tools",
            tools,
            choice=choice,
            parallel=ask.parallel is not False,
            format=parser,
            otherwise=otherwise.grammar if choice == "auto" else None,
        )
        made = await self._read(asked)
        if choice == "none" and otherwise.grammar:
            return otherwise
        return ResolvedConstraint(made, field)

    async def _read(self, asked: Asked) -> Grammar:
        name, limit = asked.field, self.settings.max_schema_bytes
        try:
            size = _size(asked.source)
            if size > limit:
                raise GrammarError(
                    f"the constraint has {size} bytes; {limit} are allowed (max_schema_bytes)"
                )
            is_long = size > LONG_SOURCE
            grammar = await self._read_elsewhere(asked.call) if is_long else asked.call()
            grammar.source.encode()
            return grammar
        except RecursionError:
            raise GrammarError("the constraint is nested too deeply", name) from None
        except UnicodeError as error:
            raise GrammarError(f"the constraint is not valid Unicode: {error}", name) from None
        except GrammarError as error:
            inside = error.param or ""
            own = name == "tools" and inside.startswith(("tools", "tool_choice"))
            raise GrammarError(str(error), inside if own else name) from None

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

    def _fields(self, body: Constraint) -> Iterator[Asked]:
        """Those that a body has besides its response format."""
        for name, kind in SGLANGS_NAMES.items():
            if (value := getattr(body, name)) is not None:
                yield self._asked(name, kind, value)
        if isinstance(body, GenerationBody) and body.structured_outputs is not None:
            yield self._structured(body.structured_outputs)
        if isinstance(body, OpenAIBody):
            for kind, value in body.guided.items():
                yield self._asked(f"guided_{kind}", kind, value)

    def _formats(self, form: Any, name: str) -> Iterator[Asked]:
        """That of a response format, if it is one."""
        match form:
            case JsonObjectFormat(schema_=None):
                yield self._asked(name, "json_object", True)
            case JsonObjectFormat():
                yield self._asked(name, "json", form.schema_)
            case JsonSchemaFormat():
                schema, strict = form.json_schema.schema_, form.json_schema.strict
                best_effort = None if strict is None else not strict
                yield self._asked(name, "json", schema, best_effort=best_effort)
            case StructuralTagFormat():
                tag = form.model_dump(exclude_none=True)
                yield self._asked(name, "structural_tag", tag)

    def _structured(self, given: StructuredOutputs) -> Asked:
        """vLLM's ``structured_outputs``."""
        values = {kind: getattr(given, kind if kind != "json" else "json_") for kind in KINDS}
        kinds = [kind for kind, value in values.items() if value is not None and value is not False]
        if len(kinds) != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; "
                f"it has {', '.join(kinds) or 'none'}",
                "structured_outputs",
            )
        kind = kinds[0]
        options = {name: getattr(given, name) or None for name in STRUCTURED_OPTIONS}
        for name, value in options.items():
            wanted = [each for each in KINDS if name in OPTIONS[each]]
            if value is not None and kind not in wanted:
                field = f"structured_outputs.{name}"
                raise InvalidRequest(f"{field} goes with {' or '.join(wanted)}", field)
        if given.disable_any_whitespace is not None:
            options["whitespace"] = "compact" if given.disable_any_whitespace else "bounded"
        return self._asked(f"structured_outputs.{kind}", kind, values[kind], **options)

    def _asked(self, field: str, kind: str, source: Any, **options: Any) -> Asked:
        """A constraint with the options that its kind takes; None is the server's default."""
        given = self._defaults | {name: v for name, v in options.items() if v is not None}
        taken = {name: value for name, value in given.items() if name in OPTIONS[kind]}
        return Asked(field, kind, source, taken)


def _size(source: Any) -> int:
    """Bytes of a constraint's text; GrammarError if it is not valid text."""
    try:
        return len(source.encode() if isinstance(source, str) else msgspec.json.encode(source))
    except OverflowError:
        return len(json.dumps(source))
    except (UnicodeError, ValueError) as error:
        raise GrammarError(f"the constraint is not valid text: {error}") from None


class GrammarReader:
    """Runs calls that make grammars in worker processes, which are kept for the next call.

    A schema of some hundred kilobytes can take a minute to check against its metaschema, in pure
    Python, which a thread could neither stop nor do beside the loop.
    """

    def __init__(self) -> None:
        self._pool = make_pool(None, READING)

    def warm(self) -> None:
        """Start a worker for the first call, which would wait for it."""
        self._pool.warm()

    async def read(self, call: bytes) -> Grammar:
        """The grammar that a call makes; cancelling it ends its worker.

        Args:
            call: Pickled; takes no arguments and returns a grammar.

        Raises:
            GrammarError: as the call, or it took too long or too much memory.
            QueueFull: too many are being read.
            EngineUnavailable: two workers in turn were killed or stopped by others, or the
                machine has no memory.
        """
        try:
            grammar: Grammar = await asyncio.wrap_future(
                self._pool.submit(Read(call), HOLDER.get())
            )
            return grammar
        except CompileFailure as failure:
            text = str(failure)
            if failure.kind == "busy":
                raise QueueFull(text) from None
            if failure.kind in ("unavailable", "no_memory", "closed"):
                raise EngineUnavailable(text) from None
            raise GrammarError(text) from None

    async def close(self) -> None:
        """End all workers."""
        await asyncio.to_thread(self._pool.close)
