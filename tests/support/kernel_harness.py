"""What the cases of the Triton kernels share: random inputs, both forms, and comparison."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from overlap_spec.kernels.dispatch import use
from overlap_spec.kernels.tuning import trial
from tests.support.kernel_memory import check_accesses

Draw = Callable[[Any], Any]
Case = Callable[[Draw, torch.device], None]
CASES: dict[str, Case] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Relative error in the Euclidean norm, of arithmetic in float32 with operands of each type.
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# What :func:`triton` runs kernels as.
KERNELS = "triton"
SMALL = {"block": 32, "num_warps": 1}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def enter_interpreter() -> None:
    """Make this process, which has not imported Triton, run kernels in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import numpy as np
    from triton.runtime import interpreter

    # bfloat16 is kept as bits, which the interpreter's product would multiply as integers.
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        import triton.language as tl

        def widened(x: Any) -> Any:
            return self.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x

        return plain_dot(self, widened(a), widened(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = dot
    # Triton 3.6 makes loop bounds of arrays of one entry, which NumPy 2.4 forbids.
    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))

    interpreter._patch_lang_tensor = patch


def enter_checked_interpreter() -> None:
    """As :func:`enter_interpreter`, and check what kernels read and write."""
    enter_interpreter()
    from triton.runtime import interpreter

    check_accesses(interpreter)


@contextmanager
def poisoned() -> Iterator[None]:
    """Outputs start as NaN, so that an entry that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def triton(operation: Callable[..., Any], *args: Any) -> Any:
    with use(KERNELS), poisoned():
        return operation(*args)


def reference(operation: Callable[..., Any], *args: Any) -> Any:
    with use("reference"):
        return operation(*args)


def close(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """Equal but for ``roundings`` one after another; ``want`` may be wider than ``got``."""
    assert got.shape == want.shape
    assert got.isfinite().all()
    error = (got.double() - want.double()).norm()
    allowed = roundings * CLOSE[got.dtype] * want.double().norm() + 1e-30
    assert error <= allowed, float(error)


def equal(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()


class Inputs:
    """Random tensors of one example."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.draw, self.device = draw, device
        self.dtype: torch.dtype = draw(st.sampled_from(FLOATS))
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def size(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator)
        return drawn.to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def bools(self, share: float, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < share).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator).to(self.device)

    def distinct(self, count: int, below: int) -> Tensor:
        return torch.randperm(below, generator=self.generator)[:count].to(self.device)


def small(name: str) -> Any:
    """Blocks so small that a little vocabulary has several chunks."""
    return trial(**{name: SMALL})
