"""Requests whose grammar forces whole runs of tokens."""

from typing import Any

import torch

from overlap_spec.drafters.base import Roots
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import RUN_TOKENS
from overlap_spec.types import Output

PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "street_address": {"type": "string", "maxLength": 9},
            "identification": {"type": "integer", "minimum": 0, "maximum": 99},
            "subscriptions": {"enum": ["north-west", "south-east"]},
        },
        "required": ["street_address", "identification", "subscriptions"],
        "additionalProperties": False,
    }
)
PROMPTS = ["Who is it?", "abc", "A north-west flat, number 7"]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 4},
    "tree": {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12},
}
SAMPLING = {"max_tokens": 96, "temperature": 0}


def answer(engine: Engine, **sampling: Any) -> list[Output]:
    return engine.generate(PROMPTS, PERSON, {**SAMPLING, **sampling})


def key(outputs: list[Output]) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.finish_reason, o.error) for o in outputs]


def lengths(outputs: list[Output]) -> list[tuple[int, ...]]:
    return [
        (o.stats.verifies, o.stats.accepted_grafts, o.stats.grafted_tokens, o.stats.illegal_drafts)
        for o in outputs
    ]


def roots_of(forced: list[list[int]]) -> Roots:
    """Roots behind each of which so much is forced."""
    none = torch.zeros(len(forced), dtype=torch.int64)
    rows = torch.full((len(forced), RUN_TOKENS - 1), -1)
    for row, run in zip(rows, forced, strict=True):
        row[: len(run)] = torch.tensor(run)
    return Roots(none, none[:, None], none, none, rows)
