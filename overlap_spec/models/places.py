"""Where a checkpoint's tensors go in the fused modules.

Module names follow Hugging Face's, but for what is fused: ``qkv_proj``, ``gate_up_proj``,
``qk_norm`` and experts are read from and written to their published parts.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap_spec.models.decoder import Attention, Decoder
from overlap_spec.models.experts import Experts

PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qk_norm": ("q_norm", "k_norm"),
}
# Parts that a file may hold as one.
FUSED = ("qkv_proj", "gate_up_proj")
EXPERTS = re.compile(r"(.+\.mlp)\.experts\.(gate_up_proj|down_proj)")


class Place(NamedTuple):
    """Where one published tensor goes.

    Attributes:
        view: What it fills: a parameter, or a part of one.
        rows: The file's rows in the order in which they are kept; None: as they are.
        offset: What is added to the file's numbers.
        repeated: Every row of ``view`` is the tensor.
    """

    view: Tensor
    rows: Tensor | None = None
    offset: float = 0.0
    repeated: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor in the file."""
        return self.view.shape[1:] if self.repeated else self.view.shape

    def fill(self, tensor: Tensor) -> None:
        """Copy the file's tensor to its place."""
        if self.rows is not None:
            tensor = tensor[self.rows]
        # Before it is rounded to the parameter's type.
        self.view.copy_(tensor.float() + self.offset if self.offset else tensor)

    def published(self) -> Tensor:
        """The tensor as a file holds it, a copy."""
        kept = (self.view[0] if self.repeated else self.view).detach()
        kept = kept - self.offset if self.offset else kept.clone()
        if self.rows is None:
            return kept
        return torch.empty_like(kept).index_copy_(0, self.rows.to(kept.device), kept)


def tied(module: nn.Module) -> bool:
    """Whether the module's head is its embedding, and no tensor of its own."""
    return isinstance(module, Decoder) and module.config.tie_embeddings


def places(module: nn.Module) -> dict[str, Place]:
    """The place of every tensor that a file of ``module`` must hold, by its first published name.

    All of a decoder's but the head live under ``model.``.
    """
    found: dict[str, Place] = {}
    decoder = module if isinstance(module, Decoder) else None
    for name, tensor in module.state_dict().items():
        if tied(module) and name == "lm_head.weight":
            continue
        for part, place in _parts(module, name, tensor):
            if decoder is not None and decoder.config.unit_offset and part.endswith("norm.weight"):
                place = place._replace(offset=1.0)
            outside = decoder is None or part.startswith("lm_head.")
            found[part if outside else f"model.{part}"] = place
    return found


def part_views(module: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    """``tensor`` (parameter ``name`` of ``module``) cut into its published parts, as views."""
    if ".gate_up_proj." in name:
        return list(tensor.chunk(2))
    attention = _attention(module, name)
    if attention is None:
        return [tensor]
    heads, kv_heads = attention.heads, attention.kv_heads
    if ".qkv_proj." in name:
        return list(tensor.split([n * attention.head_dim for n in (heads, kv_heads, kv_heads)]))
    if ".qk_norm." in name:
        return [tensor[:heads], tensor[heads:]]
    return [tensor]


def _attention(module: nn.Module, name: str) -> Attention | None:
    if ".self_attn." not in name:
        return None
    found = module.get_submodule(name.split(".self_attn.")[0] + ".self_attn")
    assert isinstance(found, Attention)
    return found


def _parts(module: nn.Module, name: str, tensor: Tensor) -> list[tuple[str, Place]]:
    """Published names and places of parameter ``name`` of ``module``."""
    if expert := EXPERTS.fullmatch(name):
        return _expert_parts(module, expert[1], expert[2], tensor)
    fused = next((each for each in PARTS if f".{each}." in name), None)
    if fused is None:
        return [(name, Place(tensor))]
    orders = _orders(module, name)
    whole = isinstance(module, Decoder) and module.config.fused_in_file
    if whole and fused in FUSED:
        rows = None if orders is None else _behind_each_other(orders)
        return [(name, Place(tensor, rows))]
    views = part_views(module, name, tensor)
    return [
        (
            name.replace(fused, part),
            Place(view, None if orders is None else orders[i], repeated=fused == "qk_norm"),
        )
        for i, (part, view) in enumerate(zip(PARTS[fused], views, strict=True))
    ]


def _orders(module: nn.Module, name: str) -> list[Tensor] | None:
    """The order of each part's rows, where the channels of heads are not kept as in the file."""
    attention = _attention(module, name)
    if attention is None or attention.channels is None:
        return None
    dim, order = attention.head_dim, attention.channels
    if ".qk_norm." in name:
        return [order, order]
    counts = attention.heads, attention.kv_heads
    turned = [(torch.arange(n)[:, None] * dim + order).flatten() for n in counts]
    return [*turned, torch.arange(attention.kv_heads * dim)]


def _behind_each_other(orders: list[Tensor]) -> Tensor:
    starts = [0, len(orders[0]), len(orders[0]) + len(orders[1])]
    return torch.cat([order + start for order, start in zip(orders, starts, strict=True)])


def _expert_parts(
    module: nn.Module, mlp: str, kind: str, tensor: Tensor
) -> list[tuple[str, Place]]:
    """Each expert's own matrices, or all of them as one where the file has it so."""
    experts = module.get_submodule(mlp)
    assert isinstance(experts, Experts)
    if experts.config.limit is not None:
        return [(f"{mlp}.experts.{kind}", Place(tensor))]
    found = []
    for number, matrix in enumerate(tensor):
        parts = {"down_proj": matrix}
        if kind == "gate_up_proj":
            parts = dict(zip(PARTS[kind], matrix.chunk(2), strict=True))
        for part, view in parts.items():
            found.append((f"{mlp}.experts.{number}.{part}.weight", Place(view)))
    return found
