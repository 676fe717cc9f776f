"""A wait for a core is no cost of the grammar's."""

import time
from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import SamplingParams
from overlap_spec.worker.in_flight import InFlightStep
from tests.support.tiers import few

WAIT_S = 0.02
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, complete=False)


@pytest.mark.clock
@pytest.mark.parametrize("overlap", few(("once-sync", "double-sync", "none"), "once-sync"))
def test_masks_that_wait_for_a_core_expose_no_more_than_the_grammar_took(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """As where all cores are taken when the lane is done: nothing runs for 20 ms."""
    upload = InFlightStep.upload_masks

    def late(*args: Any) -> Any:
        time.sleep(WAIT_S)
        return upload(*args)

    monkeypatch.setattr(InFlightStep, "upload_masks", late)
    with Engine(**tiny, overlap=overlap, context_length=128) as engine:
        output = engine.generate("a", Grammar.regex("[a-z]{30}"), GREEDY)
        figures, timeline = engine.figures, engine.timeline
        spans = [s for s in timeline.spans() if s.name == "exposed"]
    assert output.stats.verifies >= 3
    assert figures.grammar_ms > 0
    if overlap != "none":
        # The serial mode also counts what its accepts wait for.
        assert figures.exposed_ms <= figures.grammar_ms + 0.01
    assert figures.idle_ms >= WAIT_S * 1e3 * (output.stats.verifies - 1)
    assert spans
    assert sum(span.end_ns - span.start_ns for span in spans) / 1e6 <= figures.grammar_ms + 0.01
