"""``overlap-spec chat``: a conversation on the terminal, its tokens coloured by how they came."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from overlap_spec.cli.flags import with_engine, with_flags
from overlap_spec.cli.generate import check, loaded
from overlap_spec.cli.request import CONSTRAINT_FLAGS, KINDS, SAMPLING_FLAGS, ConstraintFlags, take
from overlap_spec.cli.terminal import coloured, legend, stops
from overlap_spec.config import EngineConfig
from overlap_spec.errors import OverlapSpecError, RequestFailed
from overlap_spec.types import SamplingParams

if TYPE_CHECKING:
    from overlap_spec.engine import Engine
    from overlap_spec.types import Output

HELP = """\
/schema FILE|JSON  answers are JSON under a schema
/regex PATTERN     answers match a pattern
/choice A | B | C  answers are one of these
/json              answers are JSON objects
/free              answers are free text
/system TEXT       set the system's message, and start again
/new               start again
/exit, Ctrl-D      leave; Ctrl-C stops an answer"""
FREE = {name: getattr(ConstraintFlags, name) for name in KINDS}


@with_engine
@with_flags(SamplingParams, SAMPLING_FLAGS)
@with_flags(ConstraintFlags, CONSTRAINT_FLAGS)
def chat(
    system: Annotated[str | None, typer.Option(help="The system's message.")] = None, **flags: Any
) -> None:
    """Talk with a model; constraint flags hold for every answer, and /help lists the commands."""
    from overlap_spec.doctor import check_files

    constraint = take(ConstraintFlags, CONSTRAINT_FLAGS, flags)
    sampling = take(SamplingParams, SAMPLING_FLAGS, flags)
    constraint.grammar(flags["model"], flags["additional_properties"])
    check_files(EngineConfig.build(**flags))
    with loaded(flags) as engine:
        Chat(engine, flags["model"], constraint, sampling, system).run()


@dataclass
class Chat:
    """A conversation: its messages, and what holds for the next answer."""

    engine: Engine
    model: str | None
    constraint: ConstraintFlags
    sampling: SamplingParams
    system: str | None
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Read lines until the end of the input; on a terminal with line editing and a legend."""
        self.start()
        prompt = ""
        if sys.stdin.isatty():
            import readline  # noqa: F401  # Gives `input` line editing and a history.

            self.console.print(legend())
            self.console.print("/help lists the commands, Ctrl-D leaves", style="dim")
            prompt = "> "
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print()
                continue
            if line == "/exit":
                return
            if line:
                self.take(line)

    def start(self) -> None:
        """Forget what has been said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def take(self, line: str) -> None:
        """One line: a command, or what the user says. Errors are told, and cost nothing."""
        try:
            if line.startswith("/"):
                self.command(*line[1:].partition(" ")[::2])
            else:
                self.answer(line)
        except OverlapSpecError as error:
            self.console.print(f"error: {error}", style="red", markup=False)

    def command(self, name: str, value: str) -> None:
        """Do what a line that starts with a slash says."""
        commands: dict[str, Callable[[], None]] = {
            "schema": lambda: self.constrain(schema=value),
            "regex": lambda: self.constrain(regex=value),
            "choice": lambda: self.constrain(choice=[each.strip() for each in value.split("|")]),
            "json": lambda: self.constrain(json_object=True),
            "free": lambda: self.constrain(),
            "new": self.start,
            "system": lambda: self.instruct(value),
            "help": lambda: self.console.print(HELP, markup=False),
        }
        if name not in commands:
            raise OverlapSpecError(f"there is no command /{name}; /help lists them")
        commands[name]()

    def constrain(self, **constraint: Any) -> None:
        """Hold the next answers to a constraint, or to none."""
        made = replace(self.constraint, **FREE | constraint)
        made.grammar(self.model, self.engine.config.additional_properties)
        self.constraint = made

    def instruct(self, text: str) -> None:
        """Set the system's message; what has been said is forgotten."""
        self.system = text or None
        self.start()

    def answer(self, said: str) -> None:
        """Ask, and show the answer as it comes; one that fails is not part of the conversation."""
        from overlap_spec.server.origins import TokenOrigins

        asked = [*self.messages, {"role": "user", "content": said}]
        with self.constraint.naming():
            handle = self.engine.submit(
                asked,
                self.constraint.grammar(self.model, self.engine.config.additional_properties),
                replace(self.sampling, origins=True),
                tools=self.constraint.read_tools(),
            )
        origins = TokenOrigins(self.engine.tokenizer)
        with stops() as stopped, closing(self.engine.pieces(handle)) as pieces:
            try:
                for delta in pieces:
                    self.console.print(coloured(origins, delta), end="")
                    if stopped():
                        self.console.print(" (stopped)", style="dim")
                        return
            except RequestFailed:
                # Told by `check`, after the figures.
                pass
        self.console.print()
        assert handle.output is not None
        self.tell(handle.output)
        for warning in handle.output.warnings:
            self.console.print(f"warning: {warning}", style="yellow", markup=False)
        check(handle.output)
        self.messages = [*asked, {"role": "assistant", "content": handle.output.text}]

    def tell(self, output: Output) -> None:
        """A line of figures, on a terminal."""
        if not self.console.is_terminal:
            return
        stats = output.stats
        hidden = ""
        if stats.grammar_ms:
            hidden = f", {1 - min(1, stats.exposed_ms / stats.grammar_ms):.0%} of grammar hidden"
        self.console.print(
            f"{stats.output_tokens} tokens, accept length {stats.accept_length:.2f}, "
            f"{stats.tpot_ms:.1f} ms a token{hidden}",
            style="dim",
        )
