"""Flags of one request: its constraint and its sampling."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from overlap_spec.cli.flags import GRAMMAR, OUTPUT, SAMPLING, SERVER_HELP
from overlap_spec.config import setting
from overlap_spec.errors import ConfigError, GrammarError, InvalidRequest, reason

if TYPE_CHECKING:
    from overlap_spec.grammar.spec import AdditionalProperties, Formats, Grammar, KeyOrder

Flags = TypeVar("Flags")
# Flags of which a request may have one.
KINDS = ("schema", "regex", "ebnf", "structural_tag", "choice", "json_object")


@dataclass(frozen=True)
class ConstraintFlags:
    """What the output must be; at most one of the first six, and tools."""

    schema: str | None = setting("JSON schema: a file or the text.")
    regex: str | None = setting("Regular expression.")
    ebnf: Path | None = setting("File with an EBNF grammar.")
    structural_tag: Path | None = setting("File with a structural tag, JSON.")
    choice: list[str] | None = setting("One of these; repeat it.")
    json_object: bool = setting("Any JSON object.", False, ("--json-object",))
    tools: Path | None = setting(
        "File with tool definitions, JSON as OpenAI has it: text or calls."
    )
    tool_call_parser: str | None = setting(
        "Format of the model's tool calls: a file of grammar/tools/formats (hermes, …); by default "
        "the one that the chat template shows."
    )
    whitespace: str = setting(SERVER_HELP["whitespace"], "compact")
    key_order: str = setting(
        "Order of members under --schema: schema, or any (up to 9 named ones).", "schema"
    )
    formats: str = setting(
        "What format is under --schema: assertion (held), or annotation.", "assertion"
    )
    best_effort: bool = setting(SERVER_HELP["best_effort"], False, ("--best-effort",))

    def asked(self) -> list[str]:
        """The flags of the constraints that are given."""
        # An empty text too asks for something.
        given = [name for name in KINDS if getattr(self, name) not in (None, False, [])]
        return [f"--{name.replace('_', '-')}" for name in given]

    def grammar(self, model: str | None, additional_properties: str = "closed") -> Grammar | None:
        """The grammar of the flags, or None for free text.

        Args:
            model: The checkpoint, whose chat template shows the format of its tool calls; None is
                the embedded model.
            additional_properties: The engine's setting.

        Raises:
            InvalidRequest: several constraints are given, or one cannot be read; names the file.
        """
        from overlap_spec.grammar.spec import Grammar

        asked, layout = self.asked(), read_whitespace(self.whitespace)
        if len(asked) > 1:
            raise InvalidRequest(f"{' and '.join(asked)}: only one constraint at a time", asked[1])
        with self.naming():
            made = self._constraint(layout, cast("AdditionalProperties", additional_properties))
        calls = self.read_tools()
        if calls is None:
            return made
        with _naming(f"--tools {self.tools}"):
            form = self._tool_format(model)
            return Grammar.tools(
                calls,
                format=form,
                otherwise=made,
                whitespace=layout,
                additional_properties=cast("AdditionalProperties", additional_properties),
            )

    def _constraint(self, layout: Any, additional: AdditionalProperties) -> Grammar | None:
        from overlap_spec.grammar.spec import Grammar

        if self.schema is not None:
            path = self.schema_file
            source = self.schema if path is None else read_text("--schema", path)
            return Grammar.json_schema(
                source,
                whitespace=layout,
                best_effort=self.best_effort,
                key_order=cast("KeyOrder", self.key_order),
                formats=cast("Formats", self.formats),
                additional_properties=additional,
            )
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.ebnf:
            return Grammar.ebnf(read_text("--ebnf", self.ebnf))
        if self.structural_tag:
            text = read_text("--structural-tag", self.structural_tag)
            return Grammar.structural_tag(text, whitespace=layout, additional_properties=additional)
        if self.choice:
            return Grammar.choice(self.choice)
        return Grammar.json_object(whitespace=layout) if self.json_object else None

    @property
    def schema_file(self) -> Path | None:
        """The file of ``--schema``; None where it is the text itself."""
        if not self.schema or self.schema.strip() in ("true", "false"):
            return None
        return None if self.schema.lstrip().startswith("{") else Path(self.schema)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Have errors of the constraint inside the block name the file that it comes from."""
        file = self.schema_file or self.ebnf or self.structural_tag
        with _naming(f"{self.asked()[0]} {file}") if file else contextlib.nullcontext():
            yield

    def read_tools(self) -> list[Any] | None:
        """The tool definitions of ``--tools``; None without it."""
        if self.tools is None:
            return None
        try:
            found = json.loads(read_text("--tools", self.tools))
        except ValueError as error:
            raise InvalidRequest(f"--tools {self.tools}: the file is not JSON: {error}") from None
        if not isinstance(found, list):
            raise InvalidRequest(f"--tools {self.tools}: a JSON list of tools is expected")
        return found

    def _tool_format(self, model: str | None) -> str:
        if self.tool_call_parser is not None:
            return self.tool_call_parser
        from overlap_spec.server.launch import guess_parser

        guess = guess_parser(model, None)
        if guess is None:
            raise ConfigError(
                "the chat template shows no known format of tool calls: name it with "
                "--tool-call-parser"
            )
        return guess


CONSTRAINT_FLAGS = {field.name: GRAMMAR for field in fields(ConstraintFlags)} | {
    "tools": OUTPUT,
    "tool_call_parser": OUTPUT,
}


# Fields of sampling that are flags.
SAMPLING_FLAGS = dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"), SAMPLING
)


def take(settings: type[Flags], names: Iterable[str], flags: dict[str, Any]) -> Flags:
    """The settings that a command's keywords hold; these are removed from ``flags``."""
    return settings(**{name: flags.pop(name) for name in names})


def read_whitespace(text: str) -> Any:
    """``compact``, ``bounded`` or an indent's width; ConfigError for any other text."""
    if text in ("compact", "bounded"):
        return text
    if text.isdecimal() and int(text) <= 8:
        return int(text)
    raise ConfigError(f"whitespace must be compact, bounded or an indent up to 8: {text!r}")


def read_text(flag: str, path: Path) -> str:
    """The text of a flag's file; InvalidRequest names both if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        hint = ", and no JSON schema" if flag == "--schema" and not path.exists() else ""
        raise InvalidRequest(f"{flag} {path}: {reason(error)}{hint}") from None


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{source}: {error}") from None
