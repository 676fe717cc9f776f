"""A checkpoint padded to the cost of a larger model, with the function of the small one.

A benchmark that is told ``--model 0.75b`` makes it of the embedded model and its draft head. Why
text and acceptance stay the same (d, eps: the source's hidden size and eps; D: ours):

*Width.* What writes into the residual stream has zero rows for the D - d new channels, so these
stay 0, and zero columns for new heads and inner channels, whose own weights are random. RMSNorm's
mean of squares shrinks by d / D exactly: norm weights are multiplied by sqrt(d / D), and
``rms_norm_eps`` by d / D.

*Depth.* New layers follow the source's and add 0. Feature layers keep their numbers, which are
written out where the source relies on the published rule.

*Heads.* A new key-value head holds an old one with its query heads, which come first of those that
read it. Heads keep their size, so that positions turn as they did.

*Vocabulary.* One new channel is c = 2^-40 in every embedding. Nothing writes or reads it but the
final norm, which makes it c * weight / rho = 1 / rho, rho = sqrt(mean + eps). Real rows of lm_head
hold 0 there and do not see it; new rows hold -L, so their logits are row . h - L / rho. Let R bound
\\|row . h\\| and rho_max bound rho, both by norms of weights alone (:func:`bounds`): with
L >= 4 rho_max (1e4 + 2 R) every new logit is 1e4 below every real one, whatever the input, and its
probability underflows to exactly 0 up to temperature 90. To a sum of squares c adds at most
1e-15 of its eps term for any d and eps in use. Float16 cannot hold c.

What is left is the rounding of sums in another order. A norm whose factor is no power of two is
written in float32, as bfloat16 would round it: exact where the engine computes in float32, as on
the CPU. With D = d * 4^k there is none.

A source is a Llama without biases or norms of queries and keys, and a head of its sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.padded_tokenizer import pad_tokenizer
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.config import ModelConfig, read_config, read_json
from overlap_spec.models.eagle3 import feature_layers, read_eagle3_config

SHARD_BYTES = 2 << 30
CONSTANT = 2.0**-40
MARGIN = 1e4
SPREAD = 0.035  # uniform weights in ±SPREAD: a standard deviation of 0.02


@dataclass(frozen=True)
class Sizes:
    """Sizes to pad to, in elements; None keeps the source's."""

    vocab: int | None = None
    hidden: int | None = None
    layers: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


# Sizes and head sizes of models that are published in bfloat16, and of one of 0.75 billion weights.
PRESETS = {
    "0.75b": (Sizes(151936, 1024, 24, 4864, 16, 8), 64),
    "llama-3.1-8b": (Sizes(128256, 4096, 32, 14336, 32, 8), 128),
    "llama-3.2-1b": (Sizes(128256, 2048, 16, 8192, 32, 8), 64),
    "qwen2.5-1.5b": (Sizes(151936, 1536, 28, 8960, 12, 2), 128),
    "qwen2.5-0.5b": (Sizes(151936, 896, 24, 4864, 14, 2), 64),
    "qwen3-8b": (Sizes(151936, 4096, 36, 12288, 32, 8), 128),
}


def like(preset: str, source: ModelConfig) -> Sizes:
    """A preset's sizes. The head size stays the source's; the number of heads grows instead, to
    matrices and caches of the preset's sizes."""
    sizes, head_dim = PRESETS[preset]
    scale = head_dim / source.head_dim
    heads, kv_heads = (round((n or 0) * scale) for n in (sizes.heads, sizes.kv_heads))
    return replace(sizes, heads=heads, kv_heads=kv_heads)


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
    )
    for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size"):
        if getattr(new, name) < getattr(old, name):
            raise ConfigError(f"{name} {getattr(new, name)} is below {getattr(old, name)}")
    if vocab > old.vocab_size and hidden == old.hidden_size:
        raise ConfigError(f"a larger vocabulary needs a spare channel: hidden over {hidden}")
    if new.num_heads % new.num_kv_heads or hidden % new.num_heads:
        raise ConfigError(
            f"heads {new.num_heads} must be a multiple of kv_heads {new.num_kv_heads} and divide "
            f"hidden {hidden}"
        )
    if new.num_kv_heads < old.num_kv_heads or (
        new.num_heads // new.num_kv_heads < old.num_heads // old.num_kv_heads
    ):
        raise ConfigError(f"heads {new.num_heads} over {new.num_kv_heads} do not hold the source's")
    return new


class Source:
    """The tensors of a checkpoint folder by name, read one at a time.

    Raises:
        CheckpointError: no ``model*.safetensors``, or a tensor that is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        shards = sorted(path.glob("model*.safetensors"))
        if not shards:
            raise CheckpointError(f"{path} holds no model*.safetensors")
        self._files: dict[str, Any] = {}
        for shard in shards:
            file = safe_open(shard, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> list[str]:
        """Names of all weights, sorted."""
        return sorted(name for name in self._files if not name.endswith("rotary_emb.inv_freq"))

    def get(self, name: str) -> Tensor:
        """The tensor ``name``; CheckpointError where there is none."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: missing weights: {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@torch.no_grad()
def bounds(source: Source, config: ModelConfig) -> tuple[float, float]:
    """Bounds on rho before the final norm and on \\|row . h\\| after it, from weights alone.

    A normed vector is at most ``sqrt(d) * max \\|weight\\|`` long, attention averages values, and
    ``\\|silu(g) * u\\| <= \\|g\\| * \\|u\\|``; Frobenius norms bound products with matrices.
    """

    def top(name: str) -> float:
        return math.sqrt(config.hidden_size) * float(source.get(name).double().abs().max())

    def linear(name: str, length: float) -> float:
        return float(source.get(f"{name}.weight").double().norm()) * length

    embedding = source.get("model.embed_tokens.weight")
    length = float(embedding.double().norm(dim=1).max())
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        normed = top(f"{at}input_layernorm.weight")
        value = math.sqrt(config.num_heads) * linear(f"{at}self_attn.v_proj", normed)
        length += linear(f"{at}self_attn.o_proj", value)
        normed = top(f"{at}post_attention_layernorm.weight")
        inner = linear(f"{at}mlp.gate_proj", normed) * linear(f"{at}mlp.up_proj", normed)
        length += linear(f"{at}mlp.down_proj", inner)
    rho = math.sqrt(length**2 / config.hidden_size + config.rms_norm_eps)
    head = source.get(_head(source)).double()
    row = max(float(head.norm(dim=1).max()), SPREAD * math.sqrt(config.hidden_size))
    return rho, row * top("model.norm.weight")


def _head(source: Source) -> str:
    """The target's output matrix: its own, or the tied embedding."""
    return "lm_head.weight" if "lm_head.weight" in source.names else "model.embed_tokens.weight"


class Part(NamedTuple):
    """A tensor to be written, of so many bytes: made only when its turn comes."""

    name: str
    bytes: int
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Axis:
    """A dimension of ``size`` in which entry ``new[i]`` is the source's entry ``old[i]``."""

    size: int
    new: Tensor
    old: Tensor

    @classmethod
    def first(cls, old: int, new: int, blocks: int = 1) -> Axis:
        """``blocks`` runs of ``old`` entries, each at the start of ``new``."""
        index = torch.arange(old * blocks)
        return cls(new * blocks, index // old * new + index % old, index)


class Padder:
    """Rules that turn one tensor of a target or a draft head into its padded form.

    Args:
        source: The checkpoint.
        old, new: Its shape and the padded one.
        dtype: Of what is written, but for norms that only float32 holds exactly.
        seed: Of the random weights.
    """

    def __init__(
        self, source: Source, old: ModelConfig, new: ModelConfig, dtype: torch.dtype, seed: int
    ) -> None:
        self.source, self.old, self.new, self.dtype, self.seed = source, old, new, dtype, seed
        self.shrink = math.sqrt(old.hidden_size / new.hidden_size)
        hidden = Axis.first(old.hidden_size, new.hidden_size)
        size, group = old.head_dim, new.num_heads // new.num_kv_heads
        key = Axis.first(old.num_kv_heads * size, new.num_kv_heads * size)
        # Of each key-value head's query heads the first ones are the source's.
        own = Axis.first(old.num_heads // old.num_kv_heads * size, group * size, old.num_kv_heads)
        query = Axis(new.num_heads * size, own.new, own.old)
        inner = Axis.first(old.intermediate_size, new.intermediate_size)
        vocab = Axis.first(old.vocab_size, new.vocab_size)
        self.axes: dict[str, tuple[Axis, ...]] = {
            "q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden),
            "o_proj": (hidden, query), "down_proj": (hidden, inner),
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
            "embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden),
        }  # fmt: skip
        for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm", "norm"):
            self.axes[norm] = (hidden,)

    def part(
        self,
        name: str,
        source: str | None,
        finish: Callable[[Tensor], None] | None = None,
    ) -> Part:
        """The padded form of ``source``; of nothing (a new layer's) where that is None."""
        module, kind = ("", *name.split("."))[-2:]
        if module not in self.axes or kind != "weight":
            raise CheckpointError(f"{self.source.path}: {name} is not a weight that can be padded")
        axes = self.axes[module]
        shape = [axis.size for axis in axes]
        factor = self.shrink if source and len(axes) == 1 else 1.0
        exact = math.frexp(factor)[0] == 0.5
        dtype = self.dtype if exact else torch.float32
        silent = len(axes) < 2 or module in ("o_proj", "down_proj", "fc")

        def make() -> Tensor:
            out = torch.zeros(shape, dtype=dtype)
            if not silent:
                digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                out.uniform_(-SPREAD, SPREAD, generator=generator)
            if source is not None:
                values = (self.source.get(source).double() * factor).to(dtype)
                if len(axes) == 1:
                    out[axes[0].new] = values[axes[0].old]
                else:
                    rows, columns = axes
                    out[rows.new[:, None], columns.new] = values[rows.old[:, None], columns.old]
            if finish is not None:
                finish(out)
            return out

        return Part(name, math.prod(shape) * dtype.itemsize, make)


def target_parts(padder: Padder) -> list[Part]:
    """Every tensor of the padded target, in the order of the model."""
    old, new, source = padder.old, padder.new, padder.source
    channel, grown = old.hidden_size, new.vocab_size > old.vocab_size
    rho, reach = bounds(source, old) if grown else (1.0, 0.0)
    depth = 2.0 ** math.ceil(math.log2(4 * rho * (MARGIN + 2 * reach)))

    def embed(table: Tensor) -> None:
        table[:, channel:] = 0
        if grown:
            table[:, channel] = CONSTANT

    def read(weight: Tensor) -> None:
        if grown:
            weight[channel] = 1 / CONSTANT

    def mute(table: Tensor) -> None:
        if grown:
            table[: old.vocab_size, channel] = 0
            table[old.vocab_size :, channel] = -depth

    parts = [padder.part("model.embed_tokens.weight", "model.embed_tokens.weight", embed)]
    first = "model.layers.0."
    leaves = [name.removeprefix(first) for name in source.names if name.startswith(first)]
    for layer in range(new.num_layers):
        for leaf in leaves:
            name = f"model.layers.{layer}.{leaf}"
            if layer < old.num_layers:
                parts.append(padder.part(name, name))
            else:
                busy = (lambda weight: weight.fill_(1)) if leaf.endswith("norm.weight") else None
                parts.append(padder.part(name, None, busy))
    parts.append(padder.part("model.norm.weight", "model.norm.weight", read))
    parts.append(padder.part("lm_head.weight", _head(source), mute))
    return parts


def draft_parts(padder: Padder, draft_vocab: int) -> list[Part]:
    """Every tensor of the padded draft head."""
    old, new, source = padder.old, padder.new, padder.source
    one, two, three = (Axis.first(old.hidden_size, new.hidden_size, n) for n in (1, 2, 3))
    padder.axes["fc"] = (one, three)
    padder.axes["lm_head"] = (Axis.first(draft_vocab, draft_vocab), one)
    for name in ("q_proj", "k_proj", "v_proj"):
        padder.axes[name] = (padder.axes[name][0], two)

    def reachable() -> Tensor:
        extra = torch.zeros(new.vocab_size - old.vocab_size, dtype=torch.bool)
        return torch.cat([source.get("t2d").bool(), extra])

    parts = []
    for name in source.names:
        if name == "d2t":
            parts.append(Part(name, 8 * draft_vocab, lambda: source.get("d2t").long()))
        elif name == "t2d":
            parts.append(Part(name, new.vocab_size, reachable))
        else:
            parts.append(padder.part(name, name))
    return parts


def write_parts(parts: Sequence[Part], folder: Path) -> None:
    """Write safetensors shards of at most 2 GiB (or one tensor), a shard in memory at a time."""
    shards: list[list[Part]] = [[]]
    for part in parts:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + part.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(part)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        where |= dict.fromkeys([part.name for part in shard], name)
        # Each has random numbers of its own.
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda part: part.make(), shard)
            tensors = {part.name: tensor for part, tensor in zip(shard, made, strict=True)}
        save_file(tensors, folder / name, {"format": "pt"})
    if len(shards) > 1:
        total = sum(part.bytes for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def config_fields(old: ModelConfig, new: ModelConfig) -> dict[str, Any]:
    """What a padded ``config.json`` says otherwise than its source."""
    return {
        "vocab_size": new.vocab_size,
        "hidden_size": new.hidden_size,
        "intermediate_size": new.intermediate_size,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / new.hidden_size,
        "tie_word_embeddings": False,
    }


def pad(source: Path, draft: Path | None, out: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write ``out/target`` and, where there is a ``draft``, ``out/eagle3``, in the source's type.

    Args:
        source, draft: Folders of a target and its EAGLE-3 head.
        sizes: What to grow.
        seed: Of random weights and token texts; the same seed writes the same bytes.

    Raises:
        ConfigError: sizes that cannot be.
        CheckpointError: a source that cannot be padded exactly.
    """
    weights, old = Source(source), read_config(source)
    new = grow(old, sizes)
    dtype = weights.get("model.embed_tokens.weight").dtype
    fields = read_json(source / "config.json") | config_fields(old, new)
    parts = target_parts(Padder(weights, old, new, dtype, seed))
    _write(out / "target", parts, fields)
    pad_tokenizer(source, out / "target", old.vocab_size, new.vocab_size, seed)
    if draft is None:
        return
    head, weights = read_eagle3_config(draft), Source(draft)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    layer = replace(head.layer, **{name: getattr(new, name) for name in same})
    fields = read_json(draft / "config.json") | config_fields(head.layer, layer)
    fields |= {
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": new.hidden_size,
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in feature_layers(head, old)],
    }
    padder = Padder(weights, head.layer, layer, weights.get("fc.weight").dtype, seed + 1)
    _write(out / "eagle3", draft_parts(padder, head.draft_vocab_size), fields)


def _write(folder: Path, parts: Sequence[Part], fields: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_parts(parts, folder)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
