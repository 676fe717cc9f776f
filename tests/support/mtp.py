"""Next-token modules in their published layouts, with random weights, and their arithmetic in plain
torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_spec.worker.kv_pool import KVPool
from tests.support import checkpoints
from tests.support.checkpoints import SHAPE
from tests.support.plain_layers import Tensors, block, linear, rms

HIDDEN, INNER, VOCABULARY = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
LAYERS, KV = SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]
DIM = HIDDEN // SHAPE["num_attention_heads"]
PROMPT = "the train to platform 4 leaves at 10:15"


@dataclass(frozen=True)
class Names:
    """A published layout: where the module is, and what its parts are called.

    ``layer``: prefix of the decoder layer. ``copies``: whether the target's embedding and head are
    stored over again, or others of the module's own. ``modules``: how many there are.
    """

    target: dict[str, Any]
    prefix: str
    layer: str
    enorm: str
    hnorm: str
    proj: str
    norm: str
    hidden_first: bool = False
    extra: tuple[str, ...] = ()
    copies: str = ""
    modules: int = 1


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
DEEPSEEK = f"model.layers.{LAYERS}."
DEEPSEEK_PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_PARTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN_PARTS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
LAYOUTS: dict[str, Names] = {
    "DeepSeek's, embedding and head of its own": Names(
        LLAMA, DEEPSEEK, "", *DEEPSEEK_PARTS, copies="own"
    ),
    "DeepSeek's, the target's stored again": Names(
        LLAMA, DEEPSEEK, "", *DEEPSEEK_PARTS, copies="same"
    ),
    "DeepSeek's names, two modules": Names(QWEN2, DEEPSEEK, "", *DEEPSEEK_PARTS, modules=2),
    "MiMo": Names(MIMO, "model.mtp_layers.0.", "", *MIMO_PARTS, hidden_first=True),
    "Qwen3-Next's": Names(QWEN3, "mtp.", "layers.0.", *QWEN_PARTS),
    "Qwen3-Next's names, two layers": Names(QWEN3, "mtp.", "layers.0.", *QWEN_PARTS, modules=2),
}


def shapes(names: Names) -> dict[str, tuple[int, ...]]:
    """Every tensor of the module, without its prefix."""
    dim = names.target.get("head_dim", DIM)
    heads = SHAPE["num_attention_heads"]
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (heads * dim, HIDDEN),
        "self_attn.k_proj.weight": (KV * dim, HIDDEN),
        "self_attn.v_proj.weight": (KV * dim, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, heads * dim),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if names.target["model_type"] == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (KV * dim,) for n in "kv"}
        layer["self_attn.q_proj.bias"] = (heads * dim,)
    if names.target["model_type"] == "qwen3":
        layer |= {f"self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    found = {f"{names.layer}{name}": shape for name, shape in layer.items()}
    found |= {f"{norm}.weight": (HIDDEN,) for norm in (names.enorm, names.hnorm, names.norm)}
    found[f"{names.proj}.weight"] = (HIDDEN, 2 * HIDDEN)
    if names.copies:
        found["embed_tokens.weight"] = found["shared_head.head.weight"] = (VOCABULARY, HIDDEN)
    return found


def write(folder: Path, names: Names, **changes: Any) -> Tensors:
    """A random target with its modules in ``folder``; the first module's tensors, not prefixed."""
    checkpoints.write_target(folder, **names.target, **changes)
    file = folder / "model.safetensors"
    state = load_file(file)
    generator = torch.Generator().manual_seed(3)
    modules: list[Tensors] = []
    for number in range(names.modules):
        module = {}
        for name, shape in shapes(names).items():
            values = torch.randn(shape, generator=generator)
            weight = 1.5 * values / shape[1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * values
            module[name] = weight if not name.endswith(".bias") else 0.3 * values
        if names.copies == "same":
            module["embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            module["shared_head.head.weight"] = state["lm_head.weight"].clone()
        modules.append(module)
        if names.prefix == "mtp.":
            # All share what is outside of their layers.
            here = {n.replace("layers.0.", f"layers.{number}."): x for n, x in module.items()}
            here = here if not number else {n: x for n, x in here.items() if "layers." in n}
            state |= {f"mtp.{n}": x for n, x in here.items()}
        else:
            base, first = names.prefix[:-1].rsplit(".", 1)
            state |= {f"{base}.{int(first) + number}.{n}": x for n, x in module.items()}
    save_file(state, file)
    hf = json.loads((folder / "config.json").read_text())
    hf["num_nextn_predict_layers"] = names.modules
    (folder / "config.json").write_text(json.dumps(hf))
    return modules[0]


def write_module(folder: Path) -> Path:
    """A folder that has a random module alone, as exported: its names count from 0."""
    module = write(folder / "whole", LAYOUTS["DeepSeek's, embedding and head of its own"])
    state = {f"model.layers.0.{name}": x.contiguous() for name, x in module.items()}
    save_file(state, folder / "model.safetensors")
    return folder


def oracle(
    names: Names, weights: Tensors, embeds: Tensor, features: Tensor, positions: Tensor
) -> Tensor:
    """The module's normed output at every token, ``features`` being of the position before."""
    both = [
        rms(embeds, weights[f"{names.enorm}.weight"]),
        rms(features, weights[f"{names.hnorm}.weight"]),
    ]
    x = linear(weights, names.proj, torch.cat(both[::-1] if names.hidden_first else both, -1))
    # The layer's names begin with a dot where there is no prefix.
    layer = names.layer.removesuffix(".")
    named = weights if layer else {f".{name}": value for name, value in weights.items()}
    normed = rms(x, named[f"{layer}.input_layernorm.weight"])
    x = block(named, layer, x, normed, positions, names.target.get("head_dim", DIM))
    return rms(x, weights[f"{names.norm}.weight"])


def run_module(
    module: Any, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A next-token module over a whole text of fewer than 48 tokens, on pages of its own."""
    pool = KVPool(module.config, 16, torch.float32, torch.device("cpu"), 1)
    pool.allocate(4)
    pages, zero = torch.tensor([[1, 2, 3]]), torch.zeros(1, dtype=torch.int64)
    attend = pool.attend(pages, positions[None], zero + 1, positions[None], None)
    out: torch.Tensor = module(embeds, features, positions, attend)
    return out
