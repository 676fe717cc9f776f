"""Where a checkpoint's folder is: users give a folder or a name of the Hugging Face hub.

Nothing is asked of the network for a name whose files are in the local cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from overlap_spec.errors import CheckpointError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# What is read besides weights.
SMALL_FILES = (".json", ".jinja")


def is_hub_name(given: str) -> bool:
    """Whether ``given`` is ``org/name`` and no folder or file of that name is here."""
    return HUB_NAME.fullmatch(given) is not None and not Path(given).exists()


@cache
def find_folder(given: str) -> Path:
    """The folder of the checkpoint that a user calls ``given``: a folder, a GGUF file, or
    ``org/name`` on the hub: the local Hugging Face cache is looked up, and filled where there is a
    network and ``HF_HUB_OFFLINE`` is not set. CheckpointError: a file, no such folder, or a name
    that cannot be had; says what to do."""
    path = Path(given)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            from overlap_spec.gguf.file import unpack

            return unpack(path)
        raise CheckpointError(f"{path} is a file: give the folder that it is in, {path.parent}")
    if not is_hub_name(given):
        raise CheckpointError(
            f"{path}: no such folder; give the folder of a Hugging Face checkpoint or its hub "
            "name, org/name"
        )
    return _cached(given) or _download(given)


def _cached(name: str) -> Path | None:
    """The snapshot of ``name`` in the cache, if all of it is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    # Else None, or an object that says that the hub has no such file.
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    return folder if _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    for single in WEIGHTS:
        index = folder / f"{single}.index.json"
        if index.exists():
            try:
                shards = set(json.loads(index.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                return False
            return all((folder / shard).exists() for shard in shards)
        if (folder / single).exists():
            return True
    return False


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    missing = f"{name}: no such folder here, and not whole in the Hugging Face cache"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{missing}; HF_HUB_OFFLINE is set: run `hf download {name}` where there is a network"
        )
    try:
        # Unlike a listing of files it is not tried again and again where there is no network.
        siblings = HfApi().model_info(name).siblings or []
        wanted = wanted_files([file.rfilename for file in siblings])
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # of the hub, its HTTP client, or the system's
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"{missing}; it cannot be downloaded ({reason[:300]}): check the name and the network, "
            f"or run `hf download {name}`"
        ) from None


def wanted_files(files: Sequence[str]) -> list[str]:
    """Those of a repository's files that are read: at its top, and weights of one kind only."""
    top = [file for file in files if "/" not in file]
    small = [file for file in top if file.endswith(SMALL_FILES)]
    for single in WEIGHTS:
        stem, ending = single.split(".")
        weights = [f for f in top if f.startswith(stem) and f.endswith(f".{ending}")]
        if weights:
            return [*small, *weights]
    return small
