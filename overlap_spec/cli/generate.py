"""``overlap-spec generate``: outputs for one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.cli.flags import OUTPUT, with_engine, with_flags
from overlap_spec.cli.request import (
    CONSTRAINT_FLAGS,
    SAMPLING_FLAGS,
    ConstraintFlags,
    read_text,
    take,
)
from overlap_spec.cli.terminal import loading
from overlap_spec.config import EngineConfig
from overlap_spec.errors import InvalidRequest, OverlapSpecError, RequestFailed, reason
from overlap_spec.types import SamplingParams

if TYPE_CHECKING:
    from overlap_spec.engine import Engine
    from overlap_spec.engine.input_processor import PromptOptions
    from overlap_spec.engine.request_handle import RequestHandle
    from overlap_spec.types import Output


@with_engine
@with_flags(SamplingParams, SAMPLING_FLAGS)
@with_flags(ConstraintFlags, CONSTRAINT_FLAGS)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    system: Annotated[str | None, typer.Option(help="The system's message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    n: Annotated[int, typer.Option(min=1, help="Outputs, one after another; seeds count up.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Write the text to this file.", rich_help_panel=OUTPUT)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Figures as JSON on stderr.", rich_help_panel=OUTPUT)
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome/Perfetto trace to this file.", rich_help_panel=OUTPUT),
    ] = None,
    **flags: Any,
) -> None:
    """Generate for one prompt; only the text goes to standard output, on a terminal in pieces."""
    from overlap_spec.doctor import check_files

    constraint = take(ConstraintFlags, CONSTRAINT_FLAGS, flags)
    sampling = take(SamplingParams, SAMPLING_FLAGS, flags)
    messages = as_messages(read_prompt(prompt, prompt_file), system, raw)
    grammar = constraint.grammar(flags["model"], flags["additional_properties"])
    options: PromptOptions = {"raw": raw, "tools": constraint.read_tools()}
    samples = seeded(sampling, n)
    # Torch and the libraries only after a mistake in the flags or files has been told.
    check_files(EngineConfig.build(**flags))
    with written_to(output) as write, loaded(flags) as engine:
        with constraint.naming():
            handles = [engine.submit(messages, grammar, each, **options) for each in samples]
        outputs = [follow(engine, handle, write) for handle in handles]
        if trace is not None:
            engine.gather_spans()
            try:
                engine.timeline.write_trace(trace)
            except OSError as error:
                raise InvalidRequest(f"--trace {trace}: {reason(error)}") from None
    if stats:
        for made in outputs:
            figures = {"finish_reason": made.finish_reason, **made.stats.to_dict()}
            print(json.dumps(figures), file=sys.stderr)
    for made in outputs:
        check(made)


@contextmanager
def loaded(settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine with settings, closed at the end; a terminal shows that it loads."""
    with loading(settings["model"]):
        from overlap_spec.engine import Engine

        engine = Engine(**settings)
    with engine:
        yield engine


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, its file or standard input.

    Raises:
        InvalidRequest: it is given twice, not at all or empty, or the file cannot be read.
    """
    if prompt is not None and file is not None:
        raise InvalidRequest("a prompt and --prompt-file: give one of them", "prompt")
    if prompt is None and file is None and sys.stdin.isatty():
        raise InvalidRequest("give a prompt, --prompt-file, or text on standard input", "prompt")
    if file is not None:
        source, text = f"--prompt-file {file}", read_text("--prompt-file", file)
    elif prompt is None or prompt == "-":
        source, text = "standard input", sys.stdin.read()
    else:
        source, text = "PROMPT", prompt
    if not text.strip():
        raise InvalidRequest(f"{source} is empty: give a prompt there", "prompt")
    return text


def as_messages(prompt: str, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """The prompt as the engine takes it; InvalidRequest for a system's message without a chat."""
    if system is None:
        return prompt
    if raw:
        raise InvalidRequest("--system needs the chat template, which --raw leaves out", "system")
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def seeded(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The sampling of each of ``count`` outputs; a seed counts up."""
    if sampling.seed is None:
        return [sampling] * count
    return [replace(sampling, seed=sampling.seed + number) for number in range(count)]


@contextmanager
def written_to(path: Path | None) -> Iterator[Any]:
    """A function that writes text to a file, or to standard output."""
    if path is None:
        yield sys.stdout.write
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise InvalidRequest(f"--output {path}: {reason(error)}") from None
    with file:
        yield file.write


def follow(engine: Engine, handle: RequestHandle, write: Any) -> Output:
    """Write a request's text as it comes, with a line's end behind it; its output."""
    to_terminal = write == sys.stdout.write and sys.stdout.isatty()
    try:
        for delta in engine.pieces(handle):
            write(delta.text)
            if to_terminal:
                sys.stdout.flush()
    except RequestFailed:
        # Told by `check`, after the statistics.
        pass
    write("\n")
    assert handle.output is not None
    return handle.output


def check(output: Output) -> None:
    """Raise OverlapSpecError if an output has an error or is not valid."""
    if output.error is not None:
        raise OverlapSpecError(output.error)
    for warning in output.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if output.verdict is not None and not output.verdict.valid:
        raise OverlapSpecError(f"the output is not valid: {output.verdict.reason}")
