"""Masks of random grammars, against the oracle's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, Vocabulary
from overlap_spec.grammar.backends import load
from tests.support.grammars import random_ebnf, row_of

TEXTS = (b"a", b"b", b"c", b"d", b"ac", b"ca", b"bcc", b"")
VOCABULARY = Vocabulary(TEXTS, len(TEXTS), (7,))


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_masks_of_random_grammars_are_the_oracles(name: str) -> None:
    backend, oracle = load(name)(VOCABULARY), load("reference")(VOCABULARY)
    compared = 0
    for seed in range(250):
        rng = random.Random(seed)
        text = random_ebnf(rng)
        try:
            wanted = oracle.compile(Grammar.ebnf(text))
            compiled = backend.compile(Grammar.ebnf(text))
        except GrammarError:
            continue
        for _ in range(3):
            left, right = wanted.matcher(), compiled.matcher()
            for _ in range(8):
                row = row_of(left)
                assert np.array_equal(row_of(right), row), (text, left.accepted_tokens)
                legal = [t for t in range(7) if row[0] >> t & 1]
                if not legal:
                    break
                token = rng.choice(legal)
                assert left.accept(token)
                assert right.accept(token)
                compared += 1
    assert compared > 1000


def test_a_start_rule_may_refer_to_itself() -> None:
    matcher = (
        load("xgrammar")(VOCABULARY)
        .compile(Grammar.ebnf('root ::= "c" root [ac]? | "a"'))
        .matcher()
    )
    assert matcher.accept(TEXTS.index(b"c"))
    legal = [text for token, text in enumerate(TEXTS) if row_of(matcher)[0] >> token & 1]
    assert legal == [b"a", b"c", b"ac", b"ca"]
