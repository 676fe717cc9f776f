"""What a kernel became for a GPU that is not at hand: compiled, and read."""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.kernel_work import Work
from overlap_spec.kernels import tuning
from overlap_spec.kernels.dispatch import use
from overlap_spec.kernels.triton.launch import Launch, recorded
from overlap_spec.kernels.tuning import Table

KIB = 1024
# Shared memory in bytes that a program may have, by compute capability.
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
# What a multiprocessor has, of which each program takes 1 KiB more than it asks for.
SHARED_TOTAL = {capability: size + KIB for capability, size in SHARED_BYTES.items()}
REGISTERS = 65536


class Figures(NamedTuple):
    """What a compiled kernel takes.

    Attributes:
        registers: Of a thread.
        stack_bytes: Local memory a thread: what does not fit in registers.
        shared_bytes: Of a program.
        programs: That a multiprocessor holds at once.
        waits: Of the loops' waits for asynchronous copies: how many later copies may still be
            under way then.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    programs: int
    waits: tuple[int, ...]


POINTERS = {
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
        noted: From :func:`overlap_spec.kernels.triton.launch.recorded`.
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
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, int) and value == 1 and name not in free:
            signature[name], constants[name] = "constexpr", 1
        elif name not in free | anywhere and divisible(value):
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


def divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Allocations are aligned; and tensors of shapes alone have no address.
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def noted(work: Work, blocks: Table) -> list[Launch]:
    """What a work launches, from inputs that have shapes only.

    A shape-only tensor has no values: whatever waited for the device would raise here, and so
    would a grid that depends on the device's data.
    """
    named = {name.replace("/", "__"): config for name, config in blocks.items()}
    with FakeTensorMode(), tuning.trial(**named):
        with use("reference"):
            args = work.draw()
        with torch.inference_mode(), use("triton"), recorded() as launches:
            work.operation(*args)
    return launches


def figures(one: Launch, capability: int, folder: Path) -> Figures:
    """Compile a launch, and read what came of it."""
    compiled = compile_for(one, capability)
    told = usage(compiled, folder)
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", told))) for what in FIELDS)
    shared, warps = compiled.metadata.shared, one.constants["num_warps"]
    # Registers are given to a warp 256 at a time.
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)
    by_shared = SHARED_TOTAL[capability] // (shared + KIB)
    waits = loop_waits(compiled.asm["ttgir"])
    return Figures(registers, stack, shared, min(by_registers, by_shared), waits)


FIELDS = ("REG", "STACK")


def usage(compiled: Any, folder: Path) -> str:
    """What ``cuobjdump -res-usage`` says of a kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [_usage_tool(), "-res-usage", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _usage_tool() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def loop_waits(ttgir: str) -> tuple[int, ...]:
    """``num`` of every wait inside a loop; the last copies are waited for behind it."""
    found, end = [], None
    for line in ttgir.splitlines():
        if end is None:
            if "scf.for" in line:
                end = line[: len(line) - len(line.lstrip())] + "}"
        elif line.startswith(end):
            end = None
        elif wait := re.search(r"ttg\.async_wait.*num = (\d+)", line):
            found.append(int(wait[1]))
    return tuple(found)
