"""Engines of several ranks: their processes, and their text beside that of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import SamplingParams
from tests.support import chaos


def ended(pids: list[int]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def pids(engine: Engine) -> list[int]:
    found: list[int] = engine.snapshot()["rank_pids"]
    return found


def mixed() -> list[chaos.Ask]:
    """Long enough to pre-empt each other in a small cache; one is aborted."""
    common: dict[str, Any] = {"max_tokens": 40, "seed": 3, "complete": False}
    greedy = SamplingParams(temperature=0.0, **common)
    warm = SamplingParams(temperature=0.8, top_p=0.9, **common)
    choosy = SamplingParams(
        temperature=0.8, presence_penalty=1.0, logit_bias={97: 2.0}, logprobs=2, **common
    )
    text = "abc xyz 0123 abc xyz 0123 abc"
    return [
        chaos.Ask(text, None, greedy, None),
        chaos.Ask(text[3:], None, warm, None),
        chaos.Ask("name", Grammar.json_schema(chaos.PERSON), warm, None),
        chaos.Ask("pick", Grammar.choice(["alpha", "beta", "alphabet"]), greedy, None),
        chaos.Ask(text[5:], None, choosy, None),
        chaos.Ask(text[7:], Grammar.regex("[a-f]{30}"), choosy, 5),
    ]


def equal(oracle: Engine, engine: Engine, asks: list[chaos.Ask]) -> None:
    wanted = chaos.run(oracle, [replace(ask, abort_step=None) for ask in asks])
    for ask, want, got in zip(asks, wanted, chaos.run(engine, asks), strict=True):
        if got.finish_reason == "abort":
            assert want.token_ids[: len(got.token_ids)] == got.token_ids, ask
            continue
        assert (got.token_ids, got.text) == (want.token_ids, want.text), ask
        assert got.finish_reason == want.finish_reason, ask
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
