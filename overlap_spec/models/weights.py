"""Strict loading of checkpoints into the fused modules, and the way back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.config import ModelConfig, read_config
from overlap_spec.models.decoder import Decoder, widen
from overlap_spec.models.dequantize import Grid
from overlap_spec.models.eagle import EagleHead, read_eagle_config
from overlap_spec.models.eagle3 import Eagle3Config, Eagle3Head, FusingHead, read_eagle3_config
from overlap_spec.models.mtp import MtpModule, find_modules
from overlap_spec.models.parallel import Collectives, join, join_head
from overlap_spec.models.places import file_name, part_names, places
from overlap_spec.models.quantization import GridLinear
from overlap_spec.models.rope import rope_limit, rope_table, trained_length
from overlap_spec.models.shard import WHOLE, Shard
from overlap_spec.models.tensors import (
    disk_bytes,
    grid_names,
    read_tensors,
    scheme_of,
    tensor_names,
)

log = logging.getLogger(__name__)

Head = TypeVar("Head", bound=EagleHead | FusingHead | MtpModule)
Fusing = TypeVar("Fusing", bound=FusingHead)
# A draft head of fewer bytes is whole on every rank: its sums would take longer than is saved
# (measured over gloo: docs/parallel.md).
SPLIT_HEAD_BYTES = 64 << 20
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual)\.")
LATER_NORM = re.compile(r"^(layers\.\d+)\.hidden_norm\.")
# What a weight may be stored in as it is; a number of fewer bits stands for another.
WHOLE_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _own_name(name: str) -> str:
    return name


@torch.no_grad()
def load_state(
    module: nn.Module,
    path: Path,
    rename: Callable[[str], str] = _own_name,
    ignore: Callable[[str], bool] = lambda _: False,
    optional: Collection[str] = (),
    as_stored: Collection[str] = (),
) -> None:
    """Fill every parameter and persistent buffer of ``module`` from the checkpoint in ``path``.

    Args:
        rename: Name in the file → its first published name.
        ignore: Checkpoint names that may be left over.
        optional: Tensors that keep their values where the checkpoint has none.
        as_stored: Weights of the file whose layers hold them in 4 bits, as they are.

    Raises:
        CheckpointError: a missing, left-over or ill-shaped tensor, by name.
    """
    wanted = places(module)
    missing, left_over = set(wanted), []
    for name, tensor in read_tensors(path, as_stored):
        place = wanted.get(rename(name))
        if place is None:
            if not ignore(name):
                left_over.append(name)
            continue
        if place.shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected {list(place.shape)}"
            )
        if place.view.is_floating_point() and tensor.dtype not in WHOLE_TYPES:
            raise CheckpointError(
                f"{path}: {name} has type {tensor.dtype}, and quantization_config in config.json "
                "does not say what its numbers stand for"
            )
        place.fill(tensor)
        missing.discard(rename(name))
    missing.difference_update(optional)
    if missing:
        raise CheckpointError(f"{path}: missing weights: {_some(sorted(missing))}")
    if left_over:
        raise CheckpointError(f"{path}: weights that no layer takes: {_some(left_over)}")


def _text_name(name: str) -> str:
    """A tensor of a text model beside a vision tower, as it is called where it is alone."""
    for inside in ("language_model.model.", "model.language_model."):
        if name.startswith(inside):
            return f"model.{name.removeprefix(inside)}"
    return name.removeprefix("language_model.")


def _inside(base: str, name: str) -> str:
    """A tensor of a file in which no name has what those of a decoder begin with."""
    return name if name.startswith("lm_head.") else base + name


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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _take_memory(module: nn.Module, device: torch.device) -> None:
    """Give a module that was built without memory its parameters and buffers, not yet filled."""
    # As `to_empty`, whose empty_like of such a tensor imports torch's symbolic shapes and sympy:
    # half a second of CPU time.
    module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


def load_decoder(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    collectives: Collectives | None = None,
    keep_int4: bool = False,
) -> Decoder:
    """The decoder of the checkpoint in folder ``path``, ready to serve.

    Args:
        dtype: Of weights that are not kept in 4 bits, and of what is computed with them.
        keep_int4: Hold layers that are stored in 4 bits as they are, in
            :class:`~overlap_spec.models.quantization.GridLinear`; of the whole alone.
        max_position: Longest context in tokens to be served (the checkpoint's own if None).
        collectives: Of the ranks that hold a part each, of which this one reads its own; None: the
            whole is loaded.

    Raises:
        CheckpointError: whatever keeps the checkpoint from being loaded exactly.
        ConfigError: it cannot be cut into so many parts.
    """
    config = read_config(path)
    limit = min(config.max_position, rope_limit(config.rope) or config.max_position)
    if max_position is not None and max_position > limit:
        raise ConfigError(f"context_length {max_position} is over the checkpoint's {limit}")
    trained = trained_length(config.rope)
    if max_position is None and trained is not None and trained < limit:
        log.warning(
            "%s: the context is %d tokens, within which the model rotates as it was trained to; a "
            "context_length of up to %d turns all of it to the longer texts' rotation",
            path, trained, limit,
        )  # fmt: skip
        limit = trained
    stored = tensor_names(path)
    rename = _text_name if config.beside_vision else _own_name
    inside = config.layout.in_file("model") + "."
    if not config.beside_vision and not any(name.startswith(inside) for name in stored):
        # Of the decoder alone, without its head.
        rename = partial(_inside, inside)
    names = {rename(name) for name in stored}
    # A tied checkpoint that still stores a head of its own is served with that head.
    tied = config.tie_embeddings and "lm_head.weight" not in names
    shard = WHOLE if collectives is None else collectives.shard
    config = replace(config, max_position=max_position or limit, tie_embeddings=tied, shard=shard)
    config = _of_names(config, [name for name in names if name.startswith(inside)])
    config.check_shard()
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    widen(decoder, config)
    as_stored = _hold_grids(decoder, path, rename) if keep_int4 else ()
    _take_memory(decoder, device)
    decoder.tie()
    decoder.make_ropes(device)
    # Its next-token modules are the drafter's.
    others = tuple(module.prefix for module in find_modules(names))

    def ignored(name: str) -> bool:
        seeing = config.beside_vision and VISION.match(name) is not None
        unread = _is_rotary(name) or name.endswith(config.layout.ignored)
        return seeing or unread or name.startswith(others)

    for padded in (decoder.embed_tokens, decoder.lm_head) if shard.size > 1 else ():
        padded.weight.data.zero_()
    load_state(decoder, path, rename, ignored, as_stored=as_stored)
    if not as_stored:
        _tell_cost(path, decoder)
    if collectives is not None:
        join(decoder, collectives)
    return decoder.eval().requires_grad_(False)


def _of_names(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """``config`` with what is left to the names of a file's tensors: whether a layer's experts are
    one tensor each."""
    joined = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return replace(config, layout=replace(config.layout, joined_experts=joined))


def _hold_grids(decoder: Decoder, path: Path, rename: Callable[[str], str]) -> list[str]:
    """Make a place in 4 bits for each of the decoder's layers that the file holds so, all parts of
    a fused one in as many groups; returns their weights' names in the file."""
    stored = {rename(name): (name, groups) for name, groups in grid_names(path).items()}
    kept: list[str] = []
    for name, part in list(decoder.named_modules()):
        for child, linear in part.named_children():
            if not isinstance(linear, nn.Linear) or not name:
                continue
            parts = part_names(decoder, f"{name}.{child}.weight", linear.weight)
            found = [stored.get(file_name(decoder.config, each), ("", 0)) for each in parts]
            groups = found[0][1]
            if groups and all(each[1] == groups for each in found):
                rows, width = linear.weight.shape
                grid = Grid(
                    *(
                        torch.empty(rows, columns, dtype=dtype, device="meta")
                        for columns, dtype in (
                            (width, torch.uint8), (groups, torch.float32), (groups, torch.uint8)
                        )
                    )
                )  # fmt: skip
                setattr(part, child, GridLinear(grid, linear.bias))
                kept += [each[0] for each in found]
    return kept


def _tell_cost(path: Path, decoder: Decoder) -> None:
    """Say what it costs that quantised weights are computed with as whole numbers."""
    scheme = scheme_of(path)
    if scheme is not None:
        held = {t.data_ptr(): t.nbytes for t in decoder.parameters()}
        log.warning(
            "%s: %s weights are computed with in %s: %.1f MiB in memory, %.1f MiB on disk",
            path, scheme.name, str(decoder.embed_tokens.weight.dtype).removeprefix("torch."),
            sum(held.values()) / 2**20, disk_bytes(path) / 2**20,
        )  # fmt: skip


def load_eagle3(path: Path, target: Decoder, dtype: torch.dtype) -> Eagle3Head:
    """The EAGLE-3 head in folder ``path``, checked against the target it is to draft for.

    Raises:
        CheckpointError: as for the decoder, and a head whose sizes are not the target's.
    """
    return load_fusing(path, target, dtype, Eagle3Head, read_eagle3_config(path))


def load_fusing(
    path: Path,
    target: Decoder,
    dtype: torch.dtype,
    kind: Callable[[Any, bool, bool], Fusing],
    config: Eagle3Config,
) -> Fusing:
    """As :func:`load_eagle3`, a head of ``kind`` that may have more than EAGLE-3's, of the shape
    that its ``config.json`` says."""
    stored = tensor_names(path)
    names = {_eagle3_name(name) for name in stored}
    if len(names) < len(stored):
        raise CheckpointError(f"{path}: tensors stand there twice, under two of their names")
    config = eagle3_of_names(config, names)
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
    config = replace(config, layer=layer)
    with torch.device("meta"):
        head = kind(config, own_embedding, own_head).to(dtype)
    shard = _shard_of(head, target)
    if shard.size > 1:
        layer = replace(layer, shard=shard)
        with torch.device("meta"):
            head = kind(replace(config, layer=layer), own_embedding, own_head).to(dtype)
    head = _materialise(head, layer, target)
    if own_head and shard.size > 1:
        head.lm_head.weight.data.zero_()
    optional = ("d2t", "t2d") if whole else ("t2d",)
    load_state(head, path, _eagle3_name, _is_rotary, optional)
    if "t2d" not in names:
        own_ids = torch.arange(config.draft_vocab_size, device=head.d2t.device) + head.d2t
        head.t2d.zero_()[own_ids] = True
    if shard.size > 1:
        join_head(head, target.collectives)
    return head.eval().requires_grad_(False)


def _shard_of(whole: FusingHead, target: Decoder) -> Shard:
    """What a rank holds of a head: its part, where that makes a draft step faster."""
    if target.collectives is None:
        return WHOLE
    shard: Shard = target.collectives.shard
    named = whole.named_parameters()
    size = sum(weight.nbytes for name, weight in named if not name.startswith("embed_tokens."))
    return shard if size >= SPLIT_HEAD_BYTES and whole.config.layer.fits(shard) else WHOLE


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
    # As the target's last one.
    experts = shape.experts and replace(shape.experts, layers=shape.experts.layers[-1:])
    windows = shape.sliding_windows[-1:]
    layer = replace(
        shape, num_layers=1, sliding_windows=windows, experts=experts, delta=None, shard=WHOLE
    )
    stored = {names.own(name) for name in tensor_names(path)}
    layer = _of_names(layer, [name for name in stored if name.startswith("layer.")])
    with torch.device("meta"):
        module = MtpModule(layer, "embed_tokens.weight" in stored, "head.weight" in stored)
    module.to(dtype)
    widen(module, layer)
    module = _materialise(module, layer, target)

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
    if isinstance(head, FusingHead):
        head.d2t.zero_()
    return head


def export_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and persistent buffers under their published names.

    A decoder's tied head is left out, as ``transformers`` writes it.
    """
    return {name: place.published().contiguous() for name, place in places(module).items()}
