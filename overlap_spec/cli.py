"""The command line: ``overlap-spec generate`` and ``overlap-spec doctor``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.errors import InvalidRequest, OverlapSpecError

if TYPE_CHECKING:
    from overlap_spec.grammar.spec import Grammar

app = typer.Typer(
    name="overlap-spec",
    help="Structured generation at speculative speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


ModelOption = Annotated[
    str | None, typer.Option("--model", help="Checkpoint folder; the embedded model if absent.")
]
DraftOption = Annotated[
    str | None,
    typer.Option("--speculative-draft-model-path", "--draft", help="Draft head folder."),
]
AlgorithmOption = Annotated[
    str | None, typer.Option("--speculative-algorithm", help="eagle3 or none.")
]
StepsOption = Annotated[int, typer.Option("--speculative-num-steps", help="Depth of the draft.")]
TopKOption = Annotated[
    int, typer.Option("--speculative-eagle-topk", help="Branches of a draft step; 1 is a chain.")
]
NodesOption = Annotated[
    int | None,
    typer.Option("--speculative-num-draft-tokens", help="Verified nodes, root included."),
]
AdaptiveOption = Annotated[
    str,
    typer.Option(
        "--speculative-adaptive-config",
        "--adaptive",
        help="guarded, static, default, aggressive, with-off, or a JSON file.",
    ),
]
OverlapOption = Annotated[str, typer.Option("--overlap", help="How grammar work overlaps.")]
BackendOption = Annotated[str, typer.Option("--grammar-backend", help="Library of the masks.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
ContextOption = Annotated[
    int | None, typer.Option("--context-length", help="Longest prompt + output, in tokens.")
]
MemoryOption = Annotated[
    float | None, typer.Option("--mem-fraction-static", help="Share of memory for the engine.")
]
RunningOption = Annotated[
    int, typer.Option("--max-running-requests", help="Requests that run at once.")
]
PrefillOption = Annotated[
    int, typer.Option("--chunked-prefill-size", help="Prompt tokens of a step, at most.")
]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")] = "-",
    schema: Annotated[str | None, typer.Option(help="JSON schema: a file or the text.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression.")] = None,
    ebnf: Annotated[Path | None, typer.Option(help="File with an EBNF grammar.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="One of these; repeat it.")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Any JSON object.")] = False,
    whitespace: Annotated[
        str, typer.Option(help="compact, bounded, or the indent's width.")
    ] = "compact",
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Serve schemas that no backend reads exactly.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Figures as JSON on stderr.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome/Perfetto trace to this file.")
    ] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    algorithm: AlgorithmOption = None,
    num_steps: StepsOption = 5,
    eagle_topk: TopKOption = 1,
    num_draft_tokens: NodesOption = None,
    adaptive: AdaptiveOption = "guarded",
    overlap: OverlapOption = "once-sync",
    grammar_backend: BackendOption = "xgrammar",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextOption = None,
    mem_fraction_static: MemoryOption = None,
    max_running_requests: RunningOption = 32,
    chunked_prefill_size: PrefillOption = 1024,
) -> None:
    """Generate for one prompt; the text alone goes to standard output."""
    from overlap_spec.engine import Engine
    from overlap_spec.types import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    grammar = build_grammar(
        schema, regex, ebnf, choice, json_object, parse_whitespace(whitespace), best_effort
    )
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    engine = Engine(
        model,
        draft=draft,
        algorithm=algorithm,
        num_steps=num_steps,
        eagle_topk=eagle_topk,
        num_draft_tokens=num_draft_tokens,
        adaptive=adaptive,
        overlap=overlap,
        grammar_backend=grammar_backend,
        dtype=dtype,
        device=device,
        context_length=context_length,
        mem_fraction_static=mem_fraction_static,
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
    )
    with engine:
        output = engine.generate(text, grammar, sampling, raw=raw)
        if trace is not None:
            engine.timeline.write_trace(trace)
    print(output.text)
    if stats:
        figures = {"finish_reason": output.finish_reason, **output.stats.to_dict()}
        print(json.dumps(figures), file=sys.stderr)
    if output.error is not None:
        raise OverlapSpecError(output.error)


def parse_whitespace(text: str) -> str | int:
    """``compact``, ``bounded`` or an indent; InvalidRequest otherwise."""
    if text.isdigit():
        return int(text)
    if text in ("compact", "bounded"):
        return text
    raise InvalidRequest(f"whitespace must be compact, bounded or a number: {text!r}", "whitespace")


def build_grammar(
    schema: str | None,
    regex: str | None,
    ebnf: Path | None,
    choice: list[str] | None,
    json_object: bool,
    whitespace: Any,
    best_effort: bool,
) -> Grammar | None:
    """The one constraint that the flags ask for, or None.

    Raises:
        InvalidRequest: more than one, or one that cannot be read.
    """
    from overlap_spec.grammar.spec import Grammar

    given = {
        "--schema": schema,
        "--regex": regex,
        "--ebnf": ebnf,
        "--choice": choice,
        "--json-object": json_object,
    }
    asked = [flag for flag, value in given.items() if value]
    if len(asked) > 1:
        raise InvalidRequest(f"{' and '.join(asked)}: only one constraint at a time", asked[1])
    if schema:
        path = Path(schema)
        is_text = schema.lstrip().startswith("{")
        if not is_text and not path.is_file():
            raise InvalidRequest(f"--schema {schema}: no such file, and no JSON object", "schema")
        source = schema if is_text else path.read_text()
        return Grammar.json_schema(source, whitespace=whitespace, best_effort=best_effort)
    if regex:
        return Grammar.regex(regex)
    if ebnf:
        if not ebnf.is_file():
            raise InvalidRequest(f"--ebnf {ebnf}: no such file", "ebnf")
        return Grammar.ebnf(ebnf.read_text())
    if choice:
        return Grammar.choice(choice)
    return Grammar.json_object(whitespace=whitespace) if json_object else None


@app.command()
def doctor(model: ModelOption = None, draft: DraftOption = None) -> None:
    """Show what is installed, which device, which kernels and which weights would be used."""
    from rich.console import Console
    from rich.table import Table

    from overlap_spec.doctor import examine

    table = Table("what", "finding", "ok", title="overlap-spec doctor")
    findings = examine(model, draft)
    for what, finding, good in findings:
        table.add_row(what, finding, "[green]yes[/]" if good else "[red]no[/]")
    Console().print(table)
    if not all(good for _, _, good in findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: errors of use end in one line on stderr and exit code 2."""
    try:
        app(standalone_mode=False)
    except OverlapSpecError as error:
        param = getattr(error, "param", None)
        print(f"error: {f'{param}: ' if param else ''}{error}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        # typer's own usage errors: unknown flags, missing values.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
