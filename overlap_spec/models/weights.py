"""Strict loading of checkpoints into the fused modules, and the way back.

Module names follow Hugging Face's, but for what is fused: ``qkv_proj``, ``gate_up_proj`` and
``qk_norm`` are read from and written to their published parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.config import ModelConfig, read_config, read_json
from overlap_spec.models.decoder import Attention, Decoder
from overlap_spec.models.eagle import EagleHead, read_eagle_config
from overlap_spec.models.eagle3 import Eagle3Config, Eagle3Head, read_eagle3_config
from overlap_spec.models.mtp import MtpModule, find_modules
from overlap_spec.models.rope import rope_limit, rope_table

Head = TypeVar("Head", EagleHead, Eagle3Head, MtpModule)
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
LATER_NORM = re.compile(r"^(layers\.\d+)\.hidden_norm\.")
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
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{single}.index.json"
        if index.exists():
            return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        if (path / single).exists():
            return [path / single]
    raise CheckpointError(
        f"{path} holds neither model.safetensors nor pytorch_model.bin, nor an index of either"
    )


def tensor_names(path: Path) -> set[str]:
    """Names of all tensors of the checkpoint in folder ``path``, without reading them."""
    return {name for name, _, _ in _readers(path)}


def parameter_count(path: Path) -> int:
    """Elements of all tensors of the checkpoint in folder ``path``, without reading them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return sum(math.prod(shape()) for _, _, shape in _readers(path))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint in folder ``path``, memory-mapped, shard by shard."""
    for name, read, _ in _readers(path):
        yield name, read()


def _readers(
    path: Path,
) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Sequence[int]]]]:
    """Every tensor's name, and what reads it, or its shape alone, before the next one's turn."""
    for shard in _shards(path):
        try:
            if shard.suffix == ".bin":
                for name, tensor in _pickled(shard).items():
                    yield name, partial(_itself, tensor), tensor.size
                continue
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, partial(file.get_tensor, name), file.get_slice(name).get_shape
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{shard} cannot be read: {error}") from None


def _pickled(shard: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``torch.save`` wrote; nothing in it is executed."""
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{shard} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise CheckpointError(f"{shard} holds something else than tensors by name")
    return state


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@torch.no_grad()
def load_state(
    module: nn.Module,
    path: Path,
    rename: Callable[[str], str] = lambda name: name,
    ignore: Callable[[str], bool] = lambda _: False,
    optional: Collection[str] = (),
) -> None:
    """Fill every parameter and persistent buffer of ``module`` from the checkpoint in ``path``.

    Args:
        rename: Name in the file → its first published name.
        ignore: Checkpoint names that may be left over.
        optional: Tensors that keep their values where the checkpoint has none.

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
    missing.difference_update(optional)
    if missing:
        raise CheckpointError(f"{path}: missing weights: {_some(sorted(missing))}")
    if left_over:
        raise CheckpointError(f"{path}: weights that no layer takes: {_some(left_over)}")


def _eagle_name(name: str) -> str:
    return name.removeprefix("model.")


def _eagle3_name(name: str) -> str:
    """A head's tensor under its first published name, whichever alias the file uses."""
    name = _eagle_name(name).replace("layers.0.", "midlayer.", 1)
    number, _, part = name.partition(".")
    if number in AUX_NORMS:
        return f"fc_norm.{AUX_NORMS.index(number)}.{part}"
    # Layers after the first have one norm before their attention, which has two names.
    return LATER_NORM.sub(r"\1.input_layernorm.", name)


def _is_rotary(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


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
    names = tensor_names(path)
    # A tied checkpoint that still stores a head of its own is served with that head.
    tied = config.tie_embeddings and "lm_head.weight" not in names
    config = replace(config, max_position=max_position or limit, tie_embeddings=tied)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    _take_memory(decoder, device)
    decoder.tie()
    decoder.rope = rope_table(config.rope, config.head_dim, config.max_position).to(device)
    # Its next-token modules are the drafter's.
    others = tuple(module.prefix for module in find_modules(names))
    load_state(decoder, path, ignore=lambda name: _is_rotary(name) or name.startswith(others))
    return decoder.eval().requires_grad_(False)


def load_eagle3(path: Path, target: Decoder, dtype: torch.dtype) -> Eagle3Head:
    """The EAGLE-3 head in folder ``path``, checked against the target it is to draft for.

    Raises:
        CheckpointError: as for the decoder, and a head whose sizes are not the target's.
    """
    stored = tensor_names(path)
    names = {_eagle3_name(name) for name in stored}
    if len(names) < len(stored):
        raise CheckpointError(f"{path}: tensors stand there twice, under two of their names")
    config = eagle3_of_names(read_eagle3_config(path), names)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    if config.target_hidden_size != hidden:
        raise CheckpointError(
            f"{path}: the draft head was made for a target of hidden_size "
            f"{config.target_hidden_size}, this target has {hidden}"
        )
    _check_vocabulary(path, config.layer, target)
    own_embedding, own_head = ("embed_tokens.weight" in names), ("lm_head.weight" in names)
    if not own_embedding and config.layer.hidden_size != hidden:
        raise CheckpointError(
            f"{path}: a head of hidden_size {config.layer.hidden_size} on a target of {hidden} "
            "needs an embed_tokens.weight of its own"
        )
    whole = config.draft_vocab_size == vocab
    # The target's head serves where it can.
    own_head = own_head or not whole or config.layer.hidden_size != hidden
    layer = replace(config.layer, max_position=target.config.max_position)
    with torch.device("meta"):
        head = Eagle3Head(replace(config, layer=layer), own_embedding, own_head).to(dtype)
    head = _materialise(head, layer, target)
    optional = ("d2t", "t2d") if whole else ("t2d",)
    load_state(head, path, _eagle3_name, _is_rotary, optional)
    if "t2d" not in names:
        own_ids = torch.arange(config.draft_vocab_size, device=head.d2t.device) + head.d2t
        head.t2d.zero_()[own_ids] = True
    return head.eval().requires_grad_(False)


def eagle3_of_names(config: Eagle3Config, names: Collection[str]) -> Eagle3Config:
    """``config`` with what trainers leave to the weights, whose published names are ``names``."""
    attention = "midlayer.self_attn"
    layer = replace(
        config.layer,
        qkv_bias=f"{attention}.q_proj.bias" in names,
        o_bias=f"{attention}.o_proj.bias" in names,
        mlp_bias="midlayer.mlp.up_proj.bias" in names,
        qk_norm=f"{attention}.q_norm.weight" in names,
    )
    return replace(config, layer=layer, fc_bias="fc.bias" in names)


def load_eagle(path: Path, target: Decoder, dtype: torch.dtype) -> EagleHead:
    """The head of EAGLE-1 or EAGLE-2 in folder ``path``, checked against its target.

    Raises:
        CheckpointError: as for the decoder, and a head whose sizes are not the target's.
    """
    config = read_eagle_config(path)
    hidden = target.config.hidden_size
    if config.hidden_size != hidden:
        raise CheckpointError(
            f"{path}: the draft head has hidden_size {config.hidden_size}, this target {hidden}"
        )
    _check_vocabulary(path, config, target)
    names = {_eagle_name(name) for name in tensor_names(path)}
    layer = replace(config, max_position=target.config.max_position)
    with torch.device("meta"):
        head = EagleHead(layer, "embed_tokens.weight" in names, "fc.bias" in names).to(dtype)
    head = _materialise(head, layer, target)
    load_state(head, path, _eagle_name, _is_rotary)
    return head.eval().requires_grad_(False)


def load_mtp(path: Path, target: Decoder, dtype: torch.dtype) -> MtpModule:
    """The first next-token module in folder ``path``, the target's own or another.

    An embedding or a head that is the target's over again is not kept twice.

    Raises:
        CheckpointError: no module, or whatever keeps it from being loaded exactly.
    """
    modules = find_modules(tensor_names(path))
    if not modules:
        raise CheckpointError(f"{path} has no next-token module (no eh_proj, input_proj or mtp.fc)")
    names, shape = modules[0], target.config
    layer = replace(shape, num_layers=1, sliding_windows=shape.sliding_windows[-1:])
    stored = {names.own(name) for name in tensor_names(path)}
    with torch.device("meta"):
        module = MtpModule(layer, "embed_tokens.weight" in stored, "head.weight" in stored)
    module = _materialise(module.to(dtype), layer, target)

    def other(name: str) -> bool:
        """Not of this module; Qwen3-Next's share all but their layers."""
        own = names.own(name)
        return _is_rotary(name) or own == name or own.startswith("layer.layers.")

    load_state(module, path, names.own, other)
    if names.hidden_first:
        hidden, embeds = module.eh_proj.weight.data.chunk(2, 1)
        module.eh_proj.weight.data = torch.cat([embeds, hidden], 1)
    for part, theirs in (("embed_tokens", target.embed_tokens), ("head", target.lm_head)):
        own = getattr(module, part, None)
        if own is not None and torch.equal(own.weight, theirs.weight):
            delattr(module, part)
    return module.eval().requires_grad_(False)


def _check_vocabulary(path: Path, config: ModelConfig, target: Decoder) -> None:
    if config.vocab_size != target.config.vocab_size:
        raise CheckpointError(
            f"{path}: the draft head's vocab_size {config.vocab_size} is not the "
            f"target's {target.config.vocab_size}"
        )


def _materialise(head: Head, layer: ModelConfig, target: Decoder) -> Head:
    """A head from the meta device on the target's, with what no checkpoint holds."""
    device = target.rope.device
    _take_memory(head, device)
    head.rope = rope_table(layer.rope, layer.head_dim, layer.max_position).to(device)
    if isinstance(head, Eagle3Head):
        head.d2t.zero_()
    return head


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
