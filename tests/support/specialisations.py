"""Which kernels a GPU would have to compile, found on a machine without one.

Each operation's Triton wrapper runs, and what it launches is noted and not run; the reference
computes. What Triton compiles anew is told by types, constants, and what it specialises on:
numbers that are 1 or multiples of 16, and addresses that are multiples of 16.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from overlap_spec import kernels
from overlap_spec.kernels.dispatch import use
from overlap_spec.kernels.triton.launch import Launch, recorded

Key = tuple[Any, ...]


def key(one: Launch) -> Key:
    """What tells a launch's compiled kernel from others."""
    params = [p for p in one.kernel.params if not p.is_constexpr]
    told = [_argument(p, a) for p, a in zip(params, one.args, strict=True)]
    return (one.kernel.__name__, tuple(told), tuple(one.constants.items()))


def _argument(param: Any, value: Any) -> Any:
    free = param.do_not_specialize
    if value is None or isinstance(value, float):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return value.dtype, aligned or free or param.do_not_specialize_on_alignment
    wide = not -(2**31) <= value < 2**31
    if free:
        return "wide" if wide else "int"
    return 1 if value == 1 else (wide, value % 16 == 0 and not param.do_not_specialize_on_alignment)


@contextmanager
def noted_kernels() -> Iterator[set[Key]]:
    """The keys of all kernels that would have been launched."""
    found: set[Key] = set()
    depth = 0

    def both(reference: Any, fast: Any) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                with recorded() as launches:
                    fast(*args, **kwargs)
                found.update(key(one) for one in launches if all(one.grid))
            depth += 1
            try:
                return reference(*args, **kwargs)
            finally:
                depth -= 1

        return noting

    with ExitStack() as undo:
        for operation in (getattr(kernels, name) for name in kernels.__all__):
            reference = getattr(operation, "__wrapped__", None)
            fast = reference and _triton_twin(reference)
            if fast is None:  # made of operations, which are noted by themselves
                continue
            cell = operation.__closure__[operation.__code__.co_freevars.index("kernel")]
            undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
            noting = both(reference, fast)
            cell.cell_contents = lambda _, noting=noting: noting
        with use("triton"):
            yield found


def _triton_twin(reference: Callable[..., Any]) -> Callable[..., Any] | None:
    module = reference.__module__.replace(".kernels.", ".kernels.triton.")
    if importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), reference.__name__, None)
