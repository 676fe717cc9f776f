"""The pages for users name flags, fields, errors and codes that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import overlap_spec
from overlap_spec import errors
from overlap_spec.cli import app
from overlap_spec.server.chat import ChatBody
from overlap_spec.server.completions import CompletionBody
from overlap_spec.server.metrics import FrontState, Metrics
from overlap_spec.server.protocol import StructuredOutputs
from overlap_spec.server.sglang import AbortBody, GenerateBody, SGLangSampling
from overlap_spec.types import SamplingParams

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GROUP: Any = typer.main.get_command(app)
FLAGS = {
    name: {flag for param in command.params for flag in param.opts} | {"--help"}
    for name, command in GROUP.commands.items()
}
ALL_FLAGS = set().union(*FLAGS.values()) | {
    "--install-completion",
    "--show-completion",
    "--version",
}
# Of other programs that the pages speak of.
OTHERS = {
    "deployment.md": {"--build-arg", "--dry-run", "--gpus", "--pids-limit", "--rm", "--no-deps"},
    "tuning.md": {"--model", "--before"},
    "cli.md": {"--format"},
    "errors.md": set(),
}


def page(name: str) -> str:
    return (DOCS / name).read_text()


def table(name: str, title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    section = page(name).split(f"\n## {title}\n")[1].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("name", OTHERS)
def test_flags_exist(name: str) -> None:
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page(name)))
    assert found - OTHERS[name] - ALL_FLAGS == set()


def test_flags_for_migrants_exist() -> None:
    rows = table("migration.md", "Flags of the server")
    assert len(rows) > 20
    for *_, here in rows:
        flags = re.findall(r"--[a-z-]+", here)
        assert flags
        assert set(flags) <= FLAGS["serve"], here


def test_flags_with_sglangs_names_are_taken() -> None:
    for theirs, *_ in table("migration.md", "Flags of the server"):
        for flag in re.findall(r"--[a-z-]+", theirs):
            assert flag in FLAGS["serve"], flag


def test_fields_for_migrants_exist() -> None:
    def fields(*models: Any) -> set[str]:
        return {
            field.alias or name for model in models for name, field in model.model_fields.items()
        }

    known = fields(ChatBody, CompletionBody, GenerateBody, AbortBody, SGLangSampling)
    known |= ChatBody.neutral.keys()
    inside = {f"structured_outputs.{name}" for name in fields(StructuredOutputs)}
    routes = {"/generate", "/abort_request", "/tokenize", "/detokenize"}
    rows = table("migration.md", "Fields of a request")
    for *_, here in rows:
        names = code(here)
        assert names
        assert set(names) <= known | inside | routes, here
    # What is taken as others name it.
    for row in rows:
        for name in code(row[0]) + code(row[1]):
            assert name in known | inside | routes, name


def test_metrics_for_migrants_exist() -> None:
    families = {metric.name for metric in Metrics().registry.collect()}
    text = Metrics().render(None, FrontState()).decode()
    source = (ROOT / "overlap_spec" / "server" / "metrics.py").read_text()
    for *_, here in table("migration.md", "Metrics"):
        (name,) = code(here)
        short = name.removeprefix("overlap_spec:").removesuffix("_total")
        assert f"overlap_spec:{short}" in families or f'"{short}"' in source, name
    assert "overlap_spec:engine_up" in text


def test_python_for_migrants_exists() -> None:
    rows = " ".join(row[-1] for row in table("migration.md", "Python"))
    for name in re.findall(r"Grammar\.(\w+)", rows):
        assert hasattr(overlap_spec.Grammar, name)
    assert "max_tokens" in SamplingParams.__dataclass_fields__


def test_every_error_has_its_row() -> None:
    listed = [code(row[0])[0] for row in table("errors.md", "In Python")]
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OverlapSpecError)
    }
    assert set(listed) == classes - {"OverlapSpecError"}
    assert set(listed[:-2]) <= set(overlap_spec.__all__)


def test_every_code_of_an_http_error_has_its_row() -> None:
    told = " ".join(row[1] for row in table("errors.md", "Over HTTP"))
    sources = [path.read_text() for path in (ROOT / "overlap_spec" / "server").rglob("*.py")]
    used = set(re.findall(r'code="(\w+)"', " ".join(sources)))
    assert len(used) > 6
    assert used - set(code(told)) == set()
