"""What a replayed step asks of the host, counted: it cannot creep up unseen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.worker.graphs import TracedGraph
from overlap_spec.worker.stepwise import ChainDraft

SCHEMA = Grammar.regex(r"[a-f]{3}-\d{40}")
# Views and numpy's way in and out do no work; what is left computes, copies or allocates.
FREE = ("view", "slice", "detach", "alias", "resolve_", "lift_fresh", "split", "expand", "select")
REPLAYS = 4


class Counting(TorchDispatchMode):
    """Counts the operations that a step's own code calls, and replays as one each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def work(self) -> int:
        """Operations that are not free."""
        return sum(n for name, n in self.counts.items() if not name.startswith((*FREE, "replay")))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    mode = Counting()
    replay = TracedGraph.__call__

    def counted(graph: TracedGraph, *inputs: Any) -> Any:
        mode.counts["replay"] += 1
        with _disable_current_modes():
            return replay(graph, *inputs)

    draft = ChainDraft.replay

    def drafted(chain: ChainDraft, *inputs: Any) -> Any:
        mode.counts["replay"] += 1
        with _disable_current_modes():
            return draft(chain, *inputs)

    monkeypatch.setattr(TracedGraph, "__call__", counted)
    monkeypatch.setattr(ChainDraft, "replay", drafted)
    return mode


@pytest.mark.parametrize(
    ("grammar", "sampling", "most"),
    [
        (None, {"temperature": 0}, 12),
        # One of them brings the grammar's forced runs up beside the masks.
        (SCHEMA, {"temperature": 0}, 23),
        (SCHEMA, {"temperature": 0.8, "seed": 1, "top_p": 0.9}, 116),
    ],
    ids=["free", "constrained", "sampled"],
)
@pytest.mark.parametrize("batch", [1, 7])
def test_operations_of_a_replayed_step(
    tiny: dict[str, Any],
    counting: Counting,
    batch: int,
    grammar: Grammar | None,
    sampling: dict[str, Any],
    most: int,
) -> None:
    """The serial mode runs in one thread, where all operations are seen."""
    settings = {"overlap": "none", "adaptive": "static", "num_steps": 3, "page_size": 64}
    with Engine(**tiny, **settings) as engine:
        asked = {**sampling, "max_tokens": 40, "complete": False, "ignore_eos": True}
        handles = [engine.submit(f"abc {n}", grammar, asked) for n in range(batch)]
        for _ in range(3):
            engine.step()
        counting.counts.clear()
        with counting:
            engine.step()
        counts, work = counting.counts.copy(), counting.work
        engine.release(handles)
    assert counts["replay"] == REPLAYS
    assert work <= most, counts


def test_a_step_makes_no_events(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to the buffers, which are made for the first two steps of a tier."""
    with Engine(**tiny, adaptive="static", num_steps=3) as engine:
        engine.generate("abc", SCHEMA, {"max_tokens": 30, "complete": False})
        streams = engine.core.worker.streams

        def no_more() -> Any:
            raise AssertionError("an event was made")

        monkeypatch.setattr(streams, "event", no_more)
        output = engine.generate("abc", SCHEMA, {"max_tokens": 30, "complete": False})
        assert output.error is None
