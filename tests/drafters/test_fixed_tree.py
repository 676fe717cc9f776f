"""Trees of a fixed shape, from a file: what is drafted in them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.speculation.tree_file import MOST_NODES, read_tree
from overlap_spec.tiers import Tier
from overlap_spec.worker.passes import StepTensors
from tests.support.tiers import few

PROMPT = "the train to platform 4 leaves at 10:15"
PROMPTS = [PROMPT, "abcabcabc", "x", "p" * 90]
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,30}"), None, Grammar.regex("(ab|cd){20}")]
ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}
# Ten children, inner nodes at three depths, parents not in the order of depths.
PARENTS = [0, 1, 0, 2, 0, 0, 0, 0, 1, 3, 0, 0, 4, 4, 0, 0, 9, 3]
CHOICES = [[0], [0, 0], [1], [0, 1], [2], [1, 0], [0, 0, 0], [0, 2], [0, 0, 1]]
LARGE = [(n - 1) // 3 for n in range(1, MOST_NODES)]


def write(folder: Path, data: Any) -> str:
    file = folder / "tree.json"
    file.write_text(json.dumps(data))
    return str(file)


def test_both_spellings(tmp_path: Path) -> None:
    assert read_tree(Path(write(tmp_path, [0, 0, 1]))) == Tier(2, 2, 4, (0, 0, 1))
    want = Tier(3, 3, 10, (0, 0, 0, 1, 1, 1, 2, 4, 4))
    assert read_tree(Path(write(tmp_path, CHOICES))) == want
    # A chain is a chain.
    assert read_tree(Path(write(tmp_path, [0, 1, 2]))) == Tier(3, 1, 4)
    assert read_tree(Path(write(tmp_path, [[0], [0, 0]]))) == Tier(2, 1, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"parents": [0]}, "must be an array"),
        ([], "must be an array"),
        ([0, 2], r"parents\[1\] is 2; node 2's parent must be an earlier node, 0 to 1"),
        ([-1, 0], r"parents\[0\] is -1"),
        ([0, "1"], r"parents\[1\] is '1'"),
        ([0, True], r"parents\[1\] is True"),
        ([0] * 11, "node 0 has 11 children; at most 10"),
        ([0, *range(MOST_NODES - 1)], "64 nodes; at most 63 after the root"),
        ([[0], []], r"choices\[1\] is \[\]; a path of ranks"),
        ([[0], 1], r"choices\[1\] is 1; a path of ranks"),
        ([[0], [0, -1]], r"choices\[1\] is \[0, -1\]; a path of ranks"),
        ([[0], [1, 0]], r"choices\[1\] is \[1, 0\], whose parent \[1\] is not there"),
        ([[0], [2]], r"choices\[1\] is \[2\], and \[1\], which is likelier, is not there"),
        ([[0], [0]], "a second time"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tree(Path(write(tmp_path, data)))


def test_a_file_that_cannot_be_read_is_named(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[0, ")
    for name in ("tree.json", "absent.json"):
        with pytest.raises(ConfigError, match=rf"{name}' cannot be read"):
            Engine(**tiny, tree=str(tmp_path / name), adaptive="static")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "adaptive must be 'static' beside it, not 'auto'"),
        ({"adaptive": "static", "num_steps": 3}, "num_steps: the tree's file says it"),
        ({"adaptive": "static", "eagle_topk": 3}, "eagle_topk: the tree's file says it"),
        ({"adaptive": "static", "num_draft_tokens": 8}, "num_draft_tokens: the tree's file"),
        ({"adaptive": "static", "algorithm": "ngram"}, "'ngram' have the shape"),
        ({"adaptive": "static", "algorithm": "none"}, "nothing is drafted"),
    ],
)
def test_what_cannot_stand_beside_a_tree(
    tiny: dict[str, Any], tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(**{**tiny, **settings}, tree=write(tmp_path, PARENTS))


@torch.no_grad()
@pytest.mark.parametrize("graphs", few((False, True), True))
@pytest.mark.parametrize("data", few((PARENTS, CHOICES, LARGE), CHOICES))
def test_each_node_is_its_parents_next_best_token(
    tiny: dict[str, Any], tmp_path: Path, data: Any, graphs: bool
) -> None:
    """The target drafts for itself: what follows each path is asked of `transformers`."""
    from transformers import AutoModelForCausalLM

    tree = write(tmp_path, data)
    settings = {**tiny, "algorithm": "draft_model", "draft": tiny["model"], "adaptive": "static"}
    with Engine(**settings, tree=tree, graphs=graphs, overlap="none") as engine:
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
    tier = read_tree(Path(tree))
    assert tier.parents is not None
    tokens, parents, scores = (
        x[0].tolist() for x in (kept[0].tokens, kept[0].parents, kept[0].scores)
    )
    assert parents[1:] == list(tier.parents)
    reference = AutoModelForCausalLM.from_pretrained(tiny["model"], dtype=torch.float32).eval()
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


def test_a_dynamic_tree_may_be_as_large(tiny: dict[str, Any]) -> None:
    """64 nodes from 10 branches, of the shape that their scores give."""
    with Engine(**tiny, context_length=256, algorithm="none", overlap="none") as engine:
        plain = engine.generate(PROMPTS, GRAMMARS, ASKED)
    shape = {"num_steps": 4, "eagle_topk": 10, "num_draft_tokens": 64}
    own = {**tiny, "algorithm": "draft_model", "draft": tiny["model"], "adaptive": "static"}
    with Engine(**own, **shape, context_length=256) as engine:
        outputs = engine.generate(PROMPTS, GRAMMARS, ASKED)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    # What the grammar forbids is not drafted; the other requests' trees are full.
    for output, grammar in zip(outputs, GRAMMARS, strict=True):
        full = 63 * output.stats.verifies
        assert output.stats.drafted_tokens == full or grammar is not None
        assert output.stats.drafted_tokens > full / 2 or grammar is not None
