"""The checkpoints that benchmarks run on: folders, or the embedded model padded to real sizes.

``--model`` takes a folder or the name of a preset of ``bench.padded``, as in ``--model 0.75b``:
that is built once, with its draft head, and kept in ``--work``.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from bench import padding
from bench.padded import pad
from bench.padding.sizes import PRESET_DTYPE, PRESETS, Sizes, like
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


def check_model_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a usage error where a folder is given without its head, or a name with one."""
    if options.model in PRESETS:
        if options.draft is not None:
            parser.error(f"--model {options.model} brings its own draft head: leave --draft out")
    elif (options.model is None) != (options.draft is None):
        parser.error("--model and --draft go together")


def model_settings(options: argparse.Namespace, console: Console | None = None) -> dict[str, str]:
    """The engine settings ``model`` and ``draft`` of :func:`add_model_flags`; a named model is
    built where it is not there yet.

    Raises:
        ConfigError: no folder, and no name of a preset.
    """
    if options.model in PRESETS:
        target, head = preset_target(options.model, work_folder(options.work), console)
        return {"model": str(target), "draft": str(head)}
    if options.model is not None and not Path(options.model).is_dir():
        raise ConfigError(
            f"--model {options.model!r} is no folder, and none of {', '.join(PRESETS)}"
        )
    given = {"model": options.model, "draft": options.draft}
    return {name: str(value) for name, value in given.items() if value is not None}


def padded_target(
    work: Path, console: Console | None = None, vocab: int = VOCABULARY
) -> tuple[Path, Path]:
    """Folders of the embedded model with a vocabulary of ``vocab`` entries (about 150 MB), and of
    its draft head; see :func:`build_once`."""
    return build_once(work, str(vocab), Sizes(vocab=vocab), None, console)


def preset_target(name: str, work: Path, console: Console | None = None) -> tuple[Path, Path]:
    """Folders of the embedded model padded to a preset's cost (``0.75b``: 1.5 GB), and of its
    draft head; see :func:`build_once`."""
    sizes = like(name, read_config(EMBEDDED / "target"), Sizes())
    return build_once(work, name, sizes, PRESET_DTYPE, console)


def build_once(
    work: Path, name: str, sizes: Sizes, dtype: str | None, console: Console | None = None
) -> tuple[Path, Path]:
    """Folders of the padded embedded model and its draft head.

    They are built anew when the embedded model or the rules of padding have changed.

    Args:
        work: Folder that keeps them.
        name: Of these sizes in this type.
        sizes, dtype: As :func:`bench.padded.pad`.
        console: Where progress is shown.
    """
    folder = work / f"padded-{name}-{_fingerprint()}"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="unfinished-", dir=work))
        try:
            pad(EMBEDDED / "target", EMBEDDED / "eagle3", fresh, sizes, dtype, console=console)
            # Renamed when it is whole, so that a run that was stopped leaves no half of one.
            if not folder.exists():
                fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder / "target", folder / "eagle3"


def _fingerprint() -> str:
    digest = hashlib.sha256()
    rules = Path(padding.__file__).parent.glob("*.py")
    for file in sorted([*EMBEDDED.rglob("*"), *rules]):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
