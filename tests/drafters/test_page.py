"""The page on drafters says what is there, and its example runs."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from overlap_spec.config import EngineConfig, drafter_names
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from tests.support import mtp
from tests.support.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "drafters.md").read_text()
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``heading``."""
    table = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_drafter_has_a_row() -> None:
    named = {row[0].strip("`") for row in rows("`--speculative-algorithm`")}
    assert named == {*drafter_names(), "none", "package.module:Class"}


def test_every_layout_of_the_tests_has_a_row() -> None:
    table = {row[0]: row[1].strip("`") for row in rows("layout")}
    assert table == {name: case.config["architectures"][0] for name, case in LAYOUTS.items()}


def test_every_layout_of_next_token_modules_has_a_row() -> None:
    assert [row[0] for row in rows("names")] == list(mtp.LAYOUTS)


def test_every_option_of_ngram_has_a_row() -> None:
    table = {row[0].strip("`"): row[1] for row in rows("setting")}
    defaults = {f.name: f.default for f in fields(EngineConfig) if f.name.startswith("ngram_")}
    assert set(table) == set(defaults)
    for name, default in defaults.items():
        shown = f"{default // 2**20} MiB" if name.endswith("bytes") else str(default).lower()
        assert table[name] == shown, name


def test_the_example_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "known_pieces.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(str(tmp_path))
    types = {"name": "string", "age": "integer", "city": "string"}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in types.items()},
        "required": list(types),
        "additionalProperties": False,
    }
    settings = {"algorithm": "known_pieces:KnownPieces", "adaptive": "static"}
    with Engine(**settings, grammar_isolated=False) as engine:
        prompt = "Maria Lopez is 34 and lives in Lisbon."
        output = engine.generate(prompt, Grammar.json_schema(schema), {"temperature": 0})
        assert engine.snapshot()["drafter"]["faults"] == 0
    assert set(output.parsed) == set(types)
    # Of each piece all but its first token.
    assert output.stats.accepted_drafts == 6
    monkeypatch.delitem(sys.modules, "known_pieces")


def test_the_example_is_short_and_clean(tmp_path: Path) -> None:
    assert len(BLOCK.splitlines()) <= 40
    (tmp_path / "known_pieces.py").write_text(BLOCK)
    rules = ["--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for command in (["check", "--ignore=ARG", *rules], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
