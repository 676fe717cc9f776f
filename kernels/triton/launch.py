"""The one place where kernels are launched, or noted down instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

SINGLE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Launch(NamedTuple):
    """A launch: Triton's function, its grid, run-time arguments, constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


_notes: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run ``kernel``; nothing where the grid is empty. Constants include ``num_warps`` etc."""
    if _notes is not None:
        _notes.append(Launch(kernel, grid, args, constants))
    elif all(grid):
        # Said aloud, because Triton's own default is about to change.
        kernel[grid](*args, **constants, enable_fp_fusion=True)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them: outputs stay unwritten."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before


def require_float(name: str, *tensors: torch.Tensor) -> None:
    """TypeError where a tensor is neither float32, float16 nor bfloat16."""
    for tensor in tensors:
        if tensor.dtype not in SINGLE_TYPES:
            raise TypeError(f"{name}: {tensor.dtype} is not float32, float16 or bfloat16")


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def compile_for(noted: Launch, capability: int) -> Any:
    """Compile a launch's kernel down to machine code; needs no GPU.

    What Triton would specialise on at run time (pointers and numbers divisible by 16, numbers that
    are 1) is specialised on here too.

    Args:
        noted: From :func:`recorded`.
        capability: 80, 90 …

    Returns:
        Triton's compiled kernel: ``asm["cubin"]``, ``asm["ptx"]``, ``metadata.shared``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = noted.kernel
    free = {p.name for p in kernel.params if p.do_not_specialize}
    anywhere = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    constants = {k: v for k, v in noted.constants.items() if k in kernel.arg_names}
    constants |= dict(zip(kernel.arg_names[len(names) :], noted.args[len(names) :], strict=False))
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for name, value in zip(names, noted.args, strict=True):
        if value is None:
            signature[name], constants[name] = "constexpr", None
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, int) and value == 1 and name not in free:
            signature[name], constants[name] = "constexpr", 1
        elif name not in free | anywhere and _divisible(value):
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs=attributes,
    )
    options = {k: v for k, v in noted.constants.items() if k not in kernel.arg_names}
    options["enable_fp_fusion"] = True
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Allocations are aligned; and tensors of shapes alone have no address.
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
