"""One name an operation: its torch reference on the CPU, its Triton kernel on CUDA.

``@operation`` on a reference in ``kernels/NAME.py`` makes it the CPU's; the function of the same
name in ``kernels/triton/NAME.py`` is CUDA's, imported on first use, so that a machine without
Triton never asks for it. Where a gradient is wanted the reference runs: kernels have no backward.

The environment variable ``OVERLAP_SPEC_KERNELS`` (``auto``, ``reference``, ``triton``, ``flash``)
and :func:`use` overrule the device, for tests and measurements: ``triton`` on CPU tensors needs
Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported). ``flash`` is ``triton``,
with FlashAttention-3 for what it can of attention (``kernels/triton/flash.py``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from overlap_spec.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

CHOICES = ("auto", "reference", "triton", "flash")
# FlashAttention-3's module.
FLASH = "flash_attn_interface"
VARIABLE = "OVERLAP_SPEC_KERNELS"


def flash_installed() -> bool:
    """Whether FlashAttention-3 is there to be chosen."""
    return find_spec(FLASH) is not None


def _checked(choice: str) -> str | None:
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE}: {choice!r} is none of {', '.join(CHOICES)}")
    if choice == "flash" and not flash_installed():
        raise ConfigError(
            f"{VARIABLE}: flash needs FlashAttention-3, whose module {FLASH} is not installed: "
            "build it from the folder hopper of its sources, or choose auto"
        )
    return None if choice == "auto" else choice


_forced: str | None = _checked(os.environ.get(VARIABLE) or "auto")


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Run all operations of the process as ``choice`` says, whatever their device.

    Raises:
        ConfigError: ``choice`` is none of :data:`CHOICES`, or what it needs is not installed.
    """
    global _forced
    before, _forced = _forced, _checked(choice)
    try:
        yield
    finally:
        _forced = before


def wants_flash() -> bool:
    """Whether attention is to take FlashAttention-3 where it can."""
    return _forced == "flash"


def wants_references() -> bool:
    """Whether the torch references are to run, whatever the device."""
    return _forced == "reference"


def operation(reference: Callable[P, R]) -> Callable[P, R]:
    """Dispatch calls of ``reference`` by its first argument, a tensor given by position."""
    module = reference.__module__.replace(".kernels.", ".kernels.triton.")
    fast: Callable[P, R] | None = None

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _forced is None and not args[0].is_cuda:  # type: ignore[attr-defined]
            return reference(*args, **kwargs)
        if _forced == "reference" or (_forced is None and _wants_gradient(args)):
            return reference(*args, **kwargs)
        nonlocal fast
        if fast is None:
            found: Callable[P, R] = getattr(importlib.import_module(module), reference.__name__)
            fast = found
        return fast(*args, **kwargs)

    return run


def reference_of(run: Callable[P, R]) -> Callable[P, R]:
    """The reference behind an operation, whatever the device."""
    reference: Callable[P, R] = run.__wrapped__  # type: ignore[attr-defined]
    return reference


def _wants_gradient(args: tuple[object, ...]) -> bool:
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
