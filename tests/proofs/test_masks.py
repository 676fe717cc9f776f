"""Mask rows go up for the nodes that a grammar reads, and for no others; whoever sends more is
seen."""

from typing import Any

import pytest

from overlap_spec.grammar.spec import Grammar
from overlap_spec.worker.passes import StepTensors
from overlap_spec.worker.phases import Phases
from tests.support import chaos

GRAMMARS = [
    Grammar.regex(r"[a-f]{3}-\d{1,9}"),
    None,
    Grammar.choice(["alpha", "beta", "alphabet", "gamma rays"]),
    Grammar.regex("(the forced text of a grammar, (one|two)){1,3}"),
    None,
]
# Of the rows that all nodes of all trees would have: of 32 a tree grammars read a few.
BUDGET = 0.25


def reached(links: Any) -> int:
    """Nodes of a tree that its root's links lead to, the root included."""
    _, children, siblings = links.tolist()
    found, left = 0, [0]
    while left:
        node = left.pop()
        found += 1
        left += [n for n in (children[node], siblings[node] if node else -1) if n >= 0]
    return found


def uploaded(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Bytes of mask rows of each step; those that its living nodes need; those of all nodes."""
    steps: list[tuple[int, int, int]] = []
    accept = Phases.accept

    def noted(phases: Phases, step: StepTensors) -> None:
        plan, trees, drafted, grammar = (
            step.batch.plan,
            step.batch.trees,
            step.drafted,
            step.grammar,
        )
        if grammar is not None:
            told = [has_one for _, _, has_one in plan.verified]
            need = sum(reached(drafted.links[:, n]) for n in range(trees) if told[n])
            need += sum(told[trees:])
            rows = grammar.masks.rows
            every = trees * plan.tier.nodes + len(plan.final_chunks)
            steps.append((rows.nbytes, need * rows[0].nbytes, every * rows[0].nbytes))
        accept(phases, step)

    monkeypatch.setattr(Phases, "accept", noted)
    fixed = {"adaptive": "static", "num_steps": 5, "tries": True, "max_running_requests": 5}
    asked = {"temperature": 0.0, "max_tokens": 40}
    with chaos.build(tiny, **fixed, graphs=False, mask_deadline_ms=None) as engine:
        for number in range(2):
            engine.generate(["abc" * 5 + str(number)] * len(GRAMMARS), GRAMMARS, asked)
    assert any(every > 5 * 32 * 4 for _, _, every in steps)
    return steps


def test_no_mask_row_goes_up_that_no_grammar_reads(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = uploaded(tiny, monkeypatch)
    assert all(sent == need for sent, need, _ in steps)
    assert sum(sent for sent, _, _ in steps) < BUDGET * sum(every for _, _, every in steps)
