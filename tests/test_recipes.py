"""The page of recipes says only what runs: every block as it stands."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import few

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_section_has_one_block() -> None:
    assert [title for title, _ in RECIPES] == re.findall(r"^## (.+)", PAGE, re.MULTILINE)
    assert len(RECIPES) == PAGE.count("```python")


@pytest.mark.parametrize(
    ("title", "block"), few(RECIPES, RECIPES[0]), ids=[title for title, _ in RECIPES]
)
def test_recipe(title: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(block, f"recipes.md: {title}", "exec", dont_inherit=True), names)
    assert "assert" in block
    assert capsys.readouterr().out.strip()


def test_blocks_are_clean(tmp_path: Path) -> None:
    for number, (_, block) in enumerate(RECIPES):
        (tmp_path / f"recipe{number}.py").write_text(block)
    rules = ["--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for command in (["check", *rules], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
