"""What the runs of the tests leave out, and what they may skip."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.skips import STRICT, check_skip


def skipped(reason: str) -> Any:
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("file", 1, reason))


def test_a_skip_that_nobody_expects_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks, known = skipped("Skipped: no such thing"), skipped("Skipped: no CUDA device")
    monkeypatch.delenv(STRICT, raising=False)
    check_skip(lacks)
    assert lacks.outcome == "skipped"
    monkeypatch.setenv(STRICT, "1")
    check_skip(lacks)
    check_skip(known)
    assert (lacks.outcome, known.outcome) == ("failed", "skipped")
    assert lacks.longrepr == "an unexpected skip: no such thing"
