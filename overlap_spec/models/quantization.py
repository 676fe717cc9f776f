"""Linear layers and embeddings in int8 and int4, for inference on the CPU.

Each row of a weight, one an output channel, is rounded to 8 bits by a scale of its own. What a
layer reads is rounded so too, a token at a time, and the products are summed as integers. So a
token's result has the same bits whatever is computed beside it: no sum depends on its order.

The price is paid by models with outlier channels: one large number leaves few of a token's 8 bits
to the others.

That is oneDNN's int8 product. Torch's own of an int8 weight and bfloat16 rows
(``_weight_int8pack_mm``) leaves the rows as they are, but computes in float32: from 6 rows on, as
many as a verify has, it was slower than the packed bfloat16 product.

In int4 a row has a scale and a zero for each group of its inputs, as checkpoints of GPTQ, AWQ and
compressed-tensors have them, which are computed with as they are. What a layer reads is rounded to
8 bits, each 256 inputs or fewer by a scale of their own, as llama.cpp rounds them.
"""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are, and knows no newer spelling.

from collections.abc import Iterable
from typing import List, Optional, Union  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.errors import ConfigError
from overlap_spec.kernels import cpu
from overlap_spec.kernels.dispatch import has_native_products, wants_references
from overlap_spec.kernels.scripting import is_tracing, traceable
from overlap_spec.models.dequantize import Grid
from overlap_spec.models.experts import Experts
from overlap_spec.models.packing import multiplies_natively, rounded_rows

LARGEST = 127
# Of a row of zeros: its scale must not be zero.
LEAST = 1e-30
# Inputs that share a scale where a layer is rounded to 4 bits here: some 5 bits a weight with it.
GROUP = 32
# What turns a hidden state into logits.
HEADS = ("lm_head", "head")


def has_int8() -> bool:
    """Whether products of bytes are summed in 32 bits: by oneDNN with AVX512-VNNI, or natively."""
    return has_vnni() or has_native_products()


def has_vnni() -> bool:
    """Whether oneDNN sums products of bytes in 32 bits, not in 16."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix ``(N, K)`` of any float type in int8, each row by a scale of its own.

    Returns:
        int8 ``(N, K)`` of -127 to 127, and float32 ``(N,)``: row n stands for
        ``int8[n] * scale[n]``, and no number is further off than half of that scale.
    """
    wide = weight.to(torch.float32, copy=True)
    scale = wide.abs().amax(1).clamp_(min=LEAST).div_(LARGEST)
    return wide.div_(scale[:, None]).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight in oneDNN's layout; input and output keep their type."""

    packed: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = round_rows(linear.weight.data)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = linear.bias
        self._hold(weight)

    def _hold(self, weight: Tensor) -> None:
        """Keep an int8 weight ``(N, K)`` as the product wants it."""
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self.register_buffer("packed", packed, persistent=False)
        zero = torch.zeros(self.out_features, dtype=torch.int64)
        self.register_buffer("zero", zero, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(T, in_features)`` → ``(T, out_features)``."""
        if is_tracing():
            # A recorded pass has few sizes of its own (``worker/graphs.py``), and no branches.
            return int8_linear(x, self.packed, self.scale, self.zero, self.bias)
        rows = len(x)
        more = rounded_rows(rows) - rows
        if more:
            x = F.pad(x, (0, 0, 0, more))
        out = int8_linear(x, self.packed, self.scale, self.zero, self.bias)
        return out[:rows] if more else out


class NativeInt8Linear(Int8Linear):
    """:class:`Int8Linear`, to the bit, at the speed of memory (``kernels/cpu/``)."""

    shift: Tensor

    def _hold(self, weight: Tensor) -> None:
        self.register_buffer("packed", cpu.pack(weight), persistent=False)
        # Of what is read, 128 too much: products are of bytes without a sign.
        shift = weight.sum(1, dtype=torch.int32) * 128
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(T, in_features)`` → ``(T, out_features)``."""
        held = self.packed, self.scale, self.shift, self.bias
        return torch.ops.overlap_spec.int8_product(x, *held)


@traceable
def int8_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """The product, whose list of optional numbers cannot be traced."""
    none: List[Optional[Union[int, float, complex]]] = []  # noqa: UP006, UP007, UP045
    wide = x.float()
    # LEAST and LARGEST, which a script cannot read. A row that is not finite has such a scale.
    unit = wide.abs().amax(-1, True).clamp_(min=1e-30).div_(127)
    digits = wide.div(unit).round_().add_(128).to(torch.uint8)
    out = torch.ops.onednn.qlinear_pointwise(
        digits, 1.0, 128, packed, scale, zero, None, 1.0, 0, torch.float32, "none", none, ""
    )
    out = out.mul_(unit)
    if bias is not None:
        out = out.add_(bias)
    return out.to(x.dtype)


def round_groups(weight: Tensor, size: int = GROUP) -> Grid:
    """A matrix ``(N, K)`` of any float type in 4 bits, each ``size`` inputs of a row by a scale and
    a zero of their own; zero itself stays exact."""
    wide = weight.float().unflatten(1, (-1, size))
    least, most = wide.amin(-1).clamp_(max=0), wide.amax(-1).clamp_(min=0)
    scales = most.sub_(least).div_(15).clamp_(min=LEAST)
    zeros = least.div_(-scales).round_()
    codes = (wide / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return Grid(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8))


class GridLinear(nn.Module):
    """A linear layer whose weight is a :class:`Grid`, as it is read from a file; not computed with
    before :class:`Int4Linear` holds it."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, grid: Grid, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = grid.codes.shape
        for name, part in grid._asdict().items():
            self.register_buffer(name, part)
        self.bias = bias


class Int4Linear(nn.Module):
    """A linear layer of 4-bit weights, read at the speed of memory (``kernels/cpu/products.h``);
    input and output keep their type.

    Of L lanes, ``codes`` is uint8 ``(N / L, K / 8, L, 4)``: of a byte the low half is one of four
    inputs, the high half one of the next four; ``scales`` float32 and ``zeros`` uint8
    ``(N / L, groups, L)``, a zero 16 at most.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, grid: Grid, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = grid.codes.shape
        lanes = cpu.lanes()
        more = -self.out_features % lanes
        # (N / lanes, lanes, K / 8, 2, 4)
        codes = F.pad(grid.codes, (0, 0, 0, more)).view(-1, lanes, self.in_features // 8, 2, 4)
        both = codes[..., 0, :] | codes[..., 1, :] << 4
        held = {"codes": both}
        for name in ("scales", "zeros"):
            held[name] = F.pad(getattr(grid, name), (0, 0, 0, more)).unflatten(0, (-1, lanes))
        for name, part in held.items():
            self.register_buffer(name, cpu.kept(part.transpose(1, 2)), persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """``(T, in_features)`` → ``(T, out_features)``."""
        held = self.codes, self.scales, self.zeros, self.bias, self.out_features
        return torch.ops.overlap_spec.int4_product(x, *held)


class Int8Embedding(nn.Module):
    """A table of vectors in int8, each with its own scale."""

    weight: Tensor
    scale: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dtype = embedding.weight.dtype
        weight, scale = round_rows(embedding.weight.data)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(...)`` → ``(..., width)``."""
        return (self.weight[tokens].float() * self.scale[tokens]).to(self.dtype)


def has_int4() -> bool:
    """Whether the machine computes with weights of 4 bits: natively alone."""
    return cpu.native() and not wants_references()


def in_int4(linear: nn.Linear) -> nn.Module | None:
    """The layer in 4 bits; None where its inputs are not whole groups."""
    if linear.in_features % GROUP:
        return None
    return Int4Linear(round_groups(linear.weight.data), linear.bias)


def in_int8(linear: nn.Linear) -> nn.Module:
    """The layer in 8 bits; as it is where no product of bytes takes its inputs."""
    if multiplies_natively(linear):
        return NativeInt8Linear(linear)
    return Int8Linear(linear) if has_vnni() else linear


def quantize(modules: Iterable[nn.Module], kind: str = "int8") -> None:
    """Replace every linear layer and embedding below ``modules``, which may share some.

    A head that is tied to its embedding becomes a layer of its own: the two are read in different
    orders. With ``int4`` embeddings and heads are in int8, as their rows are what differs between
    tokens.

    Raises:
        ConfigError: a module with experts, whose products are not built so.
    """
    made: dict[nn.Module, nn.Module] = {}
    for module in modules:
        for part in list(module.modules()):
            if isinstance(part, Experts):
                raise ConfigError(
                    f"quantization {kind!r} is not built for models with experts: leave it out"
                )
            for name, child in part.named_children():
                if child not in made and isinstance(child, nn.Linear):
                    small = kind == "int4" and name not in HEADS
                    made[child] = (small and in_int4(child)) or in_int8(child)
                elif child not in made and isinstance(child, nn.Embedding):
                    made[child] = Int8Embedding(child)
                if child in made:
                    setattr(part, name, made[child])


def pack_grids(module: nn.Module) -> None:
    """Lay out what was read in 4 bits for the product."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, GridLinear):
                grid = Grid(child.codes, child.scales, child.zeros)
                setattr(part, name, Int4Linear(grid, child.bias))
