"""An optional part of one's own is asked for by its place, and tells what it found."""

from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.errors import InvalidRequest

OWN = "tests.support.own_parts:StepTokens"


def test_it_tells_what_it_found(tiny: dict[str, Any]) -> None:
    with Engine(**tiny, num_steps=3, context_length=96) as engine:
        asked = {"max_tokens": 20, "temperature": 0}
        plain = engine.generate("abc", None, asked)
        told, other = engine.generate(["abc"] * 2, None, [{**asked, "parts": [OWN]}, asked])
        for wrong in ("nowhere:Part", "tests.support.own_parts:Row", "tests.support.own_parts:No"):
            with pytest.raises(InvalidRequest, match=f"parts: '{wrong}'"):
                engine.generate("abc", None, asked, parts=[wrong])
    assert told.token_ids == other.token_ids == plain.token_ids
    steps = told.told[OWN]
    assert sum(kept for _, kept in steps) == len(told.token_ids)
    assert len(steps) == 1 + told.stats.verifies
    assert all(kept <= brought for brought, kept in steps)
    assert other.told == {}
