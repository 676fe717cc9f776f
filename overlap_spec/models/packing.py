"""Weights in the order in which the CPU's matrix kernels read them."""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are, and knows no newer spelling.

from typing import List, Optional, Union  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.kernels import cpu
from overlap_spec.kernels.dispatch import has_native_products
from overlap_spec.kernels.scripting import is_tracing, traceable
from overlap_spec.models.config import ExpertsConfig
from overlap_spec.models.experts import Experts, ExpertWeights

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer whose weight oneDNN has laid out for its own kernels.

    With few rows a product's time is that of reading the weight: 1.5 to 1.8 times as fast for 4 to
    12 rows at the embedded model's sizes.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data)
        self.register_buffer("packed", packed, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``(T, in_features)`` → ``(T, out_features)``."""
        if is_tracing():
            # A recorded pass has few sizes of its own (``worker/graphs.py``), and no branches.
            return packed_linear(x, self.packed, self.bias)
        rows = len(x)
        more = rounded_rows(rows) - rows
        if more:
            x = F.pad(x, (0, 0, 0, more))
        out = packed_linear(x, self.packed, self.bias)
        return out[:rows] if more else out


class NativeLinear(nn.Module):
    """A linear layer that reads its weight at the speed of memory (``kernels/cpu/``): in bfloat16
    1.2 to 1.9 times oneDNN's with one row, as fast with 64. A weight in float32 that bfloat16 holds
    is read in that."""

    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", cpu.pack(narrowed(linear.weight.data)), persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``(T, in_features)`` → ``(T, out_features)``."""
        return torch.ops.overlap_spec.product(x, self.packed, self.bias, self.out_features)


class NativeExperts(nn.Module):
    """All experts of a layer, each computed natively for the tokens that were sent to it."""

    up: Tensor
    down: Tensor

    def __init__(self, experts: ExpertWeights, takes_turns: bool) -> None:
        super().__init__()
        up, down = experts.gate_up_proj.data, experts.down_proj.data
        self.up_bias, self.down_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        if takes_turns:
            # As published, transposed, gates and ups in turn: gates go first.
            up, down = _gates_first(up.transpose(1, 2)), down.transpose(1, 2)
            assert self.up_bias is not None
            self.up_bias = nn.Parameter(_gates_first(self.up_bias.data), requires_grad=False)
        for name, weights in (("up", up), ("down", down)):
            held = torch.stack([*map(cpu.pack, narrowed(weights))])
            self.register_buffer(name, held, persistent=False)

    def mix(self, x: Tensor, ids: Tensor, shares: Tensor, limit: float | None) -> Tensor:
        """See :func:`overlap_spec.kernels.mix_experts`."""
        biases = self.up_bias, self.down_bias
        mixed: Tensor = torch.ops.overlap_spec.mix_experts(
            x, ids, shares, self.up, self.down, *biases, limit
        )
        return mixed


@traceable
def packed_linear(x: Tensor, packed: Tensor, bias: Optional[Tensor]) -> Tensor:  # noqa: UP045
    """oneDNN's product, whose list of optional numbers cannot be traced."""
    none: List[Optional[Union[int, float, complex]]] = []  # noqa: UP006, UP007, UP045
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", none, "")


def rounded_rows(rows: int) -> int:
    """Rows that a product is computed with: oneDNN makes, and keeps, code for each number."""
    step = 1 if rows <= 8 else 4 if rows <= 64 else 8 if rows <= 128 else 32 if rows <= 256 else 128
    return -(-rows // step) * step


def multiplies_natively(linear: nn.Linear) -> bool:
    """Whether the layer's product can be the native one."""
    return linear.in_features % 4 == 0 and has_native_products()


def narrowed(weight: Tensor) -> Tensor:
    """The weight in bfloat16, if that holds each of its numbers. Rows in float32 have the same
    product with it, to the bit."""
    half = weight.bfloat16()
    return half if torch.equal(half.to(weight.dtype), weight) else weight


def pack(module: nn.Module) -> None:
    """Replace every linear layer below ``module``; for inference on the CPU alone.

    Where torch was built without oneDNN the layers stay as they are. An embedding that shares its
    weight with a layer keeps the plain one.
    """
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, packed(child))
            elif isinstance(part, Experts) and isinstance(child, ExpertWeights):
                part.add_module(name, packed_experts(child, part.config))


def packed_experts(experts: ExpertWeights, config: ExpertsConfig) -> nn.Module:
    """The experts with their weights in the native products' order, where there are such."""
    takes_turns = config.limit is not None
    read = 1 if takes_turns else 2
    matrices = experts.gate_up_proj, experts.down_proj
    fits = all(each.shape[read] % 4 == 0 and each.dtype in PACKED_DTYPES for each in matrices)
    if fits and has_native_products():
        return NativeExperts(experts, takes_turns)
    return experts


def _gates_first(both: Tensor) -> Tensor:
    return torch.cat([both[:, ::2], both[:, 1::2]], 1)


def packed(linear: nn.Linear) -> nn.Module:
    """The layer with its weight in another order, if there is one for its type."""
    dtype = linear.weight.dtype
    if dtype in PACKED_DTYPES and multiplies_natively(linear):
        return NativeLinear(linear)
    return PackedLinear(linear) if onednn_packs(dtype) else linear


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself, with AMX or AVX512-BF16."""
    probes = (torch.cpu._is_amx_tile_supported, torch.cpu._is_avx512_bf16_supported)
    return torch.backends.mkldnn.is_available() and any(probe() for probe in probes)


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN lays out weights of a type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    packs_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 or (dtype is torch.bfloat16 and packs_bfloat16)
