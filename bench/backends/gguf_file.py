"""A Llama checkpoint with a byte-level BPE, and its EAGLE-3 head, as GGUF files for llama.cpp.

Weights keep their values: matrices in the type that is asked for, vectors in float32. llama.cpp
turns neighbouring channels of a head where this layout turns halves, so that the rows of query and
key projections are interleaved: row ``2 i + j`` of a head is its row ``j D / 2 + i``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.padded import Source
from overlap_spec.errors import CheckpointError
from overlap_spec.gguf.file import LAYER
from overlap_spec.models.config import ModelConfig, read_config, read_json
from overlap_spec.models.eagle3 import feature_layers, read_eagle3_config
from overlap_spec.tokenizer import Tokenizer

HEAD = "eagle3"
LARGEST = 1e6
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_gguf(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint in ``source`` to the file ``out``.

    Args:
        dtype: Of the matrices: float32 or bfloat16.

    Raises:
        ImportError: ``gguf`` is not installed.
        CheckpointError: an architecture, a rope rule or a tokenizer that this does not convert.
    """
    config = read_config(source)
    _check(source, config)
    if dtype not in DTYPES:
        raise CheckpointError(f"GGUF is written in float32 or bfloat16, not {dtype}")
    gguf: Any = import_module("gguf")
    writer = gguf.GGUFWriter(out, "llama")
    _write_shape(writer, config)
    _write_tokenizer(gguf, writer, source, config.vocab_size)
    _write_tensors(gguf, writer, _tensors(Source(source), config), dtype)


def write_gguf_head(source: Path, target: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the EAGLE-3 head in ``source``, of the checkpoint in ``target``, to the file ``out``.

    Raises:
        ImportError: ``gguf`` is not installed.
    """
    head, of = read_eagle3_config(source), read_config(target)
    config = head.layer
    gguf: Any = import_module("gguf")
    writer = gguf.GGUFWriter(out, HEAD)
    _write_shape(writer, config)
    writer.add_array(f"{HEAD}.target_layers", list(feature_layers(head, of)))
    writer.add_uint32(f"{HEAD}.target_hidden_size", of.hidden_size)
    _write_tokenizer(gguf, writer, target, config.vocab_size)
    weights = Source(source)
    offsets = weights.get("d2t").long()
    tokens = (offsets + torch.arange(len(offsets))).numpy()
    writer.add_tensor("d2t", tokens, raw_dtype=gguf.GGMLQuantizationType.I64)
    _write_tensors(gguf, writer, _head_tensors(weights, config), dtype)


def _write_tensors(
    gguf: Any, writer: Any, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    kind = getattr(gguf.GGMLQuantizationType, DTYPES[dtype])
    for name, tensor in tensors:
        if tensor.ndim == 1 or dtype is torch.float32:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.to(dtype).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(source: Path, config: ModelConfig) -> None:
    extras = {
        "biases": config.qkv_bias or config.o_bias or config.mlp_bias,
        "query and key norms": config.qk_norm,
        "sliding windows": any(config.sliding_windows),
        f"rope_type {config.rope.kind}": config.rope.kind != "default",
        f"architecture {config.architecture}": config.architecture != "LlamaForCausalLM",
    }
    found = [name for name, there in extras.items() if there]
    if found:
        raise CheckpointError(f"{source}: not converted to GGUF: {', '.join(found)}")


def _write_shape(writer: Any, config: ModelConfig) -> None:
    writer.add_name("checkpoint")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_tokenizer(gguf: Any, writer: Any, source: Path, size: int) -> None:
    """Token texts, their kinds and the merges; prompts come as ids, so nothing is encoded there."""
    spec = read_json(source / "tokenizer.json")
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(spec.get("decoder")):
        raise CheckpointError(f"{source}/tokenizer.json: only byte-level BPE is converted to GGUF")
    texts = [f"<unused {token}>" for token in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for text, token in model["vocab"].items():
        texts[token], kinds[token] = text, gguf.TokenType.NORMAL
    for added in spec.get("added_tokens") or []:
        special = added.get("special")
        kinds[added["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        texts[added["id"]] = added["content"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_token_merges(pairs)
    # llama.cpp ends a text, and its grammar, at these two alone.
    ends = sorted(Tokenizer(source, size).eos_ids)
    if len(ends) > 2:
        raise CheckpointError(f"{source}: {len(ends)} stop tokens; GGUF is written with at most 2")
    for add, token in zip((writer.add_eos_token_id, writer.add_eot_token_id), ends, strict=False):
        add(token)
    writer.add_add_bos_token(False)


def _tensors(weights: Source, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF's names and the weights, one at a time."""
    yield "token_embd.weight", weights.get("model.embed_tokens.weight")
    norm = weights.get("model.norm.weight")
    if not config.tie_embeddings:
        head = weights.get("lm_head.weight")
        # Half of what bars a padded vocabulary goes into the norm, by a power of two: llama.cpp's
        # 8-bit blocks have scales of 16 bits, which hold no such number.
        moved = torch.where(head.abs().amax(0) > LARGEST, 2.0**20, 1.0)
        norm = norm * moved.to(norm.dtype)
        yield "output.weight", head / moved.to(head.dtype)
    yield "output_norm.weight", norm
    for layer in range(config.num_layers):
        yield from _layer(weights, config, f"blk.{layer}", f"model.layers.{layer}")


def _head_tensors(weights: Source, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    yield "fc.weight", weights.get("fc.weight")
    yield "output_norm.weight", weights.get("norm.weight")
    yield "output.weight", weights.get("lm_head.weight")
    yield "blk.0.attn_norm_2.weight", weights.get("midlayer.hidden_norm.weight")
    yield from _layer(weights, config, "blk.0", "midlayer")


def _layer(
    weights: Source, config: ModelConfig, to: str, of: str
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, ours in LAYER.items():
        tensor = weights.get(f"{of}.{ours}.weight")
        if name in heads:
            halves = tensor.view(heads[name], 2, config.head_dim // 2, -1)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        yield f"{to}.{name}.weight", tensor
