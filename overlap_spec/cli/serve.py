"""``overlap-spec serve``: a model over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from overlap_spec.cli.flags import (
    CLUSTER_FLAGS,
    MODEL,
    SERVER_FLAGS,
    SERVER_HELP,
    SERVING_ENGINE_FLAGS,
    read_config,
    with_engine,
    with_flags,
)
from overlap_spec.cli.request import read_whitespace
from overlap_spec.cli.terminal import ended_by_sigterm, loading
from overlap_spec.cluster.settings import ClusterSettings
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.server.settings import ServerSettings


def refuse_code(asked: bool) -> bool:
    """ConfigError where a checkpoint's own code is to be run."""
    if asked:
        raise ConfigError(
            "--trust-remote-code: no code from a checkpoint is ever run; architectures are built "
            "in, and one that is not is refused by name. Leave the flag out"
        )
    return asked


@with_engine
@with_flags(ClusterSettings, CLUSTER_FLAGS)
@with_flags(EngineConfig, SERVING_ENGINE_FLAGS)
@with_flags(ServerSettings, SERVER_FLAGS)
def serve(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As --model.", show_default="the embedded model"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="YAML or TOML file with values of these flags; the command line overrides it.",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    served_model_name: Annotated[
        str | None, typer.Option(help=SERVER_HELP["served_model_name"], rich_help_panel=MODEL)
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja file to use instead of the checkpoint's template.", rich_help_panel=MODEL
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", hidden=True, callback=refuse_code)
    ] = False,
    **flags: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's API; by default the embedded model."""
    # Before anything that takes long, and that somebody could wait for.
    with ended_by_sigterm():
        from overlap_spec.cli.ranks import follow
        from overlap_spec.doctor import check_files
        from overlap_spec.server.launch import chat_template_of, check_level, launch, plan

        # `read_config` has made its values the flags' defaults.
        del config, trust_remote_code
        check_level(log_level)
        cluster = ClusterSettings(**{name: flags.pop(name) for name in CLUSTER_FLAGS})
        flags["model"] = one_model(context, checkpoint, flags["model"])
        template = chat_template_of(chat_template)
        # Torch and the libraries only after a mistake in the files has been told.
        check_files(EngineConfig.build(model=flags["model"]), template)
        follow(flags)
        flags["whitespace"] = read_whitespace(flags["whitespace"])
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in flags.items()
        }
        made = plan(served_model_name=served_model_name, chat_template=template, **settings)
        if cluster.replicas is not None:
            from overlap_spec.cluster.launch import launch as launch_replicas

            launch_replicas(made, cluster, log_level)
            return
        with loading(flags["model"], until=("overlap_spec", "uvicorn")):
            launch(made, log_level)


def one_model(context: typer.Context, checkpoint: str | None, model: str | None) -> str | None:
    """The model of the argument or of ``--model``; ConfigError if the command line has both."""
    if checkpoint is None:
        return model
    source = context.get_parameter_source("model")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"{checkpoint!r} and --model {model!r}: name the model once")
    return checkpoint
