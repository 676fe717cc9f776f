"""LoRA adapters of the target (arXiv 2106.09685), read from PEFT's folders; several in one pass.

An adapter adds ``scale * B (A x)`` to what some layers make of ``x``. The factors of all adapters
lie side by side, so that a layer has two more products whichever adapters the tokens of a pass
have: between them, what is not of a token's own adapter is set to zero. Which one that is the
token's page in the cache tells, as no page is shared between adapters.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import read_json
from overlap_spec.models.decoder import MLP, Attention, Decoder, LatentAttention, PlainMLP
from overlap_spec.models.places import file_name, parts
from overlap_spec.models.quantization import GridLinear

MOST_RANK = 2**12
PREFIX = "base_model.model."
# Fields of adapter_config.json that are read, or that say how the adapter was trained. Any other
# one that is not empty changes what is computed.
READ = ("r", "lora_alpha", "use_rslora", "bias", "peft_type", "task_type")
TRAINING = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
)
# A field → its only value that is read.
ONLY = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}


class Factors(NamedTuple):
    """What an adapter adds to one layer: ``down (r, inputs)`` and ``up (outputs, r)``."""

    down: Tensor
    up: Tensor


class Target(NamedTuple):
    """A published product among those of the decoder: its module, and the name of its layer there;
    which of the layer's outputs it makes; and its own outputs in that order, None: as they are."""

    module: str
    layer: str
    rows: Tensor
    order: Tensor | None


class Chosen(threading.local):
    """The pass that a thread is in: ``own`` bool ``(T, adapters)``, each token's adapter.

    Passes run side by side on several streams' threads, over the same layers.
    """

    own: Tensor | None = None


class AdaptedLinear(nn.Module):
    """A linear layer and what adapters add to it.

    Args:
        factors: Of each adapter, in their order; all of one rank.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, factors: list[Factors], chosen: Chosen) -> None:
        super().__init__()
        self.base, self._chosen = base, chosen
        self._shape = len(factors), len(factors[0].down)
        self.register_buffer("down", torch.cat([each.down for each in factors]))
        self.register_buffer("up", torch.cat([each.up for each in factors], 1))

    def forward(self, x: Tensor) -> Tensor:
        """``(T, inputs)`` → ``(T, outputs)``."""
        own = self._chosen.own
        assert own is not None
        inner = F.linear(x, self.down).unflatten(1, self._shape)
        inner = torch.where(own[:, :, None], inner, 0.0).flatten(1)
        out: Tensor = self.base(x) + F.linear(inner, self.up)
        return out


class Adapters(nn.Module):
    """Which rows and pages have which adapter: numbers from 1 on, 0 is none.

    ``rows`` int64 ``(R,)`` and ``pages`` int64 ``(P,)``, on the decoder's device.
    """

    rows: Tensor
    pages: Tensor
    numbers: Tensor

    def __init__(self, names: list[str], chosen: Chosen) -> None:
        super().__init__()
        self._names, self._chosen = ["", *names], chosen

    def allocate(self, rows: int, pages: int, device: torch.device) -> None:
        """Take the memory of so many rows and pages; nothing else works before."""
        for name, count in (("rows", rows), ("pages", pages)):
            self.register_buffer(name, torch.zeros(count, dtype=torch.int64, device=device))
        self.register_buffer("numbers", torch.arange(1, len(self._names), device=device))

    def assign(self, row: int, name: str) -> None:
        """Give ``row`` to a request with the adapter ``name``; empty: with none."""
        self.rows[row : row + 1] = self._names.index(name)

    def enter(self, rows: Tensor, pages: Tensor) -> None:
        """Note that ``pages`` are now those of ``rows``, both int64 ``(G,)``."""
        self.pages[pages] = self.rows[rows]

    def before(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """What goes before a pass of the decoder: find out each token's adapter."""
        attend = inputs[2]
        pages = attend.slots // attend.pool.page_size
        self._chosen.own = self.pages[pages][:, None] == self.numbers

    def after(self, *_: Any) -> None:
        """What goes behind it."""
        self._chosen.own = None


def load_adapters(decoder: Decoder, folders: Mapping[str, Path]) -> Adapters:
    """Put adapters into a loaded decoder whose layers are not yet packed or quantised.

    Args:
        folders: Name → folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        CheckpointError: whatever keeps one from being applied exactly; names the field or tensor.
    """
    targets, chosen = _targets(decoder), Chosen()
    dtype = decoder.embed_tokens.weight.dtype
    found: dict[tuple[str, str], dict[str, list[tuple[Target, Factors]]]] = {}
    for name, folder in folders.items():
        for published, factors in _read(folder, decoder, targets).items():
            target = targets[published]
            adapted = found.setdefault((target.module, target.layer), {})
            adapted.setdefault(name, []).append((target, factors))
    for (module, layer), by_name in found.items():
        part = decoder.get_submodule(module)
        base = part.get_submodule(layer)
        each = [_joined(base, by_name.get(name, [])) for name in folders]
        most = max(len(factors.down) for factors in each)
        padded = [
            Factors(
                F.pad(down, (0, 0, 0, most - len(down))).to(dtype),
                F.pad(up, (0, most - len(down))).to(dtype),
            )
            for down, up in each
        ]
        setattr(part, layer, AdaptedLinear(base, padded, chosen))
    adapters = Adapters(list(folders), chosen)
    decoder.register_forward_pre_hook(adapters.before)
    decoder.register_forward_hook(adapters.after, always_call=True)
    return adapters


def _targets(decoder: Decoder) -> dict[str, Target]:
    """The products of attention and MLP by their published names."""
    found = {}
    for name, module in decoder.named_modules():
        if not isinstance(module, Attention | LatentAttention | MLP | PlainMLP):
            continue
        for layer, linear in module.named_children():
            if isinstance(linear, nn.Linear | GridLinear):
                rows = torch.arange(linear.out_features)[:, None]
                for part, place in parts(decoder, f"{name}.{layer}.weight", rows):
                    published = file_name(decoder.config, part).removesuffix(".weight")
                    found[published] = Target(name, layer, place.view.flatten(), place.rows)
    return found


def _joined(base: Any, own: list[tuple[Target, Factors]]) -> Factors:
    """What one adapter adds to a layer, the products of which may be several: float32, of rank 0
    where it adds nothing."""
    device = next((factors.down.device for _, factors in own), torch.device("cpu"))
    downs = [torch.zeros(0, base.in_features, device=device), *(f.down for _, f in own)]
    down = torch.cat(downs)
    up = torch.zeros(base.out_features, len(down), device=device)
    start = 0
    for target, factors in own:
        rank = len(factors.down)
        kept = factors.up if target.order is None else factors.up[target.order]
        up[target.rows, start : start + rank] = kept
        start += rank
    return Factors(down, up)


def _read(folder: Path, decoder: Decoder, targets: Mapping[str, Target]) -> dict[str, Factors]:
    """An adapter's factors by published name, float32, the scale in ``up``."""
    if not (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} has no adapter_config.json: not a folder of PEFT's")
    rank, scale = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            tensors = {name: opened.get_tensor(name).float() for name in names}
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    found: dict[str, Factors] = {}
    for name in names:
        published = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        other = name.replace(".lora_A.", ".lora_B.")
        if name.endswith(".lora_B.weight") and name.replace(".lora_B.", ".lora_A.") in tensors:
            continue
        if published not in targets or name == other or other not in tensors:
            raise CheckpointError(
                f"{file}: {name} is no factor of a product in attention or MLP, which alone are "
                "adapted"
            )
        target = targets[published]
        base: Any = decoder.get_submodule(f"{target.module}.{target.layer}")
        want = {name: (rank, base.in_features), other: (len(target.rows), rank)}
        for which, shape in want.items():
            if tensors[which].shape != shape:
                raise CheckpointError(
                    f"{file}: {which} has shape {list(tensors[which].shape)}, "
                    f"expected {list(shape)}"
                )
            # Of another adapter's token it would be multiplied by zero, which is no zero.
            if not tensors[which].isfinite().all():
                raise CheckpointError(f"{file}: {which} has numbers that are not finite")
        device = decoder.embed_tokens.weight.device
        down, up = (tensors[which].to(device) for which in (name, other))
        found[published] = Factors(down, up * scale)
    if not found:
        raise CheckpointError(f"{file} holds no factors")
    return found


def _read_config(path: Path) -> tuple[int, float]:
    """Rank and scale; CheckpointError where the adapter is more than low-rank products."""
    config = read_json(path)
    for name, value in config.items():
        if name in ONLY and value not in (None, ONLY[name]):
            raise CheckpointError(f"{path}: {name} must be {ONLY[name]!r}: {value!r}")
        if value and name not in (*READ, *TRAINING):
            raise CheckpointError(f"{path}: {name} is not supported: {str(value)[:50]}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise CheckpointError(f"{path}: r must be a whole number from 1 to {MOST_RANK}: {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: lora_alpha must be a number: {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
