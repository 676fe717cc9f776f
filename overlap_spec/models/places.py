"""Where a checkpoint's tensors go in the fused modules.

Module names follow Hugging Face's, but for what is fused: ``qkv_proj``, ``gate_up_proj``,
``qk_norm`` and experts are read from and written to their published parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap_spec.models.config import Layout, ModelConfig
from overlap_spec.models.cuts import Cut, behind_each_other, columns, rows
from overlap_spec.models.decoder import (
    Attention,
    Decoder,
    JointHeadsNorm,
    LatentAttention,
    RMSNorm,
)
from overlap_spec.models.delta import GatedDelta
from overlap_spec.models.eagle3 import FusingHead
from overlap_spec.models.experts import Experts
from overlap_spec.models.mtp import MtpModule

PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qk_norm": ("q_norm", "k_norm"),
}
# The same of gated delta networks.
DELTA_PARTS = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
EXPERTS = re.compile(r"(.+\.mlp)\.experts\.(gate_up_proj|down_proj)")
# What a published name calls a part of an expert, or of all of them.
EXPERTS_PART = re.compile(r"\.mlp\.experts\.(?:\d+\.)?(.+)$")


class Place(NamedTuple):
    """Where one published tensor goes.

    Attributes:
        view: What it fills: a parameter, or a part of one.
        rows: The file's rows in the order in which they are kept; None: as they are.
        dim: What is rows here.
        offset: What is added to the file's numbers.
        repeated: Every row of ``view`` is the tensor.
        cut: What is read of the file's tensor, of which this process holds a part; None: all.
        transposed: The file holds the matrix the other way round.
    """

    view: Tensor
    rows: Tensor | None = None
    dim: int = 0
    offset: float = 0.0
    repeated: bool = False
    cut: Cut | None = None
    transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor in the file."""
        own = self.view.shape[1:] if self.repeated else self.view.shape
        whole = own if self.cut is None else self.cut.whole(own)
        return torch.Size(reversed(whole)) if self.transposed else whole

    def fill(self, tensor: Tensor) -> None:
        """Copy the file's tensor to its place."""
        if self.transposed:
            tensor = tensor.t()
        if self.cut is not None:
            tensor = self.cut.of(tensor)
        if self.rows is not None:
            tensor = tensor.index_select(self.dim, self.rows)
        # Before it is rounded to the parameter's type.
        self.view.copy_(tensor.float() + self.offset if self.offset else tensor)

    def published(self) -> Tensor:
        """The tensor as a file holds it, a copy; of a whole model alone."""
        assert self.cut is None
        kept = (self.view[0] if self.repeated else self.view).detach()
        kept = kept - self.offset if self.offset else kept.clone()
        if self.rows is not None:
            kept = torch.empty_like(kept).index_copy_(self.dim, self.rows.to(kept.device), kept)
        return kept.t() if self.transposed else kept


def tied(module: nn.Module) -> bool:
    """Whether the module's head is its embedding, and no tensor of its own."""
    return isinstance(module, Decoder) and module.config.tie_embeddings


def places(module: nn.Module) -> dict[str, Place]:
    """The place of every tensor that a file of ``module`` must hold, by its first published name.

    All of a decoder's but the head live under ``model.``, or what its layout calls so.
    """
    found: dict[str, Place] = {}
    decoder = module if isinstance(module, Decoder) else None
    config, vocabularies = _cuttable(module)
    shape = module.config if isinstance(module, Decoder | MtpModule) else None
    for name, tensor in module.state_dict().items():
        if tied(module) and name == "lm_head.weight":
            continue
        for part, place in parts(module, name, tensor):
            if shape is not None and shape.unit_offset and _has_offset(part):
                place = place._replace(offset=1.0)
            if decoder is not None and part.startswith("layers.") and place.view.dim() == 2:
                place = place._replace(transposed=decoder.config.layout.transposed)
            if config is not None and config.shard.size > 1:
                place = _cut(config, vocabularies, part, place)
            if decoder is not None:
                part = file_name(decoder.config, part)
            elif isinstance(module, MtpModule):
                part = module.config.layout.in_file(part)
            found[part] = place
    return found


def _has_offset(part: str) -> bool:
    """Whether a tensor is a norm's weight less 1, in files that have norms so."""
    return part.endswith("norm.weight") and ".linear_attn." not in part


def file_name(config: ModelConfig, part: str) -> str:
    """What a decoder's file calls the tensor that is ``part`` in the decoder."""
    return config.layout.in_file(part if part.startswith("lm_head.") else f"model.{part}")


def _cuttable(module: nn.Module) -> tuple[ModelConfig | None, dict[str, int]]:
    """The shape by which a module's layers may be cut, and the rows of what is cut by rows of a
    vocabulary."""
    if isinstance(module, Decoder):
        size = module.config.vocab_size
        return module.config, {"embed_tokens.weight": size, "lm_head.weight": size}
    if isinstance(module, FusingHead):
        return module.config.layer, {"lm_head.weight": module.config.draft_vocab_size}
    return None, {}


def _cut(config: ModelConfig, vocabularies: Mapping[str, int], name: str, place: Place) -> Place:
    """The place with what this process reads of the tensor of published name ``name``."""
    shard = config.shard
    if name in vocabularies:
        run = shard.padded_run(vocabularies[name])
        # What is left of the last rank's rows stays zero.
        view = place.view[: run[1]]
        return place._replace(view=view, cut=rows(run, vocabularies[name]))
    if (expert := EXPERTS_PART.search(name)) is not None:
        return place._replace(cut=_expert_cut(config, expert[1]))
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    queries = rows(shard.run(heads), heads, width)
    keys = rows(shard.run(kv_heads), kv_heads, width)
    inner = config.intermediate_size
    if config.experts is not None and ".shared_expert." in name:
        inner = config.experts.shared_size
    channels = rows(shard.run(inner), inner)
    cuts = {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "q_norm": rows(shard.run(heads), heads),
        "k_norm": rows(shard.run(kv_heads), kv_heads),
        "qkv_proj": _groups_cut(config)
        if config.layout.grouped
        else behind_each_other([queries, keys, keys]),
        "gate_proj": channels,
        "up_proj": channels,
        "gate_up_proj": behind_each_other([channels, channels]),
        "o_proj": columns(shard.run(heads), heads, width),
        "down_proj": columns(shard.run(inner), inner),
        "sinks": rows(shard.run(heads), heads),
    }
    parts = name.split(".")
    layer = parts[-1] if parts[-1] == "sinks" else parts[-2:][0]
    summed = layer in ("o_proj", "down_proj")
    # A sum's bias is whole: it is added once. So is a norm that all heads share.
    whole = place.repeated or (summed and parts[-1] == "bias")
    return place if whole else place._replace(cut=cuts.get(layer))


def _groups_cut(config: ModelConfig) -> Cut:
    """Of rows that lie by heads of keys, what one rank has of its own."""
    width, each = config.head_dim, config.num_heads // config.num_kv_heads
    first, count = config.shard.run(config.num_kv_heads)
    query, queries = config.shard.run(config.num_heads)
    runs = []
    for group in range(first, first + count):
        start = group * (each + 2)
        runs.append(((start + query - first * each) * width, queries // count * width))
        runs.append(((start + each) * width, 2 * width))
    return Cut(0, tuple(runs), config.num_kv_heads * (each + 2) * width)


def _expert_cut(config: ModelConfig, kind: str) -> Cut | None:
    """Of an expert's matrix, or of all experts' as one (GPT-OSS's, where gates and ups take
    turns)."""
    assert config.experts is not None
    inner = config.experts.intermediate_size
    run = config.shard.run(inner)
    return {
        "gate_proj.weight": rows(run, inner),
        "up_proj.weight": rows(run, inner),
        "down_proj.weight": columns(run, inner),
        "gate_up_proj": columns(run, inner, 2, 2),
        "gate_up_proj_bias": columns(run, inner, 2),
        "down_proj": columns(run, inner),
    }.get(kind)


def part_views(module: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    """``tensor`` (parameter ``name`` of ``module``) cut into its published parts, as views."""
    if ".gate_up_proj." in name:
        return list(tensor.chunk(2))
    attention = _attention(module, name)
    if attention is None:
        return [tensor]
    heads, kv_heads = attention.heads, attention.kv_heads
    if ".qkv_proj." in name:
        each = attention.gates + heads, kv_heads, kv_heads
        return list(tensor.split([n * attention.head_dim for n in each]))
    if ".qk_norm." in name:
        return [tensor[:heads], tensor[heads:]]
    return [tensor]


def _attention(module: nn.Module, name: str) -> Attention | None:
    if ".self_attn." not in name:
        return None
    found = module.get_submodule(name.split(".self_attn.")[0] + ".self_attn")
    assert isinstance(found, Attention)
    return found


def parts(module: nn.Module, name: str, tensor: Tensor) -> list[tuple[str, Place]]:
    """Published names and places of parameter ``name`` of ``module``."""
    layout = module.config.layout if isinstance(module, Decoder | MtpModule) else Layout()
    if expert := EXPERTS.fullmatch(name):
        return _expert_parts(module, expert[1], expert[2], tensor, layout.joined_experts)
    before, inside, rest = name.partition(".self_attn.")
    delta = module.get_submodule(f"{before}.self_attn") if inside else None
    if isinstance(delta, GatedDelta):
        return _delta_parts(delta, f"{before}.linear_attn", rest, tensor, layout)
    fused = next((each for each in PARTS if f".{each}." in name), None)
    if fused is None:
        return [(name, Place(tensor, _latent_order(module, name)))]
    orders = _orders(module, name)
    if fused in layout.fused:
        order = None if orders is None else _behind_each_other(orders)
        if fused == "qkv_proj" and layout.grouped:
            by_group = _by_group(module, name)
            order = by_group if order is None else by_group[order]
        return [(name, Place(tensor, order))]
    found: list[tuple[str, Place]] = []
    for i, (part, view) in enumerate(
        zip(PARTS[fused], part_views(module, name, tensor), strict=True)
    ):
        own, order = name.replace(fused, part), None if orders is None else orders[i]
        if fused != "qk_norm":
            found.append((own, Place(view, order)))
        elif layout.norms_apart:
            found += [
                (own.replace(part, f"{part}.norms.{head}"), Place(weight, order))
                for head, weight in enumerate(view)
            ]
        else:
            norm = module.get_submodule(name.removesuffix(".weight"))
            found.append((own, _norm_place(norm, view, order)))
    return found


def _delta_parts(
    delta: GatedDelta, name: str, inside: str, tensor: Tensor, layout: Layout
) -> list[tuple[str, Place]]:
    """Of the part ``inside`` of a gated delta network, which files call ``name``: of its products
    the rows lie by heads of keys, or each is two."""
    if inside in ("conv1d", "norm"):
        inside += ".weight"
    layer = inside.split(".")[0]
    sizes, heads = delta.rows_of_head(layer), delta.config.key_heads
    if sizes is None:
        return [(f"{name}.{inside}", Place(tensor))]
    if layer in layout.fused:
        by_head = torch.arange(len(tensor)).view(heads, -1).split(sizes, 1)
        return [(f"{name}.{inside}", Place(tensor, torch.cat([x.flatten() for x in by_head])))]
    views = tensor.split([heads * sum(sizes[:-1]), heads * sizes[-1]])
    names = (inside.replace(layer, part) for part in DELTA_PARTS[layer])
    return [(f"{name}.{own}", Place(view)) for own, view in zip(names, views, strict=True)]


def _norm_place(norm: nn.Module, weight: Tensor, order: Tensor | None) -> Place:
    """Place of what norms the heads of queries or of keys: ``weight (heads, D)``."""
    if isinstance(norm, JointHeadsNorm):
        assert order is None
        return Place(weight.flatten())
    if isinstance(norm, RMSNorm):
        return Place(weight, order, repeated=True)
    return Place(weight, order, dim=1)


def _by_group(module: nn.Module, name: str) -> Tensor:
    """Where rows of queries, keys and values lie that go by heads of keys in the file."""
    attention = _attention(module, name)
    assert attention is not None
    each = attention.heads // attention.kv_heads
    rows = torch.arange(attention.kv_heads * (each + 2) * attention.head_dim)
    groups = rows.view(attention.kv_heads, each + 2, attention.head_dim)
    return torch.cat(
        [groups[:, :each].flatten(), groups[:, each].flatten(), groups[:, -1].flatten()]
    )


def _latent_order(module: nn.Module, name: str) -> Tensor | None:
    """The order of a layer's rows where attention over latents keeps them in another one."""
    before, inside, layer = name.partition(".self_attn.")
    attention = module.get_submodule(f"{before}.self_attn") if inside else None
    return attention.order(layer.split(".")[0]) if isinstance(attention, LatentAttention) else None


def part_names(module: nn.Module, name: str, tensor: Tensor) -> list[str]:
    """Published names of parameter ``name`` of ``module``, without ``model.``."""
    return [part for part, _ in parts(module, name, tensor)]


def _orders(module: nn.Module, name: str) -> list[Tensor] | None:
    """The order of each part's rows, where the channels of heads are not kept as in the file."""
    attention = _attention(module, name)
    if attention is None or (attention.channels is None and not attention.gates):
        return None
    dim, order = attention.head_dim, attention.channels
    if order is None:
        order = torch.arange(dim)
    if ".qk_norm." in name:
        return [order, order]
    heads = torch.arange(attention.heads + attention.gates)[:, None] * dim
    queries = (heads + order).flatten()
    if attention.gates:
        # In the file each query stands before its gate.
        gates = heads[1::2] + torch.arange(dim)
        queries = torch.cat([gates.flatten(), (heads[::2] + order).flatten()])
    keys = torch.arange(attention.kv_heads)[:, None] * dim
    return [queries, (keys + order).flatten(), torch.arange(keys.numel() * dim)]


def _behind_each_other(orders: list[Tensor]) -> Tensor:
    starts = [0, len(orders[0]), len(orders[0]) + len(orders[1])]
    return torch.cat([order + start for order, start in zip(orders, starts, strict=True)])


def _expert_parts(
    module: nn.Module, mlp: str, kind: str, tensor: Tensor, joined: bool
) -> list[tuple[str, Place]]:
    """Each expert's own matrices, or all of them as one where the file has it so."""
    experts = module.get_submodule(mlp)
    assert isinstance(experts, Experts)
    if joined or experts.config.limit is not None:
        return [(f"{mlp}.experts.{kind}", Place(tensor))]
    found = []
    for number, matrix in enumerate(tensor):
        parts = {"down_proj": matrix}
        if kind == "gate_up_proj":
            parts = dict(zip(PARTS[kind], matrix.chunk(2), strict=True))
        for part, view in parts.items():
            found.append((f"{mlp}.experts.{number}.{part}.weight", Place(view)))
    return found
