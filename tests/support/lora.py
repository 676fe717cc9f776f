"""Random LoRA adapters in PEFT's folders, and the models that they make."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# What a config of PEFT's has besides, as it writes it.
PEFT = {
    "auto_mapping": None,
    "base_model_name_or_path": "somewhere",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "alpha_pattern": {},
    "revision": None,
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}


@torch.no_grad()
def write_adapter(
    folder: Path, model: Any, wanted: str, rank: int = 4, alpha: float = 8.0, **fields: Any
) -> Any:
    """Write an adapter of the products of ``model`` (of `transformers`) whose names end in one of
    ``wanted``; returns the model with the adapter merged, as PEFT's formula has it."""
    merged = copy.deepcopy(model)
    tensors = {}
    draw = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    scale = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
    for name, module in merged.named_modules():
        if re.search(rf"\.({wanted})$", name) is None:
            continue
        is_transposed = type(module).__name__ == "Conv1D"
        weight = module.weight.t() if is_transposed else module.weight
        down = torch.randn(rank, weight.shape[1], generator=draw) * 0.1
        up = torch.randn(weight.shape[0], rank, generator=draw) * 0.1
        weight += scale * (up @ down)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    assert tensors, wanted
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {**PEFT, "r": rank, "lora_alpha": alpha, "target_modules": wanted.split("|"), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
