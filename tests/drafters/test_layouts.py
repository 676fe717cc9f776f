"""Draft heads in their published layouts, from random weights, against plain torch.

The target's features are those of `transformers`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from tests.support.checkpoints import SHAPE, rewrite
from tests.support.layouts import HIDDEN, LAYOUTS, PROMPT, VOCABULARY, oracle, write
from tests.support.plain_layers import rms
from tests.support.tiers import few


@pytest.mark.parametrize("name", few(LAYOUTS, *list(LAYOUTS)[::7]))
@torch.no_grad()
def test_a_published_layout_computes_what_it_should(
    tiny: dict[str, Any], reference: Any, tmp_path: Path, name: str
) -> None:
    """The state at the root after a prefill in two chunks, and the drafts that come from it."""
    layout = LAYOUTS[name]
    weights = write(tmp_path / "head", layout)
    settings = {"algorithm": layout.algorithm, "draft": str(tmp_path / "head"), "graphs": False}
    with Engine(**{**tiny, **settings}, overlap="none", chunked_prefill_size=32) as engine:
        # The first token's root: of what follows nothing is taken in.
        prompt = engine.tokenizer.encode(PROMPT)
        output = engine.generate(PROMPT, None, {"max_tokens": 1, "temperature": 0}, raw=True)
        drafter = engine.core.worker.runner.drafter
        assert engine.snapshot()["drafter"]["faults"] == 0
        # The last row is that of padding.
        (row,) = drafter.root_state[:-1].abs().sum(1).nonzero().flatten().tolist()
        state = drafter.root_state[row : row + 1]
        scores, drafted, *_ = drafter.candidates(state, 4, None, None)

    tokens = torch.tensor([*prompt, *output.token_ids])
    kept = reference(tokens[None], output_hidden_states=True)
    if layout.algorithm == "eagle":
        features = reference.model(tokens[None]).last_hidden_state[0]
    else:
        inputs = list(kept.hidden_states[:-1])
        # The last layer's output before the final norm.
        held: list[Tensor] = []
        handle = reference.model.norm.register_forward_pre_hook(lambda _, x: held.append(x[0]))
        reference(tokens[None])
        handle.remove()
        features = torch.cat([[*inputs, held[0]][i][0] for i in layout.features], -1)
    table = weights.get("embed_tokens.weight", reference.model.embed_tokens.weight)
    positions = torch.arange(1, len(tokens))
    want = oracle(layout, weights, table[tokens[1:]], features[:-1], positions)[-1]
    assert torch.allclose(state[0], want, atol=2e-4, rtol=1e-4)

    if layout.algorithm == "eagle":
        logits = reference.lm_head(want)
        ids = torch.arange(VOCABULARY)
    else:
        normed = want if layout.norm_output else rms(want, weights["norm.weight"])
        logits = normed @ weights.get("lm_head.weight", reference.lm_head.weight).T
        ids = torch.arange(layout.vocabulary)
        ids = ids + weights["d2t"] if "d2t" in weights else ids
    best = logits.log_softmax(-1).topk(4)
    assert drafted[0].tolist() == ids[best.indices].tolist()
    assert torch.allclose(scores[0], best.values, atol=2e-4)


def no_map(folder: Path) -> None:
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del state["d2t"]
    torch.save(state, folder / "pytorch_model.bin")


def no_file(folder: Path) -> None:
    (folder / "pytorch_model.bin").unlink()


def broken(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"no archive")


def code(folder: Path) -> None:
    """What would run code when it is read."""
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")


def numbers(folder: Path) -> None:
    torch.save({"fc.weight": 3}, folder / "pytorch_model.bin")


def two_norms(folder: Path) -> None:
    """A later layer with both of the names of its first norm."""
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for name in ("hidden_norm", "input_layernorm"):
        state[f"layers.1.{name}.weight"] = torch.ones(HIDDEN)
    torch.save(state, folder / "pytorch_model.bin")


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", **fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_map, "missing weights: d2t"),
        (no_file, "neither model.safetensors nor pytorch_model.bin"),
        (broken, "cannot be read"),
        (code, "cannot be read"),
        (numbers, "something else than tensors"),
        (changed(fc_norm=True), "missing weights: fc_norm.0.weight"),
        (changed(norm_before_fc=True), "missing weights: input_norm.weight"),
        (changed(num_hidden_layers=2), "missing weights: layers.1.input_layernorm.weight"),
        (changed(eagle_aux_hidden_state_layer_ids=[0, 0, 1]), "must be distinct"),
        (changed(model_type="llama4_text"), "no 'intermediate_size_mlp'"),
        (two_norms, "twice, under two of their names"),
        (changed(architectures=["Eagle4"]), "'Eagle4' is no EAGLE-3 head"),
        (
            changed(architectures=["Eagle3Speculator"], transformer_layer_config=SHAPE),
            "no 'norm_before_residual'",
        ),
    ],
)
def test_what_does_not_load_is_named(
    tiny: dict[str, Any], tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    write(tmp_path / "head", LAYOUTS["EAGLE-3, pytorch_model.bin"])
    change(tmp_path / "head")
    with pytest.raises(CheckpointError, match=said):
        Engine(**{**tiny, "draft": str(tmp_path / "head")}, algorithm="eagle3")


def test_an_eagle_head_needs_the_targets_sizes(tiny: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "head"
    write(folder, LAYOUTS["EAGLE-1/2, SGLang's name"])
    for name, said in (("hidden_size", "has hidden_size 64"), ("vocab_size", "vocab_size 64")):
        kept = (folder / "config.json").read_text()
        changed(**{name: 64})(folder)
        with pytest.raises(CheckpointError, match=said):
            Engine(**{**tiny, "draft": str(folder)}, algorithm="eagle")
        (folder / "config.json").write_text(kept)
