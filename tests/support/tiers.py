"""Which of many cases `make test` runs; `make test-ci` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *everyday: Any) -> list[Any]:
    """Parameters of a test, marked ``ci`` but for those that are named.

    Args:
        cases: Each a value, or a tuple of them.
    """
    found = [*cases]
    missing = [case for case in everyday if case not in found]
    assert not missing, f"there is no case {missing}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in everyday else pytest.mark.ci,
        )
        for case in found
    ]
