"""The checkpoints that benchmarks run on: folders, or the embedded model padded to real sizes; and
engine settings by hand.

``--model`` takes a folder or the name of a preset of ``bench.padded``, as in ``--model 0.75b``:
that is built once, with its draft head, and kept in ``--work``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.padded import PRESETS, Sizes, like, pad
from overlap_spec.config import EMBEDDED
from overlap_spec.errors import ConfigError
from overlap_spec.models.config import read_config

VOCABULARY = 131_072


def work_folder(given: Path | None) -> Path:
    """Where benchmarks keep what they build: ``given``, or a folder for temporary files."""
    return given if given is not None else Path(tempfile.gettempdir()) / "overlap-spec-bench"


def add_model_flags(parser: argparse.ArgumentParser, absent: str = "the embedded one") -> None:
    """``--model``, ``--draft`` and ``--work``.

    Args:
        absent: The model that is taken where none is given.
    """
    names = ", ".join(PRESETS)
    parser.add_argument(
        "--model", help=f"target's folder, or a padded one by name ({names}); {absent} if absent"
    )
    parser.add_argument("--draft", type=Path, help="its EAGLE-3 head; a named model brings its own")
    parser.add_argument("--work", type=Path, help="folder that keeps the padded models")


def model_settings(options: argparse.Namespace) -> dict[str, str]:
    """The engine settings ``model`` and ``draft`` of :func:`add_model_flags`; a named model is
    built where it is not there yet.

    Raises:
        ConfigError: no folder, and no name of a preset; a folder without its head, or a name with
            one.
    """
    model, draft = options.model, options.draft
    if model in PRESETS:
        if draft is not None:
            raise ConfigError(f"--model {model} brings its own draft head: leave --draft out")
        sizes = like(model, read_config(EMBEDDED / "target"))
        target, head = build_once(work_folder(options.work), model, sizes)
        return {"model": str(target), "draft": str(head)}
    if (model is None) != (draft is None):
        raise ConfigError("--model and --draft go together")
    if model is None:
        return {}
    if not Path(model).is_dir():
        raise ConfigError(f"--model {model!r} is no folder, and none of {', '.join(PRESETS)}")
    return {"model": model, "draft": str(draft)}


def by_hand(text: str) -> dict[str, Any]:
    """Engine settings of ``NAME=VALUE,…``; a value is JSON, or else the text itself.

    Raises:
        ConfigError: no such form.
    """
    found = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or not name:
            raise ConfigError(f"--by-hand must be NAME=VALUE,…: {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def padded_target(work: Path, vocab: int = VOCABULARY) -> tuple[Path, Path]:
    """Folders of the embedded model with a vocabulary of ``vocab`` entries (about 150 MB), and of
    its draft head; see :func:`build_once`."""
    return build_once(work, str(vocab), Sizes(vocab=vocab))


def build_once(work: Path, name: str, sizes: Sizes) -> tuple[Path, Path]:
    """Folders of the padded embedded model and its draft head (``0.75b``: 1.5 GB).

    They are built anew when the embedded model or the rules of padding have changed.

    Args:
        work: Folder that keeps them.
        name: Of these sizes.
    """
    folder = work / f"padded-{name}-{_fingerprint()}"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        print(f"writing {folder}", file=sys.stderr)
        fresh = Path(tempfile.mkdtemp(prefix="unfinished-", dir=work))
        try:
            pad(EMBEDDED / "target", EMBEDDED / "eagle3", fresh, sizes)
            # Renamed when it is whole, so that a run that was stopped leaves no half of one.
            if not folder.exists():
                fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder / "target", folder / "eagle3"


def _fingerprint() -> str:
    digest = hashlib.sha256()
    rules = Path(__file__).parent.glob("padded*.py")
    for file in sorted([*EMBEDDED.rglob("*"), *rules]):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
