"""The page on training says only what runs; with less data and fewer steps."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from overlap_spec import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^overlap-spec .*$", PAGE, re.MULTILINE)


@pytest.mark.ci
def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (block,) = BLOCKS
    exec(compile(block, "training.md", "exec"), {"__name__": "page"})
    chats = Path("chats.jsonl").read_text().splitlines(True)
    assert len(chats) == 600
    Path("chats.jsonl").write_text("".join(chats[:24]))
    train, generate = COMMANDS
    assert "--minutes 10" in train
    train = train.replace("--minutes 10", "--epochs 0.5 --threads 1 --batch-tokens 512")
    for command in (train, generate):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        cli.main()
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["city"] == "Lisbon"
    assert "accept_length" in printed.err
    report = json.loads(Path("head/report.json").read_text())
    for name in ("steps", "accept_length", "accepted_by_position"):
        assert report[name]
    for file in ("config.json", "model.safetensors", "report.json", "work/checkpoint.pt"):
        assert (tmp_path / "head" / file).exists()
