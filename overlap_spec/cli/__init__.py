"""The command line: one module a command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from overlap_spec.cli.batch import batch
from overlap_spec.cli.bench import bench
from overlap_spec.cli.chat import chat
from overlap_spec.cli.doctor import doctor
from overlap_spec.cli.generate import generate
from overlap_spec.cli.profile import profile
from overlap_spec.cli.serve import serve
from overlap_spec.cli.train import train
from overlap_spec.errors import OverlapSpecError

app = typer.Typer(name="overlap-spec", no_args_is_help=True, pretty_exceptions_enable=False)
for command in (generate, chat, serve, batch, bench, profile, train, doctor):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        from overlap_spec import __version__

        print(f"overlap-spec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Structured generation at speculative speed."""


def main() -> None:
    """Entry point: user errors print one line on stderr and exit with code 2."""
    try:
        status = app(standalone_mode=False)
    except OverlapSpecError as error:
        param = getattr(error, "param", None)
        named = param and not str(error).startswith(param)
        print(f"error: {f'{param}: ' if named else ''}{error}", file=sys.stderr)
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
    if status:
        # A command's `typer.Exit`, which comes back as its code.
        sys.exit(status)
