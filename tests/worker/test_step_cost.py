"""What a step makes anew. What it does, ``bench.counts`` counts."""

from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar

SCHEMA = Grammar.regex(r"[a-f]{3}-\d{40}")


def test_a_step_makes_no_events(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to the buffers, which are made for the first two steps of a tier."""
    with Engine(**tiny, num_steps=3) as engine:
        engine.generate("abc", SCHEMA, {"max_tokens": 30, "complete": False})
        streams = engine.core.worker.streams

        def no_more() -> Any:
            raise AssertionError("an event was made")

        monkeypatch.setattr(streams, "event", no_more)
        output = engine.generate("abc", SCHEMA, {"max_tokens": 30, "complete": False})
        assert output.error is None
