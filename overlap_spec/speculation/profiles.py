"""Cost models beside the user's cache, by what they were measured on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_spec.caches import cache_folder
from overlap_spec.speculation.cost import CostModel

log = logging.getLogger(__name__)


def profile_path(key: Mapping[str, Any]) -> Path:
    """The file of a profile.

    Args:
        key: Plain data: model, drafter, device, dtype, threads.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{name}.json"


def save_profile(key: Mapping[str, Any], model: CostModel) -> Path:
    """Write a profile, in place of an older one; returns its file.

    Raises:
        OSError: it cannot be written.
    """
    path = profile_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"key": dict(key), "cost": model.to_dict()}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load_profile(key: Mapping[str, Any]) -> CostModel | None:
    """The profile of a key; None where there is none, or one that cannot be read."""
    path = profile_path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError):
        return None
    try:
        return CostModel.from_dict(json.loads(text)["cost"])
    except (ValueError, TypeError, KeyError) as error:
        log.warning("profile %s is passed over: %s; run overlap-spec profile again", path, error)
        return None
