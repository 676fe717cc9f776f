"""What a decoder needs to know of a checkpoint, read from its Hugging Face ``config.json``."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from overlap_spec.errors import CheckpointError

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
}
HIGHEST_THETA = 1e18


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling rule, as in Hugging Face's config.

    Attributes:
        theta: Base of the frequencies.
        kind: ``default``, ``linear``, ``dynamic``, ``yarn`` or ``llama3``.
        scaling: The rule's own parameters, sorted by name.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes in elements, ``max_position`` in tokens.

    ``sliding_windows`` has one entry a layer: the number of last positions (the token itself
    included) that the layer attends to, or None for all.
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
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """Sliding window of ``layer`` in tokens, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None


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
    if (raw.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1) != 1:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    try:
        scaling = {key: float(value) for key, value in raw.items() if value is not None}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {name}: {error}") from None
    scaling.setdefault("original_max_position_embeddings", float(hf["max_position_embeddings"]))
    return RopeConfig(theta, kind, tuple(sorted(scaling.items())))


def llama_family(hf: Mapping[str, Any], **differences: Any) -> ModelConfig:
    """The ModelConfig that the architectures share; ``differences`` name where one departs."""
    if hf.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
    if hf.get("quantization_config"):
        raise CheckpointError("quantization_config: quantised checkpoints are not supported")
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
        "rope": read_rope(hf),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
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
