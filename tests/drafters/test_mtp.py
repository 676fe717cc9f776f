"""Next-token modules in their published names, from random weights, against plain torch.

They are DeepSeek's, Qwen's and those of `MiMoForCausalLM`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.types import Output
from tests.support import checkpoints
from tests.support.mtp import LAYERS, LAYOUTS, PROMPT, oracle, write, write_module
from tests.support.tiers import few


@pytest.mark.parametrize("layout", few(LAYOUTS, *list(LAYOUTS)[::3]))
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
        # The last row is that of padding.
        (row,) = drafter.root_state[:-1].abs().sum(1).nonzero().flatten().tolist()
        state = drafter.root_state[row : row + 1].clone()
        scores, drafted, *_ = drafter.candidates(state, 4, None, None)
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


@pytest.mark.ci
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
