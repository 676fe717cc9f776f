"""Which of many cases `make test` runs, `make test-ci` the others, and which neither has to."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
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


def pairs(*axes: Iterable[Any], given: Sequence[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """``given`` and more cases, a value of each axis, so that any two values of two axes meet in
    one: a fault is mostly of one value or of two (Kuhn et al., 2004), and all combinations of five
    axes take some ten times as long."""

    def met(case: tuple[Any, ...]) -> set[Any]:
        return {*combinations(enumerate(case), 2)}

    every = [*product(*map(tuple, axes))]
    found, left = [*given], set().union(*map(met, every)).difference(*map(met, given))
    while left:
        found.append(max(every, key=lambda case: len(met(case) & left)))
        left -= met(found[-1])
    return found
