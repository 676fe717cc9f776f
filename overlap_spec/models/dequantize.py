"""Quantised weights as the numbers that they stand for, one class a published layout.

They are read into float32, where each product of a small whole number and its scale is exact, and
rounded once, to the type that the model is computed in. Of 4 bits they can be had as they are too
(:class:`Grid`), for a CPU that multiplies them so (``models/quantization.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError

FIELD = "config.json: quantization_config"
# Scales of activations and caches, which are not quantised here.
OF_ACTIVATIONS = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale")
# Bits of a packed word.
WORD = 32
# Where AWQ puts a word's eight columns, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The 4-bit floats of MXFP4 (Open Compute Project, Microscaling Formats 1.0), by their bits.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Scheme(ABC):
    """A layout of quantised weights.

    Attributes:
        name: For messages.
        main: Parts of which each quantised weight has one.
        parts: All parts that a weight may have.
        ignored: Parts that say nothing of weights.
    """

    name: str
    main: tuple[str, ...]
    parts: tuple[str, ...]
    ignored: tuple[str, ...] = OF_ACTIVATIONS

    def split(self, name: str) -> tuple[str, str]:
        """The weight that tensor ``name`` belongs to if it is a part, and which part."""
        module, _, part = name.rpartition(".")
        return f"{module}.weight", part

    @abstractmethod
    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32, as a file without quantisation would hold it.

        Raises:
            KeyError, IndexError, RuntimeError: a missing part, or shapes that do not fit.
        """

    @abstractmethod
    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        """Shape of the weight from those of its parts."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Whole numbers from 0 of ``bits`` each, lowest bits first: int32 ``(..., n)`` → int32
    ``(..., n * 32 / bits)``."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    numbers: Tensor = (words.int()[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def spread(scale: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Scales that broadcast over a matrix of ``shape``: one for all, one a row, or one a block.

    Raises:
        RuntimeError: neither, or blocks that do not cover the matrix.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            if block is None:
                raise RuntimeError("these scales need a block or group size")
            scale = scale.repeat_interleave(block[axis], axis).narrow(axis, 0, size)
    return scale


class Scaled(Scheme):
    """Bytes, floats or whole numbers, with one scale a weight, a row or a block: DeepSeek's and
    Qwen's FP8 (``weight_scale_inv``), and others' (``weight_scale``). Both are factors."""

    main = ("weight_scale_inv", "weight_scale")
    parts = ("weight", "weight_zero_point", *main)

    def __init__(self, name: str, block: Sequence[int] | None) -> None:
        self.name, self.block = name, block

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        wide = parts["weight"].float()
        if "weight_zero_point" in parts:
            wide = wide - spread(parts["weight_zero_point"], wide.shape, self.block)
        scale = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
        return wide * spread(scale, wide.shape, self.block)

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        return shapes["weight"]


class Grid(NamedTuple):
    """A matrix ``(N, K)`` of whole numbers: ``(codes - zero) * scale``, with a scale and a zero for
    each group of inputs that follow one another.

    ``codes`` uint8 ``(N, K)``, 0 to 15; of each group ``(N, groups)``, ``scales`` float32 and
    ``zeros`` uint8, 0 to 16.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def weight(self) -> Tensor:
        """What it stands for, in float32."""
        groups = self.scales.shape[1]
        wide = self.codes.unflatten(1, (groups, -1)).float() - self.zeros.float()[..., None]
        weight: Tensor = (wide * self.scales[..., None]).flatten(1)
        return weight


class Grouped(Scheme):
    """Whole numbers of a few bits, with a scale and a zero for each group of inputs.

    Attributes:
        bits: Of a number.
        group_size: Inputs of a group; None: the scales tell.
        follow: Whether the inputs of a group follow one another; otherwise the part ``index`` tells
            each input's group.
        scale: The part with the scales, and which of its axes has the groups.
    """

    bits: int
    group_size: int | None = None
    follow: bool = True
    index = "g_idx"
    scale = ("scales", 0)

    @abstractmethod
    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int32 ``(N, K)`` and, ``(N, groups)``, zeros in int32 and scales in float32."""

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes, zeros, scales = self.numbers(parts)
        group = parts.get(self.index)
        if group is None:
            width = codes.shape[1]
            group = torch.arange(width) // (self.group_size or width // scales.shape[1])
        group = group.long()
        return (codes - zeros[:, group]).float() * scales[:, group]

    def keeps(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether the weight of parts of these shapes can be had as a :class:`Grid`."""
        name, axis = self.scale
        width, groups = self.shape(shapes)[1], shapes[name][axis]
        return self.bits == 4 and self.follow and width % (8 * groups) == 0

    def grid(self, parts: Mapping[str, Tensor]) -> Grid:
        """The weight as it is.

        Raises:
            RuntimeError: a group's inputs do not follow one another.
        """
        codes, zeros, scales = self.numbers(parts)
        group = parts.get(self.index)
        if group is not None:
            size = codes.shape[1] // scales.shape[1]
            if not torch.equal(group.long(), torch.arange(codes.shape[1]) // size):
                raise RuntimeError(f"{self.index} and desc_act or actorder do not fit")
        return Grid(codes.to(torch.uint8), scales, zeros.to(torch.uint8))


class Gptq(Grouped):
    """GPTQ (arXiv 2210.17323): ``qweight (K * bits / 32, N)``, ``qzeros (G, N * bits / 32)``,
    ``scales (G, N)``, ``g_idx (K,)``, each input's group. Zeros are stored less 1, but in the
    second version of the format."""

    name = "gptq"
    main = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, bits: int, group_size: int, version: int, follow: bool) -> None:
        self.bits, self.version, self.follow = bits, version, follow
        self.group_size = None if group_size == -1 else group_size

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        zeros = unpack(parts["qzeros"], self.bits) + (1 if self.version == 1 else 0)
        return unpack(parts["qweight"].T, self.bits), zeros.T, parts["scales"].float().T

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        rows, outputs = shapes["qweight"]
        return outputs, rows * WORD // self.bits


class Awq(Grouped):
    """AWQ (arXiv 2306.00978) as AutoAWQ's ``gemm``: ``qweight (K, N / 8)``, ``qzeros (G, N / 8)``,
    ``scales (G, N)``, the columns of a word in an order of their own."""

    name = "awq"
    main = ("qweight",)
    parts = ("qweight", "qzeros", "scales")
    bits = 4

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        whole, zeros = (_in_order(unpack(parts[each], 4)).T for each in ("qweight", "qzeros"))
        return whole, zeros, parts["scales"].float().T

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        inputs, words = shapes["qweight"]
        return words * WORD // 4, inputs


def _in_order(columns: Tensor) -> Tensor:
    """AWQ's columns ``(K, N)`` as they stand in a word, in their own order."""
    place = torch.tensor(AWQ_ORDER).argsort()
    ordered: Tensor = columns.unflatten(1, (-1, len(AWQ_ORDER)))[:, :, place]
    return ordered.flatten(1)


class Packed(Grouped):
    """compressed-tensors' ``pack-quantized``: signed numbers of a few bits, stored from 0 on.

    ``weight_packed (N, K * bits / 32)``, ``weight_scale (N, G)``, ``weight_shape`` with N and K;
    for some ``weight_zero_point (N * bits / 32, G)`` and ``weight_g_idx (K,)``.
    """

    main = ("weight_packed",)
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    index = "weight_g_idx"
    scale = ("weight_scale", 1)

    def __init__(self, bits: int, group_size: int | None, follow: bool) -> None:
        self.name, self.bits, self.group_size = f"compressed-tensors int{bits}", bits, group_size
        self.follow = follow

    def numbers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = (int(size) for size in parts["weight_shape"])
        scale = parts["weight_scale"].float()
        zero = torch.full(scale.shape, 1 << (self.bits - 1), dtype=torch.int32)
        if "weight_zero_point" in parts:
            zero = unpack(parts["weight_zero_point"].T, self.bits).T[:rows]
        return unpack(parts["weight_packed"], self.bits)[:, :width], zero, scale

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        rows, words = shapes["weight_packed"]
        return rows, words * WORD // self.bits


class Mxfp4(Scheme):
    """GPT-OSS's experts: ``_blocks (E, N, K / 32, 16)``, two 4-bit floats a byte, the low one
    first, and ``_scales (E, N, K / 32)``, exponents of 2 from -127 on. The weight is
    ``(E, K, N)``."""

    name = "mxfp4"
    main = ("blocks",)
    parts = ("blocks", "scales")

    def split(self, name: str) -> tuple[str, str]:
        weight, _, part = name.rpartition("_")
        return weight, part

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        blocks = parts["blocks"]
        size = torch.tensor([*FLOAT4, *(-x for x in FLOAT4)])
        both = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        exponent = parts["scales"].int()[..., None] - 127
        return torch.ldexp(size[both], exponent).flatten(-2).transpose(1, 2)

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        experts, outputs, blocks, half = shapes["blocks"]
        return experts, blocks * half * 2, outputs


def read_scheme(given: Any) -> Scheme:
    """The layout that ``quantization_config`` names.

    Raises:
        CheckpointError: one that is not read; names the field.
    """
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{FIELD} must be an object: {str(given)[:50]}")
    method = given.get("quant_method")
    if method == "fp8":
        block = given.get("weight_block_size")
        return Scaled("fp8", None if block is None else _block(block, "weight_block_size"))
    if method == "awq":
        _expect(given, "bits", (4,), 4)
        _expect(given, "version", ("gemm", "GEMM"), "gemm")
        _expect(given, "zero_point", (True,), True)
        return Awq()
    if method == "gptq":
        bits = _expect(given, "bits", (2, 4, 8), None)
        form = _expect(given, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        size, version = _size(given, "group_size", whole=-1), 2 if form == "gptq_v2" else 1
        return Gptq(bits, size, version, not given.get("desc_act"))
    if method == "compressed-tensors":
        return _compressed(given)
    if method == "mxfp4":
        return Mxfp4()
    raise CheckpointError(
        f"{FIELD}.quant_method must be one of awq, compressed-tensors, fp8, gptq, mxfp4: "
        f"{str(method)[:50]!r}; take a checkpoint of another kind, or the one that is not quantised"
    )


def _compressed(given: Mapping[str, Any]) -> Scheme:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{FIELD}.config_groups must be an object with a group")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    rule = weights[0] if weights else None
    if not isinstance(rule, Mapping) or any(other != rule for other in weights):
        raise CheckpointError(f"{FIELD}.config_groups: all groups must have the same weights")
    names = {"pack-quantized", "float-quantized", "int-quantized", "naive-quantized"}
    form = _expect(given, "format", tuple(sorted(names)), None)
    strategy = _expect(rule, "strategy", ("tensor", "channel", "group", "block"), None)
    group = _size(rule, "group_size") if strategy == "group" else None
    if form == "pack-quantized":
        _expect(rule, "type", ("int",), "int")
        return Packed(_expect(rule, "num_bits", (4, 8), None), group, not rule.get("actorder"))
    kind = _expect(rule, "type", ("float", "int"), "int")
    _expect(rule, "num_bits", (8,), None)
    block = _block(rule.get("block_structure"), "block_structure") if strategy == "block" else None
    return Scaled(f"compressed-tensors {kind}8", block or (None if group is None else (1, group)))


def _expect(given: Mapping[str, Any], name: str, known: Sequence[Any], otherwise: Any) -> Any:
    """``given[name]``, one of ``known``; CheckpointError that names the field where it is not."""
    value = given.get(name)
    value = otherwise if value is None else value
    if value not in known:
        shown = ", ".join(str(each) for each in known)
        raise CheckpointError(f"{FIELD}: {name} must be one of {shown}: {str(value)[:50]}")
    return value


def _size(given: Mapping[str, Any], name: str, whole: int | None = None) -> int:
    """``given[name]``, above 0; or ``whole``, which means one group for all."""
    value = given.get(name)
    number = -1 if isinstance(value, bool) or not isinstance(value, int) else value
    if number < 1 and (whole is None or value != whole):
        raise CheckpointError(f"{FIELD}: {name} must be a whole number above 0: {str(value)[:50]}")
    return number


def _block(value: Any, name: str) -> tuple[int, int]:
    good = isinstance(value, list) and len(value) == 2
    if not good or not all(isinstance(size, int) and size > 0 for size in value):
        raise CheckpointError(f"{FIELD}: {name} must be two whole numbers: {str(value)[:50]}")
    return value[0], value[1]
