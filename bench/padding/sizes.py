"""Sizes to pad to, and whether a source can be padded to them exactly."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch

from overlap_spec.errors import ConfigError
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.rope import inverse_frequencies


@dataclass(frozen=True)
class Sizes:
    """Sizes to pad to, in elements; None keeps the source's."""

    vocab: int | None = None
    hidden: int | None = None
    layers: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None


# The shapes of published models, and one of 0.75 billion parameters.
PRESETS = {
    "0.75b": Sizes(151936, 1024, 24, 4864, 16, 8, 64),
    "llama-3.1-8b": Sizes(128256, 4096, 32, 14336, 32, 8, 128),
    "llama-3.2-1b": Sizes(128256, 2048, 16, 8192, 32, 8, 64),
    "qwen2.5-0.5b": Sizes(151936, 896, 24, 4864, 14, 2, 64),
    "qwen3-8b": Sizes(151936, 4096, 36, 12288, 32, 8, 128),
}
# The type that all of them are published in.
PRESET_DTYPE = "bfloat16"


def like(preset: str, source: ModelConfig, given: Sizes) -> Sizes:
    """A preset's sizes, ``given`` ones first.

    Unless asked for, the head size stays the source's, whose scores then need no inexact factor;
    the number of heads grows instead, to matrices and caches of the preset's sizes.
    """
    sizes = PRESETS[preset]
    if given.head_dim is None:
        scale = (sizes.head_dim or 0) / source.head_dim
        heads, kv_heads = (round((n or 0) * scale) for n in (sizes.heads, sizes.kv_heads))
        sizes = replace(sizes, heads=heads, kv_heads=kv_heads, head_dim=None)
    return replace(sizes, **{k: v for k, v in asdict(given).items() if v is not None})


def grow(old: ModelConfig, sizes: Sizes) -> ModelConfig:
    """The padded shape of ``old``.

    Raises:
        ConfigError: a size below the source's, or one that cannot be reached exactly.
    """
    hidden = sizes.hidden or old.hidden_size
    heads = sizes.heads or old.num_heads
    vocab = sizes.vocab or old.vocab_size
    if sizes.hidden is None and vocab > old.vocab_size:
        # New tokens need a channel of their own; transformers wants a multiple of the heads.
        step = math.lcm(16, heads)
        hidden = (hidden // step + 1) * step
    new = replace(
        old,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=sizes.layers or old.num_layers,
        intermediate_size=sizes.intermediate or old.intermediate_size,
        num_heads=heads,
        num_kv_heads=sizes.kv_heads or old.num_kv_heads,
        head_dim=sizes.head_dim or old.head_dim,
    )
    for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size"):
        if getattr(new, name) < getattr(old, name):
            raise ConfigError(f"{name} {getattr(new, name)} is below {getattr(old, name)}")
    if vocab > old.vocab_size and hidden == old.hidden_size:
        raise ConfigError(f"a larger vocabulary needs a spare channel: --hidden over {hidden}")
    if new.num_heads % new.num_kv_heads or hidden % new.num_heads:
        raise ConfigError(
            f"heads {new.num_heads} must be a multiple of kv_heads {new.num_kv_heads} and divide "
            f"hidden {hidden}: set --heads, --kv-heads or --head-dim"
        )
    check_rope(old, new)
    place_heads(old, new)
    return new


def check_rope(old: ModelConfig, new: ModelConfig) -> None:
    """Raises ConfigError where ``new.head_dim`` cannot hold the old rotations exactly."""
    ratio, rest = divmod(new.head_dim, old.head_dim)
    if rest or ratio < 1:
        raise ConfigError(f"head_dim {new.head_dim} is no multiple of {old.head_dim}")
    (slow, scale), (fast, new_scale) = (inverse_frequencies(c.rope, c.head_dim) for c in (old, new))
    if scale != new_scale or not torch.equal(fast[::ratio], slow):
        raise ConfigError(f"rope_type {old.rope.kind!r} cannot keep its frequencies: keep head_dim")


def place_heads(old: ModelConfig, new: ModelConfig) -> tuple[dict[int, int], dict[int, int]]:
    """New query head → old one, new key-value head → old one; ConfigError if they do not fit."""
    group, width = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    queries: dict[int, int] = {}
    keys: dict[int, int] = {}
    for kv in range(old.num_kv_heads):
        for start in range(0, group, width):
            slot = len(keys)
            keys[slot] = kv
            for i in range(start, min(start + width, group)):
                queries[slot * width + i - start] = kv * group + i
    if len(keys) > new.num_kv_heads:
        raise ConfigError(
            f"{old.num_heads} heads over {old.num_kv_heads} key-value heads need {len(keys)} of "
            f"them in groups of {width}: kv_heads {new.num_kv_heads} is too few"
        )
    return queries, keys
