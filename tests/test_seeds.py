"""The page on the five documents names files and tests that there are, and its commands run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from overlap_spec import cli

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "seeds.md").read_text()
ROWS = re.findall(r"^\| (.+) \| (`.+`) \| (`.+`) \|$", PAGE, re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_every_mechanism_has_its_file_and_its_test() -> None:
    assert len(ROWS) > 40
    for mechanism, files, tests in ROWS:
        for name in re.findall(r"`([^`]+)`", f"{files} {tests}"):
            assert (ROOT / name).is_file(), (mechanism, name)
        assert all(name.startswith("tests/") for name in re.findall(r"`([^`]+)`", tests))


@pytest.mark.ci
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    assert program == "overlap-spec"
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    cli.main()
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert "accept_length" in printed.err
