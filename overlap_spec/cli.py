"""The command line: ``overlap-spec generate``, ``serve`` and ``doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_spec.errors import ConfigError, InvalidRequest, OverlapSpecError

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


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the command's flags.

    Raises:
        ConfigError: a file that cannot be read, or a key that is no flag.
    """
    if path is not None:
        context.default_map = config_values(path, context.command.params)
    return path


def config_values(path: Path, params: Sequence[Any]) -> dict[str, Any]:
    """Values of a YAML or TOML file by the flags' parameters; keys are flags, dashes or not."""
    import tomllib

    import yaml

    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeError, yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: a mapping of flags to values is expected")
    names = {}
    for param in params:
        for flag in [param.name, *param.opts]:
            names[flag.lstrip("-").replace("-", "_")] = param
    values = {}
    for key, value in data.items():
        param = names.get(str(key).lstrip("-").replace("-", "_"))
        if param is None or param.name in ("config", "help"):
            raise ConfigError(f"--config {path}: unknown key {key!r}; keys are named as the flags")
        if isinstance(value, list) != (param.multiple is True):
            raise ConfigError(f"--config {path}: {key}: one value or a list, as the flag takes it")
        values[param.name] = value
    return values


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
    grammar_backend: BackendOption = "auto",
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
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="YAML or TOML file of these flags, by their names; flags go before it.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 30000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OVERLAP_SPEC_API_KEY", help="Bearer token that clients must send."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the checkpoint's template.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model spells tool calls: hermes, mistral, …")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model marks its thinking: deepseek_r1, qwen3, …")
    ] = None,
    whitespace: Annotated[
        str, typer.Option(help="White space of JSON: compact, bounded, or the indent's width.")
    ] = "compact",
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Leave out schema keywords that nobody holds to.")
    ] = False,
    max_queued_requests: Annotated[int, typer.Option(help="Requests that may wait.")] = 1024,
    request_timeout_s: Annotated[float, typer.Option(help="Time of one request.")] = 600.0,
    drain_timeout_s: Annotated[float, typer.Option(help="Time to end after SIGTERM.")] = 30.0,
    stall_timeout_s: Annotated[
        float, typer.Option(help="A silent engine is started again after this time.")
    ] = 300.0,
    max_body_bytes: Annotated[int, typer.Option(help="Size of a request.")] = 8 * 2**20,
    max_schema_bytes: Annotated[int, typer.Option(help="Size of a schema.")] = 512 * 2**10,
    max_choices: Annotated[int, typer.Option(help="Outputs of one request.")] = 128,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call; repeat it.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    model: ModelOption = None,
    draft: DraftOption = None,
    algorithm: AlgorithmOption = None,
    num_steps: StepsOption = 5,
    eagle_topk: TopKOption = 1,
    num_draft_tokens: NodesOption = None,
    adaptive: AdaptiveOption = "guarded",
    overlap: OverlapOption = "once-sync",
    grammar_backend: BackendOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextOption = None,
    mem_fraction_static: MemoryOption = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds, if fewer than fit.")
    ] = None,
    max_running_requests: RunningOption = 32,
    chunked_prefill_size: PrefillOption = 1024,
    mask_deadline_ms: Annotated[
        float, typer.Option(help="Time of one request's matcher a step; 0 waits for ever.")
    ] = 50.0,
) -> None:
    """Serve the model over HTTP, in OpenAI's shapes; without a flag, the embedded one."""
    given = dict(locals())
    from overlap_spec.server.launch import launch

    # The file's values have become the flags' defaults already.
    del given["config"]
    launch(**given)


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
