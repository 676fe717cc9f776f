"""The checkpoints that benchmarks run on: the embedded model padded to a real vocabulary."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from bench import padding
from bench.padded import pad
from bench.padding.sizes import Sizes
from overlap_spec.config import EMBEDDED

VOCABULARY = 131_072


def work_folder(given: Path | None) -> Path:
    """Where benchmarks keep what they build: ``given``, or a folder for temporary files."""
    return given if given is not None else Path(tempfile.gettempdir()) / "overlap-spec-bench"


def padded_target(
    work: Path, console: Console | None = None, vocab: int = VOCABULARY
) -> tuple[Path, Path]:
    """Folders of the padded embedded model and its draft head, built once (about 150 MB).

    They are built anew when the embedded model or the rules of padding have changed.

    Args:
        work: Folder that keeps them.
        console: Where progress is shown.
        vocab: Entries of the vocabulary.
    """
    folder = work / f"padded-{vocab}-{_fingerprint()}"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="unfinished-", dir=work))
        try:
            sizes = Sizes(vocab=vocab)
            pad(EMBEDDED / "target", EMBEDDED / "eagle3", fresh, sizes, console=console)
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
