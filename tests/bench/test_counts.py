"""``bench.counts``: the same each time, and another figure for whatever a step does besides."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench import check, counts
from overlap_spec import Engine
from overlap_spec.worker.worker import Worker


@pytest.fixture(scope="module")
def engine(tiny: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**tiny | counts.settings_of("chain", num_steps=3, context_length=256)) as made:
        yield made


def test_a_copy_more_is_another_figure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = counts.step_counts(engine, "constrained", 2)
    assert counts.step_counts(engine, "constrained", 2) == before
    assert before["replays"] == 4
    accept = Worker.accept

    def copying(worker: Worker, *rest: Any) -> None:
        torch.ones(3).clone()
        accept(worker, *rest)

    monkeypatch.setattr(Worker, "accept", copying)
    after = counts.step_counts(engine, "constrained", 2)
    more = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert more == {"operations": 2, "copies": 1, "allocations": 2, "allocated_bytes": 24}


def test_a_change_fails_the_check() -> None:
    expected = {"bench": "counts", "path": ["text", "none"], "equals": {"verifies": 160}}
    for verifies in (160, 161):
        found = check.compare(
            expected, {"counts": {"text": {"none": {"verifies": verifies}}}}, "ci"
        )
        assert bool(found.error) == (verifies != 160)


def test_calls_are_counted_where_they_are_defined() -> None:
    class Base:
        def fill(self) -> int:
            return 1

    class Own(Base):
        def accept(self) -> int:
            return self.fill()

    with counts.calls_counted([Base, Own], "accept", "fill") as calls:
        assert Own().accept() == 1
    Own().accept()
    assert calls == {"accept": 1, "fill": 1}
