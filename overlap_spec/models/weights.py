"""Strict loading of safetensors checkpoints into the fused modules, and the way back.

Module names follow Hugging Face's, but for what is fused: ``qkv_proj``, ``gate_up_proj`` and
``qk_norm`` are read from and written to their published parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.config import read_config, read_json
from overlap_spec.models.decoder import Attention, Decoder
from overlap_spec.models.eagle3 import Eagle3Head, read_eagle3_config
from overlap_spec.models.rope import rope_limit, rope_table

PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qk_norm": ("q_norm", "k_norm"),
}


def published_names(name: str) -> list[str]:
    """Names under which a checkpoint holds the parts of parameter ``name``, in order."""
    for fused, parts in PARTS.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def part_views(module: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    """``tensor`` (parameter ``name`` of ``module``) cut into its published parts, as views."""
    if ".gate_up_proj." in name:
        return list(tensor.chunk(2))
    if ".self_attn." not in name:
        return [tensor]
    attention = module.get_submodule(name.split(".self_attn.")[0] + ".self_attn")
    assert isinstance(attention, Attention)
    heads, kv_heads = attention.heads, attention.kv_heads
    if ".qkv_proj." in name:
        return list(tensor.split([n * attention.head_dim for n in (heads, kv_heads, kv_heads)]))
    if ".qk_norm." in name:
        return [tensor[:heads], tensor[heads:]]
    return [tensor]


def _in_file(module: nn.Module, part: str) -> str:
    """Name of a part in its file: all of a decoder's but the head live under ``model.``."""
    outside = not isinstance(module, Decoder) or part.startswith("lm_head.")
    return part if outside else f"model.{part}"


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    single = path / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{path} holds neither model.safetensors nor its index")
    return [single]


def tensor_names(path: Path) -> set[str]:
    """Names of all tensors of the checkpoint in folder ``path``, without reading them."""
    return {name for name, _ in _handles(path)}


def parameter_count(path: Path) -> int:
    """Elements of all tensors of the checkpoint in folder ``path``, without reading them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return sum(math.prod(file.get_slice(name).get_shape()) for name, file in _handles(path))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint in folder ``path``, memory-mapped, shard by shard."""
    for name, file in _handles(path):
        yield name, file.get_tensor(name)


def _handles(path: Path) -> Iterator[tuple[str, Any]]:
    for shard in _shards(path):
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{shard} cannot be read: {error}") from None


@torch.no_grad()
def load_state(
    module: nn.Module,
    path: Path,
    rename: Callable[[str], str] = lambda name: name,
    ignore: Callable[[str], bool] = lambda _: False,
) -> None:
    """Fill every parameter and persistent buffer of ``module`` from the checkpoint in ``path``.

    Args:
        rename: Name in the file → its first published name.
        ignore: Checkpoint names that may be left over.

    Raises:
        CheckpointError: a missing, left-over or ill-shaped tensor, by name.
    """
    wanted: dict[str, Tensor] = {}
    tied = _tied(module)
    for name, tensor in module.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        parts = zip(published_names(name), part_views(module, name, tensor), strict=True)
        wanted.update((_in_file(module, part), view) for part, view in parts)
    missing, left_over = set(wanted), []
    for name, tensor in read_tensors(path):
        target = wanted.get(rename(name))
        if target is None:
            if not ignore(name):
                left_over.append(name)
            continue
        rows = target[0] if ".q_norm." in name or ".k_norm." in name else target
        if rows.shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected {list(rows.shape)}"
            )
        target.copy_(tensor)
        missing.discard(rename(name))
    if missing:
        raise CheckpointError(f"{path}: missing weights: {_some(sorted(missing))}")
    if left_over:
        raise CheckpointError(f"{path}: weights that no layer takes: {_some(left_over)}")


def _eagle3_name(name: str) -> str:
    """A head's tensor under its first published name, whichever alias the file uses."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _tied(module: nn.Module) -> bool:
    return isinstance(module, Decoder) and module.config.tie_embeddings


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _take_memory(module: nn.Module, device: torch.device) -> None:
    """Give a module that was built without memory its parameters and buffers, not yet filled."""
    # As `to_empty`, whose empty_like of such a tensor imports torch's symbolic shapes and sympy:
    # half a second of CPU time.
    module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


def load_decoder(
    path: Path, dtype: torch.dtype, device: torch.device, max_position: int | None = None
) -> Decoder:
    """The decoder of the checkpoint in folder ``path``, ready to serve.

    Args:
        max_position: Longest context in tokens to be served (the checkpoint's own if None).

    Raises:
        CheckpointError: whatever keeps the checkpoint from being loaded exactly.
    """
    config = read_config(path)
    limit = min(config.max_position, rope_limit(config.rope) or config.max_position)
    if max_position is not None and max_position > limit:
        raise ConfigError(f"context_length {max_position} is over the checkpoint's {limit}")
    # A tied checkpoint that still stores a head of its own is served with that head.
    tied = config.tie_embeddings and "lm_head.weight" not in tensor_names(path)
    config = replace(config, max_position=max_position or limit, tie_embeddings=tied)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    _take_memory(decoder, device)
    decoder.tie()
    decoder.rope = rope_table(config.rope, config.head_dim, config.max_position).to(device)
    load_state(
        decoder,
        path,
        ignore=lambda name: name.endswith("rotary_emb.inv_freq"),
    )
    return decoder.eval().requires_grad_(False)


def load_eagle3(path: Path, target: Decoder, dtype: torch.dtype) -> Eagle3Head:
    """The EAGLE-3 head in folder ``path``, checked against the target it is to draft for.

    Raises:
        CheckpointError: as for the decoder, and a head whose sizes are not the target's.
    """
    config = read_eagle3_config(path)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    if config.target_hidden_size != hidden:
        raise CheckpointError(
            f"{path}: the draft head was made for a target of hidden_size "
            f"{config.target_hidden_size}, this target has {hidden}"
        )
    if config.layer.vocab_size != vocab:
        raise CheckpointError(
            f"{path}: the draft head's vocab_size {config.layer.vocab_size} is not the "
            f"target's {vocab}"
        )
    names = {_eagle3_name(name) for name in tensor_names(path)}
    own_embedding = "embed_tokens.weight" in names
    if not own_embedding and config.layer.hidden_size != hidden:
        raise CheckpointError(
            f"{path}: a head of hidden_size {config.layer.hidden_size} on a target of {hidden} "
            "needs an embed_tokens.weight of its own"
        )
    layer = replace(config.layer, max_position=target.config.max_position)
    with torch.device("meta"):
        head = Eagle3Head(replace(config, layer=layer), own_embedding).to(dtype)
    device = target.rope.device
    _take_memory(head, device)
    head.rope = rope_table(layer.rope, layer.head_dim, layer.max_position).to(device)
    load_state(head, path, _eagle3_name)
    return head.eval().requires_grad_(False)


def export_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and persistent buffers under their published names.

    A decoder's tied head is left out, as ``transformers`` writes it.
    """
    tied = _tied(module)
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        for part, view in zip(published_names(name), part_views(module, name, tensor), strict=True):
            rows = view[0] if ".q_norm." in part or ".k_norm." in part else view
            state[_in_file(module, part)] = rows.detach().contiguous().clone()
    return state
