"""The command line, run in the tests' process."""

import shlex
import sys
from collections.abc import Callable

import pytest

from overlap_spec import cli


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Of a command the exit code, and what it printed on either stream."""

    def run(command: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["overlap-spec", *shlex.split(command)])
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run
