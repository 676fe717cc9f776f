"""The command line: ``generate``, ``serve``, ``profile``, ``doctor`` and ``train``."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from overlap_spec.cli_train import train
from overlap_spec.config import EngineConfig, helps
from overlap_spec.errors import ConfigError, InvalidRequest, OverlapSpecError
from overlap_spec.server.settings import ServerSettings

if TYPE_CHECKING:
    from overlap_spec.grammar.spec import Grammar
    from overlap_spec.types import Output

app = typer.Typer(
    name="overlap-spec",
    help="Structured generation at speculative speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Fields of the settings that are flags; their help and names are the fields' own.
ENGINE_FLAGS = (
    "model",
    "draft",
    "algorithm",
    "num_steps",
    "eagle_topk",
    "num_draft_tokens",
    "tree",
    "adaptive",
    "tpot_slo_ms",
    "acceptance",
    "threshold_single",
    "threshold_acc",
    "relaxed_topk",
    "relaxed_delta",
    "overlap",
    "grammar_backend",
    "dtype",
    "quantization",
    "device",
    "threads",
    "context_length",
    "mem_fraction_static",
    "max_running_requests",
    "chunked_prefill_size",
)
SERVING_ENGINE_FLAGS = (
    "max_total_tokens",
    "mask_deadline_ms",
    "ngram_max_matching_size",
    "ngram_public_pool",
    "ngram_keep_all",
    "ngram_use_oldest",
    "ngram_pool_bytes",
)
SERVER_FLAGS = (
    "host",
    "port",
    "api_key_file",
    "admin_api_key_file",
    "tool_call_parser",
    "reasoning_parser",
    "best_effort",
    "max_queued_requests",
    "request_timeout_s",
    "drain_timeout_s",
    "max_connections",
    "header_timeout_s",
    "body_timeout_s",
    "idle_timeout_s",
    "max_body_bytes",
    "max_bodies_bytes",
    "max_front_bytes",
    "max_schema_bytes",
    "max_choices",
)
HELP = {name: help.text for name, help in helps(ServerSettings).items()}
Command = TypeVar("Command", bound=Callable[..., Any])


def with_flags(settings: Any, flags: Sequence[str]) -> Callable[[Command], Command]:
    """Give a command fields of a settings class as flags, with their types, defaults and help.

    The command takes them as keywords. Of several decorators the lowest flags come first.
    """
    types, about = get_type_hints(settings), helps(settings)
    defaults = {field.name: field.default for field in fields(settings)}
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[
                types[name], typer.Option(*about[name].flags, help=about[name].text)
            ],
        )
        for name in flags
    ]

    def add(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return command

    return add


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of the command's flags from a file.

    Raises:
        ConfigError: the file cannot be read, or a key is not a flag.
    """
    if path is not None:
        context.default_map = config_values(path, context.command.params)
    return path


def config_values(path: Path, params: Sequence[Any]) -> dict[str, Any]:
    """Values of a YAML or TOML file by parameter name; keys are flags, with or without dashes."""
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
@with_flags(EngineConfig, ENGINE_FLAGS)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")] = "-",
    schema: Annotated[str | None, typer.Option(help="JSON schema: a file or the text.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression.")] = None,
    ebnf: Annotated[Path | None, typer.Option(help="File with an EBNF grammar.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="One of these; repeat it.")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Any JSON object.")] = False,
    whitespace: Annotated[str, typer.Option(help=HELP["whitespace"])] = "compact",
    best_effort: Annotated[bool, typer.Option("--best-effort", help=HELP["best_effort"])] = False,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Figures as JSON on stderr.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome/Perfetto trace to this file.")
    ] = None,
    **engine_flags: Any,
) -> None:
    """Generate for one prompt; only the text goes to standard output."""
    from overlap_spec.doctor import check_files
    from overlap_spec.types import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    layout = read_whitespace(whitespace)
    grammar = build_grammar(schema, regex, ebnf, choice, json_object, layout, best_effort)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    # Torch and the libraries only after a mistake in the flags or files has been told.
    check_files(EngineConfig.build(**engine_flags))
    from overlap_spec.engine import Engine

    with Engine(**engine_flags) as engine:
        output = engine.generate(text, grammar, sampling, raw=raw)
        if trace is not None:
            engine.timeline.write_trace(trace)
    show(output, stats)


def show(output: Output, stats: bool) -> None:
    """Print an output, and with ``stats`` its figures on stderr.

    Raises:
        OverlapSpecError: the output has an error or is not valid.
    """
    print(output.text)
    for warning in output.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if stats:
        figures = {"finish_reason": output.finish_reason, **output.stats.to_dict()}
        print(json.dumps(figures), file=sys.stderr)
    if output.error is not None:
        raise OverlapSpecError(output.error)
    if output.verdict is not None and not output.verdict.valid:
        raise OverlapSpecError(f"the output is not valid: {output.verdict.reason}")


def read_whitespace(text: str) -> Any:
    """``compact``, ``bounded`` or an indent's width; ConfigError for any other text."""
    if text in ("compact", "bounded"):
        return text
    if text.isdecimal() and int(text) <= 8:
        return int(text)
    raise ConfigError(f"whitespace must be compact, bounded or an indent up to 8: {text!r}")


def build_grammar(
    schema: str | None,
    regex: str | None,
    ebnf: Path | None,
    choice: list[str] | None,
    json_object: bool,
    whitespace: Any,
    best_effort: bool,
) -> Grammar | None:
    """The grammar of the one constraint flag that is given, or None.

    Raises:
        InvalidRequest: several flags are given, or one cannot be read.
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
@with_flags(EngineConfig, ENGINE_FLAGS + SERVING_ENGINE_FLAGS)
@with_flags(ServerSettings, SERVER_FLAGS)
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="YAML or TOML file with values of these flags; the command line overrides it.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OVERLAP_SPEC_API_KEY", help=HELP["api_key"]),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(envvar="OVERLAP_SPEC_ADMIN_API_KEY", help=HELP["admin_api_key"]),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help=HELP["served_model_name"])] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file to use instead of the checkpoint's template.")
    ] = None,
    whitespace: Annotated[str, typer.Option(help=HELP["whitespace"])] = "compact",
    stall_timeout_s: Annotated[
        float,
        typer.Option(
            help="Restart an engine that owes an answer and sends nothing for so long, in seconds."
        ),
    ] = 120.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help=f"{HELP['cors_origins']} Repeat it.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help=f"{HELP['allowed_hosts']} Repeat it.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    **flags: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's API; by default the embedded model."""
    from overlap_spec.doctor import check_files
    from overlap_spec.server.launch import launch

    del config  # `read_config` has made its values the flags' defaults.
    template = read_template(chat_template)
    # Torch and the libraries only after a mistake in the files has been told.
    check_files(EngineConfig.build(model=flags["model"]), template)
    launch(
        api_key=api_key,
        admin_api_key=admin_api_key,
        served_model_name=served_model_name,
        chat_template=template,
        whitespace=read_whitespace(whitespace),
        stall_timeout_s=stall_timeout_s,
        cors_origin=cors_origin,
        allowed_host=allowed_host,
        log_level=log_level,
        **flags,
    )


def read_template(path: Path | None) -> str | None:
    """The text of a file with a chat template; ConfigError if it cannot be read."""
    try:
        return None if path is None else path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None


@app.command()
@with_flags(
    EngineConfig,
    ("model", "draft", "algorithm", "dtype", "device", "threads", "max_running_requests"),
)
def profile(**engine_flags: Any) -> None:
    """Measure what steps cost here, for the policies auto and adaspec; kept in the user's cache."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from overlap_spec.engine.cost_model import profile as measure

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring")

        def show_progress(done: tuple[int, int]) -> None:
            bar.update(task, completed=done[0], total=done[1])

        model, path = measure(EngineConfig.build(**engine_flags), show_progress)
    table = Table("cost", "ms", title="overlap-spec profile")
    for name, value in model.to_dict().items():
        if isinstance(value, float) and "error" not in name:
            table.add_row(name.replace("_", " "), f"{value:.5f}")
    Console().print(table)
    knee = f"from {model.knee_nodes} rows on" if model.knee_nodes else "none"
    print(f"knee of verify: {knee}")
    print(f"error of the fit: median {model.error or 0:.1%}, worst {model.worst_error or 0:.1%}")
    print(f"saved as {path}")


@app.command()
@with_flags(EngineConfig, ("model", "draft", "algorithm"))
def doctor(**paths: Any) -> None:
    """Show the installed libraries, and the device, kernels and weights that would be used."""
    from rich.console import Console
    from rich.table import Table

    from overlap_spec.doctor import examine

    table = Table("what", "finding", "ok", title="overlap-spec doctor")
    findings = examine(**paths)
    for what, finding, good in findings:
        table.add_row(what, finding, "[green]yes[/]" if good else "[red]no[/]")
    Console().print(table)
    if not all(good for _, _, good in findings):
        raise typer.Exit(1)


app.command()(train)


def main() -> None:
    """Entry point: user errors print one line on stderr and exit with code 2."""
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
