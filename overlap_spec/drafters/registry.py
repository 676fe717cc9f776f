"""Drafters by name: a file of this folder, or ``package.module:Class``."""

from __future__ import annotations

import inspect
from pathlib import Path

from overlap_spec.config import EngineConfig, drafter_names, own_class
from overlap_spec.drafters.base import Drafter, MakeCache, Tables
from overlap_spec.errors import ConfigError
from overlap_spec.models import eagle3
from overlap_spec.models.config import field, read_json
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.mtp import find_modules
from overlap_spec.models.tensors import tensor_names


def load_drafter(name: str) -> type[Drafter]:
    """The drafter's class, by :attr:`overlap_spec.config.EngineConfig.drafter`; of several in a row
    the one that joins them. ConfigError: there is no such drafter, or what the name leads to is
    none."""
    setting, path = f"algorithm {name!r}:", f"{__package__}.{name}"
    if "," in name:
        path = f"{__package__}.row"
    elif ":" in name:
        setting, path = "algorithm", name
    elif name not in drafter_names():
        raise ConfigError(f"no drafter is called {name!r}; built: {', '.join(drafter_names())}")
    found: type[Drafter] = own_class(path, Drafter, setting)
    return found


def make_drafter(
    config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
) -> Drafter:
    """The settings' drafter for ``target``; an object that is given is the drafter itself.
    ConfigError: as :func:`load_drafter`, or what is given is no drafter."""
    given = config.own_drafter
    if isinstance(given, Drafter):
        return given
    kind = load_drafter(config.drafter) if given is None else given
    if not (inspect.isclass(kind) and issubclass(kind, Drafter)):
        raise ConfigError(f"algorithm: {given!r} is no Drafter, nor a class of one")
    return kind.build(config, target, tables, make_cache)


def drafter_of_folder(folder: Path) -> str:
    """Name of the drafter that a folder of weights is for, by the names of its tensors.
    CheckpointError: the weights or ``config.json`` cannot be read."""
    names = {name.removeprefix("model.") for name in tensor_names(folder)}
    if "embed_tokens.weight" in names and "fc.weight" not in names:
        return "draft_model"
    if find_modules(tensor_names(folder)):
        return "mtp"
    if "mask_hidden" in names:
        return "parallel"
    architecture = field(read_json(folder / "config.json"), "architectures")[0]
    if architecture.startswith("DFlash"):
        return "dflash"
    return "eagle3" if architecture in eagle3.ARCHITECTURES else "eagle"
