"""Next-token modules in their published names, from random weights, against plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.types import Output
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
    "Qwen3-Next's names": Names(QWEN3, "mtp.", "layers.0.", *QWEN_PARTS),
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


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_published_layout_computes_what_it_should(tmp_path: Path, layout: str) -> None:
    """The state at the root after a prefill in two chunks, the drafts that come from it, and the
    second step, which reads the module's own output."""
    from transformers import AutoModelForCausalLM

    names = LAYOUTS[layout]
    weights = write(tmp_path, names)
    settings = {"model": str(tmp_path), "algorithm": "mtp", "graphs": False, "overlap": "none"}
    with Engine(**settings, grammar_isolated=False, chunked_prefill_size=32) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        output = engine.generate(prompt, None, {"max_tokens": 1, "temperature": 0}, raw=True)
        runner = engine.core.worker.runner
        drafter = runner.drafter
        assert engine.snapshot()["drafter"]["faults"] == 0
        (row,) = drafter.root_state.abs().sum(1).nonzero().flatten().tolist()
        state = drafter.root_state[row : row + 1].clone()
        scores, drafted, *_ = drafter.candidates(state, 4)
        shared = names.copies != "own"
        assert hasattr(drafter.head, "embed_tokens") == (not shared)
        assert hasattr(drafter.head, "head") == (not shared)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([*prompt, *output.token_ids])
    features = reference.model(tokens[None]).last_hidden_state[0]
    table = weights.get("embed_tokens.weight", reference.model.embed_tokens.weight)
    positions = torch.arange(1, len(tokens))
    want = oracle(names, weights, table[tokens[1:]], features[:-1], positions)[-1]
    assert torch.allclose(state[0], want, atol=2e-4, rtol=1e-4)
    head = weights.get("shared_head.head.weight", reference.lm_head.weight)
    best = (want @ head.T).log_softmax(-1).topk(4)
    assert drafted[0].tolist() == best.indices.tolist()
    assert torch.allclose(scores[0], best.values, atol=2e-4)


def ask(folder: Path, **settings: Any) -> tuple[list[Output], int]:
    settings = {"model": str(folder), "grammar_isolated": False, "adaptive": "static", **settings}
    with Engine(**settings) as engine:
        outputs = engine.generate([PROMPT, "abc"], None, {"max_tokens": 40, "temperature": 0})
        return outputs, engine.snapshot().get("drafter", {}).get("faults", 0)


@pytest.mark.parametrize("tree", [{}, {"eagle_topk": 3, "num_draft_tokens": 12}])
@pytest.mark.parametrize("layout", ["DeepSeek's, embedding and head of its own", "MiMo"])
def test_a_module_changes_no_text(tmp_path: Path, layout: str, tree: dict[str, Any]) -> None:
    write(tmp_path, LAYOUTS[layout])
    plain, _ = ask(tmp_path, algorithm="none", overlap="none")
    outputs, faults = ask(tmp_path, algorithm="mtp", **tree)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert faults == 0
    assert all(output.stats.drafted_tokens for output in outputs)


@torch.no_grad()
def test_a_chain_reads_the_modules_own_output(tmp_path: Path) -> None:
    """Drafts of four steps are the oracle's, which runs over the whole text every time."""
    from transformers import AutoModelForCausalLM

    names = LAYOUTS["MiMo"]
    weights = write(tmp_path, names)
    settings = {"model": str(tmp_path), "algorithm": "mtp", "graphs": False, "overlap": "none"}
    with Engine(**settings, grammar_isolated=False, adaptive="static", num_steps=4) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        drafts: list[list[int]] = []
        drafter = engine.core.worker.runner.drafter
        draft = drafter.draft

        def kept(*arguments: Any) -> Any:
            result = draft(*arguments)
            drafts.append(result.tokens[0].tolist())
            return result

        drafter.draft = kept
        output = engine.generate(prompt, None, {"max_tokens": 12, "temperature": 0}, raw=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    table, head = reference.model.embed_tokens.weight, reference.lm_head.weight
    tokens = torch.tensor([*prompt, *output.token_ids[:1]])
    features = reference.model(tokens[None]).last_hidden_state[0][:-1]
    want: list[int] = []
    for _ in range(4):
        positions = torch.arange(1, len(tokens))
        state = oracle(names, weights, table[tokens[1:]], features, positions)[-1]
        want.append(int((head @ state).argmax()))
        tokens = torch.cat([tokens, torch.tensor(want[-1:])])
        features = torch.cat([features, state[None]])
    assert drafts[0] == want


def test_a_module_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_module(tmp_path)
    checkpoints.write_target(tmp_path / "target")
    inside, _ = ask(tmp_path / "whole", algorithm="mtp")
    beside, _ = ask(tmp_path / "target", algorithm="mtp", draft=str(tmp_path))
    assert [o.token_ids for o in beside] == [o.token_ids for o in inside]
    assert [o.stats.verifies for o in beside] == [o.stats.verifies for o in inside]


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    checkpoints.write_target(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="has no next-token module"):
        Engine(model=str(tmp_path / "bare"), algorithm="mtp")
    write(tmp_path / "target", LAYOUTS["MiMo"])
    file = tmp_path / "target" / "model.safetensors"
    state = load_file(file)
    gone = state.pop("model.mtp_layers.0.final_layernorm.weight")
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"missing weights: norm\.weight"):
        Engine(model=str(tmp_path / "target"), algorithm="mtp")
    state["model.mtp_layers.0.final_layernorm.weight"] = gone
    state["model.mtp_layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(4, 4)
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"no layer takes: .*mtp_layers.0.mlp.experts"):
        Engine(model=str(tmp_path / "target"), algorithm="mtp")
    # Without the drafter the module is left alone, but a layer too many is not.
    Engine(model=str(tmp_path / "target"), algorithm="none").close()
    state[f"model.layers.{LAYERS}.mlp.up_proj.weight"] = torch.zeros(4, 4)
    save_file(state, file)
    with pytest.raises(CheckpointError, match="no layer takes"):
        Engine(model=str(tmp_path / "target"), algorithm="none")
