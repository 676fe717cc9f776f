"""What a decoder needs to know of a checkpoint, read from its Hugging Face ``config.json``."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.shard import WHOLE, Shard

# Far above the largest published models: what is above them would fill the memory before a missing
# weight is seen.
MOST = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**27,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**20,
    "decoder_sparse_step": 2**12,
    "sliding_window": 2**27,
    "sliding_window_pattern": 2**12,
    "shared_expert_intermediate_size": 2**20,
    "no_rope_layer_interval": 2**12,
    "num_kv_heads": 2**12,
    "ffn_hidden_size": 2**20,
    "n_embd": 2**17,
    "n_inner": 2**20,
    "n_layer": 2**12,
    "n_head": 2**12,
    "n_positions": 2**27,
    "q_lora_rank": 2**17,
    "kv_lora_rank": 2**17,
    "qk_nope_head_dim": 2**12,
    "qk_rope_head_dim": 2**12,
    "v_head_dim": 2**12,
    "n_routed_experts": 2**12,
    "n_shared_experts": 2**12,
    "n_group": 2**12,
    "topk_group": 2**12,
    "moe_layer_freq": 2**12,
    "linear_conv_kernel_dim": 2**12,
    "linear_key_head_dim": 2**12,
    "linear_value_head_dim": 2**12,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "full_attention_interval": 2**12,
}
# Of an MLP with gates, and of one without.
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
HIGHEST_THETA = 1e18


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling rule, as in Hugging Face's config.

    Attributes:
        theta: Base of the frequencies.
        kind: ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3`` or ``longrope``; ``none``:
            nothing turns.
        scaling: The rule's own parameters, sorted by name.
        share: Of a head's channels those that turn, the first ones.
        factors: LongRoPE's two lists, one number a pair of channels: within the original context,
            and beyond it.
        interleaved: A pair that turns is two channels side by side in the file, not one of each
            half.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    share: float = 1.0
    factors: tuple[tuple[float, ...], ...] = ()
    interleaved: bool = False


NO_ROPE = RopeConfig(kind="none")


@dataclass(frozen=True)
class ExpertsConfig:
    """Shape of the layers whose MLP is a choice among experts.

    Attributes:
        count, per_token: Experts of a layer, and those that a token is sent to.
        intermediate_size: Of one expert.
        layers: One entry a layer: whether it has experts.
        normalised: The chosen ones' shares add up to 1, before they are multiplied by ``factor``.
        limit: None: SwiGLU, with one matrix an expert in the file. A number: GPT-OSS's experts,
            with biases, and inputs of the activation clamped to it.
        shared_size: Intermediate size of an expert beside them that every token is sent to; 0:
            there is none.
        shared_gate: That expert has a gate of its own.
        wide: The router's scores are computed in float32.
        sigmoid: Shares are the scores' sigmoid, to which a bias is added where experts are chosen
            (arXiv 2412.19437, section 2.1.2); otherwise their softmax.
        groups, open_groups: Runs of experts, and those of them that a token may choose from: whose
            ``best`` experts have the highest sum.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    normalised: bool = True
    limit: float | None = None
    shared_size: int = 0
    shared_gate: bool = True
    wide: bool = False
    sigmoid: bool = False
    factor: float = 1.0
    groups: int = 1
    open_groups: int = 1
    best: int = 1


@dataclass(frozen=True)
class LatentConfig:
    """Shape of attention over latents (arXiv 2405.04434, section 2.1); ``head_dim`` is that of the
    keys' part that is rotated, one for all heads.

    Attributes:
        rank: Channels of a latent.
        query_rank: Of the latents that queries are made of; None: they are made of the stream.
        key_dim: Channels of a head's key that are made of a latent.
        value_dim: Of a head's value.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaConfig:
    """Shape of the layers that have gated delta networks in the place of attention (arXiv
    2412.06464): of a text they keep a state, and no keys.

    Attributes:
        layers: One entry a layer: whether it is one of them.
        key_heads, key_dim: Of queries, and of keys.
        groups: Heads of values to each head of keys.
        value_dim: Of each of these.
        taps: Tokens that the convolution before them reads: the token itself, and those before it.
    """

    layers: tuple[bool, ...]
    key_heads: int
    key_dim: int
    groups: int
    value_dim: int
    taps: int

    @property
    def value_channels(self) -> int:
        """Of the values of all heads."""
        return self.key_heads * self.groups * self.value_dim

    @property
    def channels(self) -> int:
        """Of queries, keys and values, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_channels


@dataclass(frozen=True)
class Layout:
    """How a file holds the weights, where it is not as Llama's does.

    Attributes:
        names: Parts of names between dots: as they are called here, and as in the file.
        fused: Of ``qkv_proj`` and ``gate_up_proj`` those that the file holds whole.
        grouped: The rows of ``qkv_proj`` lie by heads of keys: the queries of each, it, its values.
        transposed: The matrices of layers lie as ``(inputs, outputs)``.
        norms_apart: Norms of heads are a tensor each.
        joined_experts: All experts of a layer are one tensor, as they are here.
        ignored: Ends of names that stand for no weight.
    """

    names: tuple[tuple[str, str], ...] = ()
    fused: tuple[str, ...] = ()
    grouped: bool = False
    transposed: bool = False
    norms_apart: bool = False
    joined_experts: bool = False
    ignored: tuple[str, ...] = ()

    def in_file(self, name: str) -> str:
        """A tensor's name in the file."""
        names = dict(self.names)
        return ".".join(names.get(part, part) for part in name.split("."))


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes in elements, ``max_position`` in tokens.

    Attributes:
        rms_norm_eps: Of all norms.
        norm: ``rms``, or ``layer`` (arXiv 1607.06450), with biases if ``norm_bias``.
        qk_norm: Each query's and key's head is normed: with ``rms`` all by one weight, with
            ``layer`` each by its own.
        joint_qk_norm: All heads of queries are normed as one, and all heads of keys.
        sliding_windows: One entry a layer: the number of last positions (the token itself
            included) that the layer attends to, or None for all.
        local_rope: Rotation of some layers, if it is another.
        local_layers: One entry a layer: whether it rotates by ``local_rope``; empty: those with a
            window do.
        learned_positions: Rows of a table of vectors that are added to the embeddings, one a
            position; 0: there is none.
        activation: Of the MLP, by its name in ``config.json``.
        gated: The MLP's activation is multiplied with a second product.
        embed_scale, residual_scale, logit_scale: What embeddings, what attention and MLP add to the
            stream, and logits are multiplied by.
        query_scale: Factor of the attention's products; None: ``head_dim ** -0.5``.
        score_cap, logit_cap: Soft caps c of attention scores and logits x: ``c * tanh(x / c)``.
        output_gate: What each head attended is multiplied with a gate of its own, whose rows stand
            behind the head's query in the file.
        sinks: Each head has a sink, as :class:`overlap_spec.kernels.Scoring` says.
        unit_offset: The file's norm weights are the factors less 1.
        sandwich_norms: What attention and MLP add to the stream is normed, too.
        pre_norms: What attention and MLP read is normed.
        parallel_norms: Attention and MLP read the same stream, by one norm or by two; 0: the MLP
            reads what the attention made of it.
        layout: How the file holds the weights.
        latent: None: each head has keys and values of its own, or shares another one's.
        delta: None: every layer attends to keys.
        experts: None: every layer has one MLP.
        beside_vision: The file holds a vision tower, too, and the text model under a name.
        shard: The part that this process holds. All other fields are of the whole model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    local_layers: tuple[bool, ...] = ()
    learned_positions: int = 0
    activation: str = "silu"
    gated: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    query_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    output_gate: bool = False
    sinks: bool = False
    unit_offset: bool = False
    sandwich_norms: bool = False
    pre_norms: bool = True
    parallel_norms: int = 0
    layout: Layout = Layout()
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None
    beside_vision: bool = False
    shard: Shard = WHOLE

    @property
    def own_heads(self) -> int:
        """Heads of queries that this process computes."""
        return self.shard.part(self.num_heads)

    @property
    def own_kv_heads(self) -> int:
        """Heads of keys and values that this process computes and caches."""
        return self.shard.part(self.num_kv_heads)

    @property
    def value_dim(self) -> int:
        """Channels of a head's values that are cached; of its keys they are ``head_dim``."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def key_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have keys."""
        every = range(self.num_layers)
        return tuple(i for i in every if self.delta is None or not self.delta.layers[i])

    def fits(self, shard: Shard) -> bool:
        """Whether the model can be cut into ``shard.size`` parts."""
        try:
            replace(self, shard=shard).check_shard()
        except ConfigError:
            return False
        return True

    def check_shard(self) -> None:
        """Raise ConfigError where the model cannot be cut into ``shard.size`` parts."""
        size = self.shard.size
        sizes = {
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
        }
        if self.experts is not None:
            sizes["moe_intermediate_size"] = self.experts.intermediate_size
            sizes["shared_expert_intermediate_size"] = self.experts.shared_size
            if all(self.experts.layers):
                del sizes["intermediate_size"]
        for name, count in sizes.items():
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size {size} does not divide the model's {name}, {count}"
                )
        if size > 1 and self.latent is not None:
            raise ConfigError(
                f"tensor_parallel_size {size}: {self.architecture}'s latents (kv_lora_rank) cannot "
                "be cut: leave it out"
            )
        if size > 1 and self.delta is not None:
            raise ConfigError(
                f"tensor_parallel_size {size}: {self.architecture}'s gated delta networks "
                "(linear_num_value_heads) cannot be cut: leave it out"
            )
        if size > 1 and (self.joint_qk_norm or self.layout.norms_apart):
            raise ConfigError(
                f"tensor_parallel_size {size}: {self.architecture}'s norms of queries and keys "
                "cannot be cut: leave it out"
            )
        if max(size, self.num_kv_heads) % min(size, self.num_kv_heads):
            raise ConfigError(
                f"tensor_parallel_size {size} neither divides the model's num_key_value_heads, "
                f"{self.num_kv_heads}, nor is a multiple of it"
            )

    def window(self, layer: int) -> int | None:
        """Sliding window of ``layer`` in tokens, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def turns_locally(self, layer: int) -> bool:
        """Whether ``layer`` rotates by :attr:`local_rope`."""
        if self.local_rope is None:
            return False
        return self.local_layers[layer] if self.local_layers else self.window(layer) is not None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; CheckpointError where it is absent or broken."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a Hugging Face checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data


def field(hf: Mapping[str, Any], name: str) -> Any:
    """``hf[name]``; CheckpointError that names the field where it is absent."""
    if hf.get(name) is None:
        raise CheckpointError(f"config.json has no {name!r}")
    return hf[name]


def whole(hf: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """``hf[name]``, a whole number in its range in :data:`MOST`; CheckpointError that names the
    field where it is anything else.

    Args:
        otherwise: Where the field is absent; None: that is an error.
    """
    value = field(hf, name) if otherwise is None else hf.get(name)
    if value is None:
        return cast("int", otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST[name]:
        raise CheckpointError(
            f"config.json: {name} must be a whole number from 1 to {MOST[name]}: {str(value)[:50]}"
        )
    return value


def number(name: str, value: Any, otherwise: float, most: float) -> float:
    """A field's value, above 0 and up to ``most``; CheckpointError that names the field where it is
    anything else."""
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise CheckpointError(
            f"config.json: {name} must be a number above 0 and up to {most:g}: {str(value)[:50]}"
        )
    return float(value)


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """The rotary settings, in the older (``rope_theta`` + ``rope_scaling``) or newer
    (``rope_parameters``) spelling."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: {name} must be an object: {str(given)[:50]}")
    raw = dict(given)
    if any(isinstance(value, dict) for value in raw.values()):
        raise CheckpointError("rope_parameters that differ by layer type are not supported")
    theta = number(
        "rope_theta", raw.pop("rope_theta", None) or hf.get("rope_theta"), 10000.0, HIGHEST_THETA
    )
    kind = str(raw.pop("rope_type", None) or raw.pop("type", None) or "default")
    raw.pop("type", None)
    partial = raw.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor")
    share = number("partial_rotary_factor", partial, 1.0, 1.0)
    factors: tuple[tuple[float, ...], ...] = ()
    if kind == "longrope":
        lists = raw.pop("short_factor", None), raw.pop("long_factor", None)
        factors = tuple(_numbers(f"{name}: short_factor, long_factor", each) for each in lists)
        original = hf.get("original_max_position_embeddings")
        if original is not None:
            raw["original_max_position_embeddings"] = original
    try:
        scaling = {key: float(value) for key, value in raw.items() if value is not None}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {name}: {error}") from None
    scaling.setdefault("original_max_position_embeddings", float(hf["max_position_embeddings"]))
    if kind == "longrope":
        longer = hf["max_position_embeddings"] / scaling["original_max_position_embeddings"]
        scaling.setdefault("factor", longer)
    return RopeConfig(theta, kind, tuple(sorted(scaling.items())), share, factors)


def yarn_scale(factor: float, weight: float) -> float:
    """What YaRN multiplies queries and keys by in a context that is ``factor`` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"config.json: {name} must be lists of numbers: {str(value)[:50]}")
    return tuple(number(name, each, 1.0, HIGHEST_THETA) for each in value)


def soft_cap(hf: Mapping[str, Any], name: str) -> float | None:
    """``hf[name]``, a number above 0, or None."""
    return number(name, hf[name], 1.0, HIGHEST_THETA) if hf.get(name) is not None else None


def alternating_windows(hf: Mapping[str, Any], pattern: int) -> tuple[int | None, ...]:
    """Window of each layer: by ``layer_types``, or on all but every ``pattern``-th one."""
    layers, window = whole(hf, "num_hidden_layers"), whole(hf, "sliding_window")
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i % pattern else "full_attention" for i in range(1, layers + 1)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer, as Qwen has it: ``layer_types``, or from ``max_window_layers`` on."""
    layers = int(hf["num_hidden_layers"])
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= int(hf.get("max_window_layers", layers)) else "full_attention"
        for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def llama_family(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    """The ModelConfig that the architectures share; ``differences`` name where one departs."""
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    known = ACTIVATIONS if differences.get("gated", True) else PLAIN_ACTIVATIONS
    if activation not in known:
        raise CheckpointError(
            f"config.json: hidden_act must be one of {', '.join(known)}: {activation!r}"
        )
    heads, hidden = whole(hf, "num_attention_heads"), whole(hf, "hidden_size")
    shared = whole(hf, "num_key_value_heads", heads)
    if heads % shared:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{shared}"
        )
    common: dict[str, Any] = {
        "architecture": field(hf, "architectures")[0],
        "vocab_size": whole(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": whole(hf, "intermediate_size"),
        "num_layers": whole(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": shared,
        "head_dim": whole(hf, "head_dim", max(hidden // heads, 1)),
        "max_position": whole(hf, "max_position_embeddings"),
        "rms_norm_eps": number("rms_norm_eps", hf.get("rms_norm_eps"), 1e-6, 1.0),
        "rope": differences.get("rope") or read_rope(hf),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "activation": activation,
    }
    return ModelConfig(**{**common, **differences})


def read_config(path: Path) -> ModelConfig:
    """ModelConfig of the checkpoint in folder ``path``.

    Raises:
        CheckpointError: no or broken ``config.json``, or an architecture that no file here knows.
    """
    hf = read_json(path / "config.json")
    names = field(hf, "architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"config.json: architectures must be a list: {str(names)[:50]}")
    for module in architectures():
        if names[0] == module.ARCHITECTURE:
            config: ModelConfig = module.describe(hf)
            return config
    known = ", ".join(sorted(module.ARCHITECTURE for module in architectures()))
    raise CheckpointError(f"{path}: architecture {names[0]!r} is not known; known: {known}")


def architectures() -> list[Any]:
    """The modules of ``models/architectures``: each has ARCHITECTURE and ``describe(hf)``."""
    from overlap_spec.models import architectures as package

    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]
