"""Block sizes: a committed table a GPU architecture, ``sm_NN.py`` beside this.

They are chosen by the compiler's figures (``tests/proofs/test_attention_ir.py``), and where a
table says so by a clock.
Nothing is tuned while serving: a trial inside a CUDA graph's capture would end the capture.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

Config = dict[str, int]
Table = dict[str, Config]

_trial: Table = {}


def config(name: str, device: torch.device) -> Config:
    """Block sizes and warps of the kernel ``name`` (``operation`` or ``operation/bytes``).

    Raises:
        KeyError: no table knows the kernel.
    """
    if name in _trial:
        return _trial[name]
    return table(architecture(device))[name]


@cache
def architecture(device: torch.device) -> str:
    """``sm_90`` and the like; ``default`` off CUDA."""
    if device.type != "cuda":
        return "default"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def table(name: str) -> Table:
    """The table of an architecture over the default one, which serves where there is none."""
    base: Table = importlib.import_module(f"{__name__}.default").TABLE
    return base | own_table(name)


def own_table(name: str) -> Table:
    """What is committed for an architecture alone."""
    if find_spec(f"{__name__}.{name}") is None:
        return {}
    own: Table = importlib.import_module(f"{__name__}.{name}").TABLE
    return own


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; off CUDA as many as make every path run."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def trial(**configs: Config) -> Iterator[None]:
    """Use these for a while, for tests. A slash in a name is written ``__``."""
    global _trial
    before = _trial
    _trial = before | {name.replace("__", "/"): value for name, value in configs.items()}
    try:
        yield
    finally:
        _trial = before
