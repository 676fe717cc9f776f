"""DFlash's drafts: a block of masks over what its layers make of the target's features."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec.drafters.dflash import DFlashDrafter
from overlap_spec.drafters.registry import drafter_of_folder
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.grammar.spec import Grammar
from tests.support import layouts
from tests.support.checkpoints import rewrite
from tests.support.dflash import LAYOUTS, MASK, oracle, write
from tests.support.layouts import PROMPT
from tests.support.seen import Seen
from tests.support.tiers import few

STEPS = 4
TREE = {"eagle_topk": 3, "num_draft_tokens": 10}


def settings_of(tiny: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    ours = {"algorithm": "dflash", "draft": str(folder)}
    return {**tiny, **ours, "num_steps": STEPS, **others}


@pytest.mark.parametrize("name", few(LAYOUTS, "z-lab, sliding windows"))
@torch.no_grad()
def test_a_block_is_one_pass_over_the_targets_features(
    tiny: dict[str, Any], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At every root, behind a prompt in chunks or in pages that another request left, behind
    tokens that were refused and several that were accepted at once: plain torch."""
    layout = LAYOUTS[name]
    weights = write(tmp_path / "head", layout)
    assert drafter_of_folder(tmp_path / "head") == "dflash"
    seen = Seen(monkeypatch, DFlashDrafter)
    settings = settings_of(tiny, tmp_path / "head", graphs=False, overlap="none")
    table = weights.get("embed_tokens.weight", reference.model.embed_tokens.weight)
    head = weights.get("lm_head.weight", reference.lm_head.weight)
    grammars = None, Grammar.regex("abcdefgh[0-9]{3}xyz"), None
    with Engine(**settings, chunked_prefill_size=32) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        drafter = engine.core.worker.runner.drafter
        ids = drafter.head.d2t + torch.arange(len(drafter.head.d2t))
        for number, grammar in enumerate(grammars):
            seen.states.clear(), seen.drafts.clear()
            asked = {"max_tokens": 14, "temperature": 0}
            output = engine.generate(PROMPT, grammar, asked, raw=True)
            assert engine.snapshot()["drafter"]["faults"] == 0
            assert (output.stats.cached_tokens > 0) == (number > 0)
            assert (output.stats.accepted_drafts > 5) == (grammar is not None)
            tokens = torch.tensor([*prompt, *output.token_ids])
            states = reference(tokens[None], output_hidden_states=True).hidden_states
            features = torch.cat([states[i][0] for i in layout.features], -1)
            checked = 0
            for (roots, draft), found in zip(seen.drafts, seen.states, strict=True):
                root = int(roots.positions[0])
                if not len(prompt) <= root < len(tokens):
                    continue
                block = torch.tensor([int(tokens[root]), *[MASK] * STEPS])
                want = oracle(layout, weights, features[:root], table[block])[1:]
                normed = drafter.head.normed(found[0])
                assert torch.allclose(normed, want, atol=5e-4, rtol=1e-3)
                checked += 1
                if grammar is None:
                    same_draft(draft, want @ head.T, ids)
            assert checked >= 2


def same_draft(draft: Any, logits: Tensor, ids: Tensor) -> None:
    best = logits.log_softmax(-1).max(-1)
    assert draft.tokens[0].tolist() == ids[best.indices].tolist()
    assert torch.allclose(draft.scores[0], best.values.cumsum(0), atol=1e-3)


@pytest.mark.parametrize("shape", few([{}, TREE], TREE))
def test_recorded_passes_draft_the_same(
    tiny: dict[str, Any], tmp_path: Path, shape: dict[str, Any]
) -> None:
    """As many drafts of a few legal tokens are accepted, by five requests in one batch."""
    write(tmp_path / "head", LAYOUTS["z-lab, sliding windows"])
    asked = {"max_tokens": 60, "temperature": 0}
    grammar, accepted = Grammar.regex("[abc]{40,60}"), []
    for graphs in (False, True):
        settings = settings_of(tiny, tmp_path / "head", graphs=graphs, **shape)
        with Engine(**settings) as engine:
            outputs = engine.generate([PROMPT + "!" * n for n in range(5)], [grammar] * 5, asked)
            assert engine.snapshot()["drafter"]["faults"] == 0
        accepted.append([output.stats.accepted_drafts for output in outputs])
    assert accepted[0] == accepted[1]
    assert min(accepted[0]) > 5


@pytest.mark.parametrize("algorithm", few(["dflash", "parallel"], "dflash"))
def test_what_a_grammar_forbids_is_not_drafted(
    tiny: dict[str, Any], tmp_path: Path, algorithm: str
) -> None:
    """By either kind that tells all depths at once."""
    folder = tmp_path / "head"
    if algorithm == "dflash":
        write(folder, LAYOUTS["z-lab"])
    else:
        layouts.write(folder, layouts.LAYOUTS["P-EAGLE, ptd_token_id"])
    asked = {"max_tokens": 60, "temperature": 0}
    grammar = Grammar.regex(r"([a-f]{3}-\d{1,4}){9}")
    for shape in ({}, TREE):
        with Engine(**settings_of(tiny, folder, algorithm=algorithm, **shape)) as engine:
            output = engine.generate(PROMPT, grammar, asked)
            assert output.stats.drafted_tokens > 20
            assert output.stats.illegal_drafts == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is no DFlash draft model"),
        ({"dflash_config": {"mask_token_id": MASK}}, "no 'target_layer_ids'"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "no 'mask_token_id'"),
        ({"mask_token_id": 1000, "dflash_config": {"target_layer_ids": [0, 1]}}, "token 1000 is"),
        ({"output_multiplier": 0.2}, "output_multiplier 0.2 in config.json is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor True in config.json is not supported"),
        ({"num_hidden_layers": 3}, "missing weights: layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "no layer takes: layers.1.input_layernorm.weight"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]}},
            r"feature layers \[2, 4\] of the draft head must be distinct inputs",
        ),
    ],
)
def test_what_does_not_load_is_named(
    tiny: dict[str, Any], tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    write(tmp_path / "head", LAYOUTS["z-lab"])
    rewrite(tmp_path / "head" / "config.json", **fields)
    with pytest.raises(CheckpointError, match=said):
        Engine(**settings_of(tiny, tmp_path / "head"))


def test_deeper_drafts_than_a_block_are_told(
    tiny: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "head", LAYOUTS["z-lab"])
    for steps in (7, 8):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            Engine(**settings_of(tiny, tmp_path / "head", num_steps=steps)) as engine,
        ):
            engine.generate(PROMPT, None, {"max_tokens": 4, "temperature": 0})
        assert ("has learnt to draft 7 deep" in caplog.text) == (steps == 8)
