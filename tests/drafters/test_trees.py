"""Trees that a model drafts: what is in them, and how large they may be."""

from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.worker.passes import StepTensors
from tests.support.tiers import few

PROMPT = "the train to platform 4 leaves at 10:15"
PROMPTS = [PROMPT, "abcabcabc", "x", "p" * 90]
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,30}"), None, Grammar.regex("(ab|cd){20}")]
ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}
LARGE = {"num_steps": 4, "eagle_topk": 10, "num_draft_tokens": 64}


@torch.no_grad()
@pytest.mark.parametrize("graphs", few((False, True), True))
def test_each_node_is_its_parents_next_best_token(
    tiny: dict[str, Any], reference: Any, graphs: bool
) -> None:
    """The target drafts for itself: what follows each path is asked of `transformers`."""
    settings = {**tiny, "algorithm": "draft_model", "draft": tiny["model"]}
    with Engine(**settings, **LARGE, graphs=graphs, overlap="none") as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        phases = engine.core.worker.phases
        kept: list[Any] = []
        draft = phases.draft

        def keep(step: StepTensors, *arguments: Any) -> None:
            draft(step, *arguments)
            if step.drafted is not None:
                kept.append(step.drafted.tree)

        phases.draft = keep
        output = engine.generate(prompt, None, {"max_tokens": 4, "temperature": 0}, raw=True)
        assert engine.snapshot()["drafter"]["faults"] == 0
    tokens, parents, scores = (
        x[0].tolist() for x in (kept[0].tokens, kept[0].parents, kept[0].scores)
    )
    assert len(tokens) == 64
    paths, born = {0: [*prompt, output.token_ids[0]]}, [0] * len(tokens)
    for node in range(1, len(tokens)):
        parent = parents[node]
        best = reference(torch.tensor([paths[parent]])).logits[0, -1].log_softmax(-1).topk(10)
        assert tokens[node] == best.indices[born[parent]]
        assert scores[node] == pytest.approx(
            scores[parent] + float(best.values[born[parent]]), abs=1e-3
        )
        born[parent] += 1
        paths[node] = [*paths[parent], tokens[node]]


def test_a_tree_may_have_64_nodes(tiny: dict[str, Any]) -> None:
    with Engine(**tiny, context_length=256, algorithm="none", overlap="none") as engine:
        plain = engine.generate(PROMPTS, GRAMMARS, ASKED)
    own = {**tiny, "algorithm": "draft_model", "draft": tiny["model"]}
    with Engine(**own, **LARGE, context_length=256) as engine:
        outputs = engine.generate(PROMPTS, GRAMMARS, ASKED)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    # What the grammar forbids is not drafted; the other requests' trees are full.
    for output, grammar in zip(outputs, GRAMMARS, strict=True):
        full = 63 * output.stats.verifies
        assert output.stats.drafted_tokens == full or grammar is not None
        assert output.stats.drafted_tokens > full / 2 or grammar is not None
