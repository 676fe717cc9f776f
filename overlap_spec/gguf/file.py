"""A GGUF file as a checkpoint: its tensors under their published names, and the files beside them.

A GGUF file holds what a Hugging Face checkpoint has in several: its metadata becomes
``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` in a folder of the cache, which
links to the file; all that reads checkpoints reads that folder. Values are those of the package
``gguf``, which llama.cpp's authors keep; it takes seconds to read a large vocabulary, so where each
tensor lies is kept in that folder too, and the package reads a file once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_spec.caches import cache_folder
from overlap_spec.errors import CheckpointError
from overlap_spec.gguf.tokenizer import tokenizer_files

LINK, INDEX = "model.gguf", "tensors.json"
# Types that torch has, and those that are dequantised.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*PLAIN, "Q8_0", "Q4_0", "Q4_K", "Q6_K")
# GGUF's architectures, and the published ones that they are.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Factors of the rotation's frequencies, one a pair of channels: Llama 3.1's rule, worked out.
ROPE_FACTORS = "rope_freqs.weight"
# Weights of a group of Q4_0, and what its codes are counted from.
GROUP, ZERO = 32, 8


class Entry(NamedTuple):
    """Where a tensor lies in a file.

    Attributes:
        name: The published one.
        kind: GGUF's type.
        shape: Outputs first.
        offset, size_bytes: Of its data.
        heads: How many heads' rows stand in llama.cpp's order; 0: they stand as published.
    """

    name: str
    kind: str
    shape: list[int]
    offset: int
    size_bytes: int
    heads: int


def unpack(file: Path) -> Path:
    """The folder that stands for a GGUF file; it is written once for each version of the file.

    Raises:
        CheckpointError: the file cannot be read, or holds what is not read here.
    """
    file = file.resolve()
    stat = file.stat()
    version = f"{file} {stat.st_size} {stat.st_mtime_ns} {INDEX}".encode()
    folder = cache_folder() / "gguf" / f"{file.stem}-{hashlib.sha256(version).hexdigest()[:12]}"
    if folder.exists():
        return folder
    reader = _open(file)
    _check_types(file, reader)
    meta = Metadata(file, reader)
    files = {
        "config.json": describe(file, reader),
        **tokenizer_files(file, meta),
        INDEX: list(_entries(file, reader, meta)),
    }
    partial_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial_folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (partial_folder / name).write_text(json.dumps(content), encoding="utf-8")
    (partial_folder / LINK).symlink_to(file)
    try:
        partial_folder.rename(folder)
    except OSError:
        # Another process was quicker.
        if not folder.exists():
            raise
    return folder


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a file, as Python's own values."""

    def __init__(self, file: Path, reader: Any) -> None:
        self._file, self._fields = file, reader.fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def needed(self, name: str) -> Any:
        """The value of a key; CheckpointError where there is none."""
        if name not in self:
            raise CheckpointError(f"{self._file}: the GGUF file has no {name}")
        return self[name]


def describe(file: Path, reader: Any) -> dict[str, Any]:
    """``config.json`` of a file.

    Raises:
        CheckpointError: a key is missing, or an architecture or a rotation is not known.
    """
    meta = Metadata(file, reader)
    name = meta.needed("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file}: GGUF architecture {name!r} is not read; known: {known}")
    if meta.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file} is one of {meta['split.count']} GGUF files of a model: join them with "
            "llama-gguf-split --merge"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file}: the GGUF file has no tensor token_embd.weight")
    heads = meta.needed(f"{name}.attention.head_count")
    hidden, context = (
        meta.needed(f"{name}.{key}") for key in ("embedding_length", "context_length")
    )
    head_dim = meta.get(f"{name}.attention.key_length", hidden // heads)
    ends = [
        meta[f"tokenizer.ggml.{key}_token_id"]
        for key in ("eos", "eot")
        if f"tokenizer.ggml.{key}_token_id" in meta
    ]
    bias = "blk.0.attn_q.bias" in tensors
    return {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": meta.needed(f"{name}.feed_forward_length"),
        "num_hidden_layers": meta.needed(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": meta.needed(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rotation(file, meta, name, tensors, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": bias and name != "qwen2",
        "torch_dtype": "float32" if _all_float32(reader) else "bfloat16",
        "eos_token_id": sorted(set(ends)),
    }


def _rotation(
    file: Path, meta: Metadata, name: str, tensors: Mapping[str, Any], context: int
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": meta.get(f"{name}.rope.freq_base", 10000.0)}
    kind = meta.get(f"{name}.rope.scaling.type", "none")
    original = meta.get(f"{name}.rope.scaling.original_context_length", context)
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS].data.astype(float).tolist()
        return rope | {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": context, "attention_factor": 1.0,
        }  # fmt: skip
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{file}: GGUF rope.scaling.type {kind!r} is not read")
    factor = meta.needed(f"{name}.rope.scaling.factor")
    return rope | {
        "rope_type": kind, "factor": factor, "original_max_position_embeddings": original
    }  # fmt: skip


def stored(shard: Path) -> Iterator[tuple[str, Callable[[], Tensor], Sequence[int]]]:
    """Each tensor's published name, what reads it, and its shape, without reading it.

    Args:
        shard: The link in a folder of :func:`unpack`.
    """
    for entry in _kept(shard):
        yield entry.name, partial(_weight, shard, entry), entry.shape


def grids(shard: Path) -> dict[str, tuple[int, Callable[[], list[Tensor]]]]:
    """The weights of 4 bits in groups of 32 (Q4_0): how many groups a row has, and what reads its
    codes uint8 ``(N, K)``, scales float32 and zeros uint8 ``(N, groups)``."""
    return {
        entry.name: (entry.shape[1] // GROUP, partial(_grid, shard, entry))
        for entry in _kept(shard)
        if entry.kind == "Q4_0" and len(entry.shape) == 2
    }


def _kept(shard: Path) -> list[Entry]:
    kept = json.loads(shard.with_name(INDEX).read_text(encoding="utf-8"))
    return [Entry(*each) for each in kept]


def _package(file: Path) -> Any:
    try:
        return import_module("gguf")
    except ImportError:
        raise CheckpointError(
            f"{file} is a GGUF file, which the package gguf reads: pip install 'overlap-spec[gguf]'"
        ) from None


def _open(file: Path) -> Any:
    gguf = _package(file)
    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # the package checks little of what it reads
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{file} is no whole GGUF file: {reason}") from None


def _check_types(file: Path, reader: Any) -> None:
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in TYPES:
            raise CheckpointError(
                f"{file}: {tensor.name} has GGUF type {tensor.tensor_type.name}, which is not "
                f"read; read are {', '.join(TYPES)}"
            )


def _all_float32(reader: Any) -> bool:
    return all(tensor.tensor_type.name == "F32" for tensor in reader.tensors)


def _entries(file: Path, reader: Any, meta: Metadata) -> Iterator[Entry]:
    name = meta.needed("general.architecture")
    queries = meta.needed(f"{name}.attention.head_count")
    heads = {"attn_q": queries, "attn_k": meta.get(f"{name}.attention.head_count_kv", queries)}
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        part = tensor.name.split(".")[-2]
        yield Entry(
            _published(file, tensor.name),
            tensor.tensor_type.name,
            # GGUF's is the other way round.
            [int(size) for size in reversed(tensor.shape)],
            int(tensor.data_offset),
            int(tensor.n_bytes),
            int(heads.get(part, 0)) if name == "llama" else 0,
        )


def _published(file: Path, name: str) -> str:
    outside, _, kind = name.rpartition(".")
    if outside in OUTSIDE:
        return f"{OUTSIDE[outside]}.{kind}"
    block, _, rest = name.removeprefix("blk.").partition(".")
    part = (LAYER | HEAD_NORMS).get(rest.removesuffix(f".{kind}"))
    if part is None or not (name.startswith("blk.") and block.isdigit()):
        raise CheckpointError(f"{file}: no layer takes the GGUF tensor {name}")
    return f"model.layers.{block}.{part}.{kind}"


def _read(file: Path, entry: Entry) -> np.ndarray[Any, Any]:
    raw = np.fromfile(file, np.uint8, entry.size_bytes, offset=entry.offset)
    if len(raw) < entry.size_bytes:
        raise CheckpointError(f"{file.resolve()} ends within {entry.name}: it has changed")
    return raw


def _weight(file: Path, entry: Entry) -> Tensor:
    """A tensor as a file without quantisation would hold it: in its own type, or float32."""
    raw, shape = _read(file, entry), entry.shape
    if entry.kind in PLAIN:
        whole = torch.from_numpy(raw).view(PLAIN[entry.kind])
    else:
        gguf = _package(file)
        kind = gguf.GGMLQuantizationType[entry.kind]
        whole = torch.from_numpy(gguf.quants.dequantize(raw.reshape(*shape[:-1], -1), kind))
    return _halves(entry, whole.reshape(shape))


def _grid(file: Path, entry: Entry) -> list[Tensor]:
    """A Q4_0 matrix as it is: of each 18 bytes the first two are the scale, of the rest the low
    halves come first."""
    rows, width = entry.shape
    blocks = _read(file, entry).reshape(rows, width // GROUP, 2 + GROUP // 2)
    scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0]).float()
    packed = torch.from_numpy(blocks[..., 2:].copy())
    codes = torch.cat([packed & 15, packed >> 4], -1).reshape(rows, width)
    parts = codes, scales, torch.full_like(scales, ZERO, dtype=torch.uint8)
    return [_halves(entry, part).contiguous() for part in parts]


def _halves(entry: Entry, whole: Tensor) -> Tensor:
    """Rows of Llama's queries and keys in the published order: llama.cpp rotates neighbouring
    channels of a head where published weights rotate its halves."""
    if not entry.heads:
        return whole
    pairs: Tensor = whole.unflatten(0, (entry.heads, -1, 2))
    return pairs.transpose(1, 2).reshape(whole.shape)
