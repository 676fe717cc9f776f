"""What is optional is one file: without it all else runs, and what asks for it is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from overlap_spec.config import drafter_names
from tests.support.tiers import few

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overlap_spec"
# Architectures that others are versions of.
FAMILIES = (
    "cohere", "deepseek_v2", "gemma2", "gemma3", "glm", "qwen2_moe", "qwen3_5", "qwen3_5_moe",
    "qwen3_next",
)  # fmt: skip


class Case(NamedTuple):
    """A file, the engine's settings without it, settings and sampling that ask for it, and how
    these are refused."""

    file: str
    settings: dict[str, Any]
    asks: tuple[dict[str, Any], dict[str, Any]] | None
    error: str


def files(folder: str, *besides: str) -> list[str]:
    found = {path.stem for path in (PACKAGE / folder).glob("*.py")}
    return sorted(found - {"__init__", "base", "auto"} - {*besides})


def cases(tiny: dict[str, Any]) -> dict[str, list[Case]]:
    """By what kind of file is gone."""
    chain = tiny | {"adaptive": "static", "num_steps": 2}
    plain = {k: v for k, v in tiny.items() if k != "draft"} | {"algorithm": "none"}
    parts = [
        Case(
            f"worker/extras/{name}.py",
            chain,
            ({}, {name: 0 if name == "prompt_logprobs" else True}),
            f"InvalidRequest: {name}: this installation is without that part",
        )
        for name in files("worker/extras")
    ]
    parts.append(
        Case(
            "worker/acceptance.py",
            chain,
            ({"relaxed_topk": 2}, {}),
            "ConfigError: threshold_single, threshold_acc and relaxed_topk need",
        )
    )
    parts.append(
        Case(
            "models/lora.py",
            chain,
            ({"lora_modules": ["a=b"]}, {}),
            "ConfigError: lora_modules needs overlap_spec/models/lora.py",
        )
    )
    # Without it drafts are not stopped, and nobody is refused.
    parts.append(Case("worker/draft_stop.py", tiny | {"adaptive": "adaspec"}, None, ""))
    drafters = [
        Case(
            f"drafters/{name}.py",
            chain if name != "eagle3" else plain | {"algorithm": "ngram", "num_steps": 2},
            ({"algorithm": name}, {}),
            "ConfigError: algorithm must be one of",
        )
        for name in drafter_names()
    ]
    asks = ({"algorithm": "suffix,ngram"}, {})
    drafters.append(Case("drafters/row.py", chain, asks, "ConfigError: algorithm 'suffix,ngram': "))
    policies = [
        Case(
            f"speculation/{name}.py",
            chain,
            ({"adaptive": name}, {}),
            f"ConfigError: adaptive policy 'overlap_spec.speculation.{name}:",
        )
        for name in ("adaspec", "auto")
    ]
    backends = [
        Case(
            f"grammar/backends/{name}.py",
            chain,
            ({"grammar_backend": name}, {}),
            f"ConfigError: unknown grammar backend '{name}'",
        )
        for name in files("grammar/backends")
    ]
    architectures = [
        Case(f"models/architectures/{name}.py", chain, None, "")
        for name in files("models/architectures", *FAMILIES, "llama")
    ]
    return {
        "parts": parts,
        "drafters": drafters,
        "policies": policies,
        "backends": backends,
        "architectures": architectures,
    }


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's sources, as an installation has them: without links."""
    folder = tmp_path_factory.mktemp("copied")
    ignored = shutil.ignore_patterns("__pycache__", "embedded", "playground")
    shutil.copytree(PACKAGE, folder / "overlap_spec", ignore=ignored)
    return folder


def run(copied: Path, cases: list[Case]) -> list[Mapping[str, Any]]:
    """What each case found, after the same with all files."""
    sent = json.dumps(
        [Case("", cases[0].settings, None, "")._asdict(), *(c._asdict() for c in cases)]
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/without.py"), str(copied)],
        input=sent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(copied)},
        cwd=copied,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(cases) + 1, done.stderr
    assert not any("failed" in each for each in found), done.stderr
    return found


@pytest.mark.parametrize(
    "kind", few(("parts", "drafters", "policies", "backends", "architectures"), "policies")
)
def test_a_file_can_be_deleted(tiny: dict[str, Any], copied: Path, kind: str) -> None:
    asked = cases(tiny)[kind]
    assert len(asked) > 1
    whole, *found = run(copied, asked)
    for case, without in zip(asked, found, strict=True):
        assert without["tokens"] == whole["tokens"], case.file
        assert without.get("error", "").startswith(case.error), (case.file, without)
