"""Where a verify ended, and who could have known better."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lost_drafts import LostDrafts, winnable
from overlap_spec.grammar import backends
from overlap_spec.grammar.guesses import Guesses
from overlap_spec.types import TOLD
from tests.grammar.test_forced import PERSON, VOCABULARY, encode, ids

# After `{"name":"`, whose last quote opens free text.
KEY = ["{", '"', "na", "m", "e", '":"']


class Walk:
    """A request's chains, verified one after the other."""

    def __init__(self, weighed: bool = False) -> None:
        compiled = backends.load("reference")(VOCABULARY).compile(PERSON)
        self.matcher, self.guesses = compiled.matcher(), Guesses()
        self.lost = LostDrafts(VOCABULARY, encode, 16, weighed)
        self.lost.start(3)

    def verify(self, drafted: list[str], chosen: list[str]) -> str:
        """What a chain after the last token counts as."""
        nodes = len(drafted) + 1
        tokens = np.array([0, *ids(*drafted)], np.int64)
        child = np.array([*range(1, nodes), -1], np.int64)
        tree = tokens, child, np.full(nodes, -1, np.int64)
        rows = np.zeros((nodes, VOCABULARY.words), np.int32)
        self.matcher.fill_tree(*tree, rows)
        runs = np.zeros((nodes, TOLD), np.int32)
        openings = self.lost.fill(self.matcher, *tree, rows, runs, self.guesses)
        before = self.lost.counts.copy()
        self.lost.learn(openings, ids(*chosen), self.guesses)
        for token in ids(*chosen):
            assert self.matcher.accept(token)
        return ", ".join((self.lost.counts - before).keys())


def test_every_way_to_end() -> None:
    walk = Walk()
    # A prefill's tree drafts nothing. Its bonus is another cut than the run's.
    assert walk.verify([], ["{"]) == ""
    assert walk.verify(['"', "n"], ['"', "na"]) == "recut"
    # The bonus begins the run, and the draft is another one all the same.
    assert walk.verify([], ["m"]) == ""
    assert walk.verify(["x"], ["e"]) == "cut, illegal"
    assert walk.verify(['"', ":", '"'], ['"', ":", '"', "a"]) == "whole"
    # A free bonus opens what follows; a draft that is itself free does.
    assert walk.verify(["b"], ['"']) == "free"
    assert walk.verify([",", "x"], [",", '"']) == "opened, illegal"
    walk = Walk()
    walk.verify(KEY, KEY)
    assert walk.verify(["a", '"', "x"], ["a", '"', ","]) == "inside, illegal"
    # What was cut off lost nothing.
    assert walk.verify(['"'], ['"']) == ""


def test_cuts_tell_whatever_the_bonus_was() -> None:
    for weighed, kind in ((False, "recut"), (True, "cut")):
        walk = Walk(weighed)
        walk.verify([], ["{"])
        assert walk.verify(['"', "n"], ['"', "na"]) == kind


def test_what_an_automaton_could_win() -> None:
    counts = {"whole": 4, "free": 2, "cut": 1, "opened": 1, "inside": 1, "free, illegal": 1}
    assert winnable(counts) == pytest.approx(0.3)
    assert winnable({}) == 0.0
