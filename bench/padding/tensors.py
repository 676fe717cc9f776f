"""Every tensor of a padded checkpoint. Why the function stays the same: ``bench.padded``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bench.padding.sizes import place_heads
from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import ModelConfig

CONSTANT = 2.0**-40
MARGIN = 1e4
SPREAD = 0.035  # uniform weights in ±SPREAD: a standard deviation of 0.02


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

    def size(name: str) -> float:
        return float(source.get(name).double().norm()) if name in source.names else 0.0

    def top(name: str) -> float:
        return math.sqrt(config.hidden_size) * float(source.get(name).double().abs().max())

    def linear(name: str, length: float) -> float:
        return size(f"{name}.weight") * length + size(f"{name}.bias")

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
    head = source.get(head_name(source)).double()
    row = max(float(head.norm(dim=1).max()), SPREAD * math.sqrt(config.hidden_size))
    return rho, row * top("model.norm.weight")


def head_name(source: Source) -> str:
    """The target's output matrix: its own, or the tied embedding."""
    return "lm_head.weight" if "lm_head.weight" in source.names else "model.embed_tokens.weight"


@dataclass(frozen=True)
class Part:
    """A tensor to be written: made only when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        dtype: Of what is written, but for tensors that only float32 holds exactly.
        seed: Of the random weights.
    """

    def __init__(
        self, source: Source, old: ModelConfig, new: ModelConfig, dtype: torch.dtype, seed: int
    ) -> None:
        self.source, self.old, self.new, self.dtype, self.seed = source, old, new, dtype, seed
        self.shrink = math.sqrt(old.hidden_size / new.hidden_size)
        self.ratio = new.head_dim // old.head_dim
        queries, keys = place_heads(old, new)
        hidden = Axis.first(old.hidden_size, new.hidden_size)
        query, key = (
            self._heads(m, n) for m, n in ((queries, new.num_heads), (keys, new.num_kv_heads))
        )
        inner = Axis.first(old.intermediate_size, new.intermediate_size)
        self.axes: dict[str, tuple[Axis, ...]] = {
            "q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden),
            "o_proj": (hidden, query), "down_proj": (hidden, inner),
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
            "embed_tokens": (Axis.first(old.vocab_size, new.vocab_size), hidden),
            "lm_head": (Axis.first(old.vocab_size, new.vocab_size), hidden),
        }  # fmt: skip
        norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm", "norm")
        self.axes |= dict.fromkeys(norms, (hidden,))
        self.axes |= dict.fromkeys(("q_norm", "k_norm"), (self._heads({0: 0}, 1),))
        self.factors = dict.fromkeys(norms, self.shrink)
        if any(name.endswith("q_norm.weight") for name in source.names):
            spread = self.shrink * math.sqrt(self.ratio)
            self.factors |= {"q_proj": spread, "k_proj": spread, "k_norm": self.ratio**-0.5}
        else:
            self.factors["q_proj"] = math.sqrt(self.ratio)

    def _heads(self, placed: dict[int, int], count: int) -> Axis:
        """Rows of the new heads; a head's rotated halves stay halves."""
        half = self.old.head_dim // 2
        lane = torch.arange(self.old.head_dim)
        spread = lane // half * (half * self.ratio) + lane % half * self.ratio
        new = torch.tensor(list(placed))[:, None] * self.new.head_dim + spread
        old = torch.tensor(list(placed.values()))[:, None] * self.old.head_dim + lane
        return Axis(count * self.new.head_dim, new.flatten(), old.flatten())

    def part(
        self,
        name: str,
        source: str | None,
        finish: Callable[[Tensor], None] | None = None,
    ) -> Part:
        """The padded form of ``source``; of nothing (a new layer's) where that is None."""
        module, kind = ("", *name.split("."))[-2:]
        if module not in self.axes:
            raise CheckpointError(f"{self.source.path}: {name} is not a weight that can be padded")
        axes = self.axes[module] if kind == "weight" else self.axes[module][:1]
        factor = self.factors.get(module, 1.0) if source else 1.0
        exact = math.frexp(factor)[0] == 0.5
        dtype = self.dtype if exact else torch.float32
        silent = len(axes) < 2 or module in ("o_proj", "down_proj", "fc")

        def make() -> Tensor:
            out = torch.zeros([axis.size for axis in axes], dtype=dtype)
            if not silent:
                digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                out.uniform_(-SPREAD, SPREAD, generator=generator)
            if source is not None:
                self._fill(out, module, axes, self.source.get(source), factor)
            if finish is not None:
                finish(out)
            return out

        return Part(name, tuple(axis.size for axis in axes), dtype, make)

    def _fill(
        self, out: Tensor, module: str, axes: Sequence[Axis], values: Tensor, factor: float
    ) -> None:
        """Write the source's ``values``, rounded to the wanted dtype and scaled, into ``out``."""
        expected = [len(axis.old.unique()) for axis in axes]
        if list(values.shape) != expected:
            raise CheckpointError(
                f"{self.source.path}: a {module} has shape {list(values.shape)}, not {expected}"
            )
        if module in ("q_proj", "k_proj") and self.ratio > 1:
            out.view(-1, self.new.head_dim, *out.shape[1:])[axes[0].new // self.new.head_dim] = 0
        scaled = (values.to(self.dtype).double() * factor).to(out.dtype)
        if len(axes) == 1:
            out[axes[0].new] = scaled[axes[0].old]
        else:
            rows, columns = axes
            out[rows.new[:, None], columns.new] = scaled[rows.old[:, None], columns.old]


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
    parts.append(padder.part("lm_head.weight", head_name(source), mute))
    strange = set(source.names) - {part.name for part in parts}
    if strange:
        raise CheckpointError(f"{source.path}: weights that no layer takes: {sorted(strange)[:5]}")
    return parts


def draft_parts(padder: Padder, draft_vocab: int, hidden: tuple[int, int]) -> list[Part]:
    """Every tensor of the padded draft head, whose target's ``hidden`` size was and will be."""
    old, new, source = padder.old, padder.new, padder.source
    own = padder.axes["fc"] = (padder.axes["o_proj"][0], Axis.first(*hidden, blocks=3))
    padder.axes["lm_head"] = (Axis.first(draft_vocab, draft_vocab), own[0])
    for name in ("q_proj", "k_proj", "v_proj"):
        both = Axis.first(old.hidden_size, new.hidden_size, blocks=2)
        padder.axes[name] = (padder.axes[name][0], both)

    def embed(table: Tensor) -> None:
        table[:, old.hidden_size :] = 0

    def reachable() -> Tensor:
        extra = torch.zeros(new.vocab_size - old.vocab_size, dtype=torch.bool)
        return torch.cat([source.get("t2d").bool(), extra])

    parts = []
    for name in source.names:
        if name == "d2t":
            parts.append(Part(name, (draft_vocab,), torch.int64, lambda: source.get("d2t").long()))
        elif name == "t2d":
            parts.append(Part(name, (new.vocab_size,), torch.bool, reachable))
        elif name.endswith("embed_tokens.weight"):
            parts.append(padder.part(name, name, embed))
        else:
            parts.append(padder.part(name, name))
    return parts
