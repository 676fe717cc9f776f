"""Which checkpoint a benchmark runs on: a folder, a named size, or the embedded model."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench import targets
from bench.padded import Sizes
from overlap_spec.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    targets.add_model_flags(parser)
    return parser.parse_args(words)


def test_a_named_model_is_padded_once_and_brings_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pad(target: Path, draft: Path, out: Path, sizes: Sizes, **_: Any) -> None:
        calls.append((target.name, draft.name, sizes))
        (out / "target").mkdir()

    monkeypatch.setattr(targets, "pad", pad)
    options = parsed("--model", "0.75b", "--work", str(tmp_path))
    found = targets.model_settings(options)
    assert found == targets.model_settings(options)
    ((target, draft, sizes),) = calls
    assert (target, draft) == ("target", "eagle3")
    assert (sizes.vocab, sizes.hidden, sizes.layers) == (151936, 1024, 24)
    assert (sizes.intermediate, sizes.heads, sizes.kv_heads) == (4864, 16, 8)
    assert Path(found["model"]).is_dir()
    assert Path(found["draft"]).parent == Path(found["model"]).parent
    assert Path(found["model"]).parent.parent == tmp_path


def test_folders_stay_what_they_are(tmp_path: Path) -> None:
    assert targets.model_settings(parsed()) == {}
    given = parsed("--model", str(tmp_path), "--draft", "head")
    assert targets.model_settings(given) == {"model": str(tmp_path), "draft": "head"}
    with pytest.raises(ConfigError, match=r"'9b' is no folder.*0\.75b"):
        targets.model_settings(parsed("--model", "9b", "--draft", "head"))
