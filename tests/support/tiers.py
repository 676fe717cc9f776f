"""Which of many cases `make test` runs; `make test-ci` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *everyday: Any) -> list[Any]:
    """Parameters of a test, marked ``ci`` but for those that are named."""
    found = [*cases]
    missing = [case for case in everyday if case not in found]
    assert not missing, f"there is no case {missing}"
    return [
        case if case in everyday else pytest.param(*_values(case), marks=pytest.mark.ci)
        for case in found
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
