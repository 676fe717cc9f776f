"""The README says only what runs: every command of its table and every Python block, with the
answers that stand beside them."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from overlap_spec import cli
from overlap_spec.cli.terminal import ORIGINS
from tests.support.tiers import few

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| .* \| `(overlap-spec [^`]+)` \| (.*) \|$", README, re.MULTILINE)
COMMANDS = [row for row in ROWS if "FOLDER" not in row[0]]
# What measures nothing and answers one request.
QUICK = [row for row in COMMANDS if row[0].startswith("overlap-spec generate")]
FILES = next(b for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "<<" in b)
SERVES = [b for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if " serve " in b]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


def test_every_command_of_the_page_has_its_row() -> None:
    commands = re.findall(r"`(overlap-spec (?:generate|batch|doctor|profile|train)[^`]*)`", README)
    assert len(commands) == len(ROWS) >= 12


@pytest.mark.parametrize(("command", "answer"), few(COMMANDS, *QUICK[::3]))
def test_command(
    command: str,
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    subprocess.run(["bash", "-ec", FILES], cwd=folder, check=True)
    monkeypatch.chdir(folder)
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words)
    cli.main()
    printed = capsys.readouterr()
    text = printed.out.strip()
    assert text if answer == "a table" else f"`{text}`" == answer
    if "--schema" in command:
        schema = json.loads(Path(re.findall(r"--schema (\S+)", command)[0]).read_text())
        jsonschema.validate(json.loads(text), schema)
    if "--stats" in command:
        assert json.loads(printed.err.strip().splitlines()[-1])["accept_length"] >= 1


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.splitlines()[0])
def test_python_block(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    answers = re.findall(r"print\(.+\)  # (.+)$", block, re.MULTILINE)
    assert answers
    assert capsys.readouterr().out.splitlines() == answers


@pytest.mark.parametrize("block", few(PYTHON, PYTHON[0]), ids=["engine", "asyncio"])
def test_the_page_about_python_runs(block: str) -> None:
    exec(compile(block, "python.md", "exec", dont_inherit=True), {"__name__": "python_page"})


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_picture_is_of_a_chat_and_asks_for_nothing() -> None:
    picture = (ROOT / "docs" / "tokens.svg").read_text()
    assert "](docs/tokens.svg)" in README
    assert set(re.findall(r"https?://[\w.]+", picture)) <= {
        "http://www.w3.org", "https://www.textualize.io",
    }  # fmt: skip
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", picture)
    ElementTree.fromstring(picture)
    for style, _ in ORIGINS.values():
        assert style.split()[-1] in picture


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("block", SERVES, ids=lambda b: b.splitlines()[0])
def test_served_block(block: str) -> None:
    """As it stands, but for the port and the end of a line, which curl leaves to the prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        block = block.replace("30000", str(free.getsockname()[1]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-c", f"{block.rstrip()}\necho"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert shell.stdout is not None
    try:
        answer = json.loads(shell.stdout.readline())
        content = answer["choices"][0]["message"]["content"]
        assert re.findall(r"# content: (.+)$", block, re.MULTILINE) == [content]
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)


def test_first_commands_are_the_makefiles() -> None:
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets[:2] == ["demo", "test"]
    assert all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets)
    assert (
        README.splitlines().index("make test    # linters, types, and the tests, in the same .venv")
        < 25
    )
