"""Each Triton kernel against its reference, on inputs that hypothesis draws.

A case takes hypothesis's ``draw`` and a device. ``tests/kernels/test_kernel_triton.py`` runs the
cases in Triton's interpreter, in a process of its own, and on a GPU where there is one.
"""

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support import kernel_cases_choice, kernel_cases_layers
from tests.support.kernel_harness import CASES

# Importing a module of cases enters them.
MODULES = (kernel_cases_layers, kernel_cases_choice)


def run_planted(size: int, step: int, back: int, past: int, slack: bool) -> None:
    """A kernel that copies, with or without a fault; see :func:`planted_kernels.copy`."""
    from tests.support.planted_kernels import copy

    copy(size, step, back, past, slack)


def run_canary(early: int) -> None:
    """Attention, with canaries that begin ``early`` slots before the end of what it reads."""
    kernel_cases_layers.guarded_attention(early)


def run_flash(name: str, examples: int, fault: str | None = None) -> dict[str, int]:
    """:func:`run_case` on FlashAttention-3's stand-in; how often that was called."""
    from tests.support import flash_attention, kernel_harness

    flash_attention.CALLS.update(trees=0, chunks=0)
    with flash_attention.installed(fault), patch.object(kernel_harness, "KERNELS", "flash"):
        run_case(name, examples, "cpu")
    return flash_attention.CALLS


def run_case(name: str, examples: int, device: str) -> None:
    """A case's examples, the same ones each time."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        # Shrinking a failure would take the interpreter minutes.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def examine(data: Any) -> None:
        CASES[name](data.draw, torch.device(device))

    examine()
