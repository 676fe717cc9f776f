"""A batch of requests of many kinds, and what each of its steps came to."""

from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import StepResult
from overlap_spec.types import Output
from overlap_spec.worker.worker import Worker
from tests.support import chaos

BATCH = 16
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,9}"), *chaos.GRAMMARS[3:], None] * 4
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.9, "seed": 3, "max_tokens": 24, "logprobs": 2},
    {"temperature": 0, "max_tokens": 24, "presence_penalty": 1.0, "min_tokens": 3},
    {"temperature": 0, "max_tokens": 24, "logit_bias": {65: 2.0}},
]


def answer(engine: Engine, sampling: list[Any]) -> list[Output]:
    prompts = [f"prompt number {n * 37}" for n in range(BATCH)]
    return engine.generate(prompts, GRAMMARS[:BATCH], sampling)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[StepResult]:
    """Every step's result."""
    seen: list[StepResult] = []
    read = Worker.results

    def noted(*args: Any) -> StepResult:
        seen.append(read(*args))
        return seen[-1]

    monkeypatch.setattr(Worker, "results", noted)
    return seen
