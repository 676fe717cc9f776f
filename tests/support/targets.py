"""What targets are asked that keep something else than keys and values of each token."""

from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Output
from tests.support import chaos
from tests.support.policies import share_nodes

COMMON: dict[str, Any] = {"dtype": "float32", "grammar_isolated": False, "adaptive": "static"}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 4},
    "tree": {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12},
    "ragged": {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12},
}
CUT = {"max_tokens": 32, "complete": False}
BATCH: list[tuple[Any, dict[str, Any]]] = [
    (None, {"temperature": 0, **CUT}),
    (None, {"temperature": 0.9, "seed": 11, "top_p": 0.95, **CUT}),
    (Grammar.json_schema(chaos.PERSON), {"temperature": 0, **CUT}),
    (Grammar.regex(r"([a-f]{3}-\d{1,4}){9}"), {"temperature": 0.9, "seed": 3, **CUT}),
]
PROMPTS = [f"abcabc {n} abcabc " * (1 + n % 3) for n in range(len(BATCH))]


def texts(*lengths: int) -> list[list[int]]:
    """Prompts that start alike."""
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 256, (max(lengths),), generator=draw).tolist()
    return [shared[: n - n // 4] + [7] * (n // 4) for n in lengths]


def generate(engine: Engine, prompts: list[list[int]], tokens: int = 16) -> list[Output]:
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return engine.generate(prompts, sampling=sampling)


def ask(engine: Engine, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(engine, prompts, tokens)]


def answer(settings: dict[str, Any]) -> list[Output]:
    """Plain decoding's answers to the batch, in the serial mode."""
    with Engine(**{**settings, **COMMON, "algorithm": "none", "overlap": "none"}) as engine:
        return _answer(engine)


def hold_drafts(
    settings: dict[str, Any], shape: str, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> list[Output]:
    """Drafts of a shape were made, and changed nothing of the plain answers; the outputs."""
    with Engine(**{**settings, **COMMON, **SHAPES[shape]}) as engine:
        if shape == "ragged":
            share_nodes(monkeypatch, engine, lambda batch, _: 5 * batch)
        outputs = _answer(engine)
        assert engine.snapshot()["drafter"]["faults"] == 0
        assert engine.core.scheduler.allocator.in_use == 0
    for mine, its in zip(outputs, plain, strict=True):
        assert (mine.text, mine.token_ids, mine.error) == (its.text, its.token_ids, None)
    assert sum(output.stats.drafted_tokens for output in outputs) > 0
    return outputs


def _answer(engine: Engine) -> list[Output]:
    return engine.generate(PROMPTS, [g for g, _ in BATCH], [s for _, s in BATCH])
