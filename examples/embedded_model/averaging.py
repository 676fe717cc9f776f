"""The mean of targets that were trained one from another: between what each of them is best at.

``python -m examples.embedded_model.averaging FOLDER=SHARE FOLDER=SHARE … --out FOLDER`` writes the
target whose weights are the mean of theirs by share ("model soups", arXiv 2203.05482; of a model
and what it was trained on to, arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def mean_of(parts: Sequence[tuple[dict[str, Tensor], float]]) -> dict[str, Tensor]:
    """Each tensor's mean by share, summed in float32, in the first one's type.

    Args:
        parts: State and share of each; the shares sum to 1.

    Raises:
        ValueError: The shares do not, or the states differ in names or shapes.
    """
    if not math.isclose(sum(share for _, share in parts), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares {[share for _, share in parts]} do not sum to 1")
    first = parts[0][0]
    for state, _ in parts[1:]:
        if {n: x.shape for n, x in state.items()} != {n: x.shape for n, x in first.items()}:
            raise ValueError("the targets differ in the names or shapes of their weights")
    return {
        name: torch.stack([state[name].float() * part for state, part in parts]).sum(0).to(x.dtype)
        for name, x in first.items()
    }


def average(folders: Sequence[tuple[Path, float]], out: Path) -> None:
    """Write to ``out`` the mean of the targets of ``folders``; all else is the last one's.

    Raises:
        ValueError: As :func:`mean_of`, or their tokenizers differ.
    """
    tokenizers = {(folder / "tokenizer.json").read_bytes() for folder, _ in folders}
    if len(tokenizers) > 1:
        raise ValueError("the targets have different tokenizers")
    mean = mean_of([(load_file(folder / WEIGHTS), share) for folder, share in folders])
    shutil.copytree(folders[-1][0], out, dirs_exist_ok=True)
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)


def main(arguments: list[str] | None = None) -> None:
    """Read the folders and their shares, and write the mean."""
    parser = argparse.ArgumentParser(
        description="mean of targets that were trained on from another"
    )
    parser.add_argument("parts", nargs="+", metavar="FOLDER=SHARE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    folders = []
    for part in options.parts:
        folder, sign, share = part.rpartition("=")
        try:
            folders.append((Path(folder), float(share)))
        except ValueError:
            sign = ""
        if not sign:
            parser.error(f"{part!r} is not FOLDER=SHARE, as in build/target=0.5")
    try:
        average(folders, options.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
