"""One name an operation: its torch reference, its Triton kernel on CUDA, some in C++ on the CPU.

``@operation`` is for a reference in ``kernels/NAME.py``; the function of the same name in
``kernels/triton/NAME.py`` is CUDA's, imported on first use, so that a machine without Triton never
asks for it, and one in ``kernels/cpu/NAME.py`` the CPU's, where that could be compiled. Where a
gradient is wanted the reference runs: kernels have no backward.

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
from functools import cache, wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.kernels import cpu

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


def has_native_products() -> bool:
    """Whether products are the native ones, not the references' and not oneDNN's."""
    return not wants_references() and cpu.native()


def operation(reference: Callable[P, R]) -> Callable[P, R]:
    """Dispatch calls of ``reference`` by its first argument, a tensor given by position."""

    @cache
    def kernel(folder: str) -> Callable[P, R]:
        module = reference.__module__.replace(".kernels.", f".kernels.{folder}.")
        if folder == "cpu" and (find_spec(module) is None or not cpu.native()):
            return reference
        found: Callable[P, R]
        found = getattr(importlib.import_module(module), reference.__name__, reference)
        return found

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _forced in ("triton", "flash"):
            return kernel("triton")(*args, **kwargs)
        first: Tensor = args[0]  # type: ignore[assignment]
        if _forced == "reference" or _wants_gradient(args):
            return reference(*args, **kwargs)
        if first.is_cuda:
            return kernel("triton")(*args, **kwargs)
        if first.is_cpu and first.dtype in cpu.DTYPES:
            return kernel("cpu")(*args, **kwargs)
        return reference(*args, **kwargs)

    return run


def reference_of(run: Callable[P, R]) -> Callable[P, R]:
    """The reference behind an operation, whatever the device."""
    reference: Callable[P, R] = run.__wrapped__  # type: ignore[attr-defined]
    return reference


def _wants_gradient(args: tuple[object, ...]) -> bool:
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
