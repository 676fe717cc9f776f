"""A matcher that accepted drafts and rolled them back equals one that never did."""

from __future__ import annotations

import random

import numpy as np
import pytest

from overlap_spec.config import EMBEDDED
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.backends import load
from overlap_spec.tokenizer import Tokenizer
from tests.support.grammars import legal, row_of

SCHEMA = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "properties": {
                "name": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "inner": {"$ref": "#/$defs/node"},
            },
            "type": "object",
            "additionalProperties": True,
        }
    },
}
TEXT = '{"name":"a b","tags":["x","yy"],"inner":{"inner":{"named":{"tag":[1.5,null]}}}}'
pytestmark = pytest.mark.skipif(
    not (EMBEDDED / "target" / "tokenizer.json").exists(), reason="no embedded tokenizer"
)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar", "auto"])
def test_excursions_leave_no_trace(name: str) -> None:
    """By rollbacks of one and of all, and by trees, from every position of a text."""
    tokenizer = Tokenizer(EMBEDDED / "target", 2048)
    compiled = load(name)(tokenizer.vocabulary).compile(Grammar.json_schema(SCHEMA))
    for seed in range(12):
        rng = random.Random(seed)
        wanderer, straight = compiled.matcher(), compiled.matcher()
        for token in tokenizer.encode(TEXT):
            tried: list[int] = []
            for _ in range(rng.randint(1, 6)):
                tried.append(rng.choice(legal(wanderer)))
                assert wanderer.accept(tried[-1])
                if wanderer.is_terminated:
                    break
            for count in [len(tried)] if seed % 2 else [1] * len(tried):
                wanderer.rollback(count)
            nodes = len(tried) + 1
            chain = np.array([*range(1, nodes), -1], np.int64)
            rows = np.zeros((nodes, wanderer.vocabulary.words), np.int32)
            none = np.full(nodes, -1, np.int64)
            wanderer.fill_tree(np.array([0, *tried], np.int64), chain, none, rows)
            assert np.array_equal(rows[0], row_of(straight))
            assert np.array_equal(row_of(wanderer), row_of(straight))
            assert wanderer.accept(token)
            assert straight.accept(token)
