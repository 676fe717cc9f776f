"""``bench.forced``: its workloads are what they say, and its figures come from their samples."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

from bench.forced import (
    DRAFTERS,
    LABELS,
    QUICK,
    HostileRuns,
    asked,
    groups_of,
    labels_of,
    shuffled,
    summary,
)
from bench.measure import GREEDY
from bench.workloads import Ask
from examples.embedded_model.data import held_out_cases
from overlap_spec.grammar.drafting.guesses import Guesses
from overlap_spec.grammar.spec import Grammar
from tests.support.grammars import VOCABULARY, encode, ids


def test_groups_are_whole() -> None:
    grammars = [Grammar.choice([f"a{n}", "b"]) for n in range(5)]
    groups = groups_of("unknown schema", grammars, 0, QUICK, 2)
    assert [[ask.grammar for ask in group] for group in groups] == [grammars[:2], grammars[2:4]]
    assert len({ask.prompt for group in groups for ask in group}) == 1
    seen, other = (groups_of(name, [], 3, QUICK, 2) for name in ("extraction", "shuffled keys"))
    assert [[ask.prompt for ask in group] for group in seen] == [
        [ask.prompt for ask in group] for group in other
    ]
    assert len(seen) == QUICK.groups


def test_labels_are_short_and_all_different() -> None:
    cases = held_out_cases(3, 120)
    labels = labels_of(str.split, cases)
    assert len(set(labels)) == LABELS
    assert all(any(label in case.answer.values() for case in cases) for label in labels)
    assert labels_of(lambda text: [1] * (7 - (text == labels[3])), cases) == [labels[3]]
    (group,) = groups_of("choices", [], 3, replace(QUICK, groups=1), 2, labels)
    assert {ask.grammar for ask in group} == {Grammar.choice(labels)}


def test_shuffled_keys_are_the_same_keys_in_another_order() -> None:
    for case in held_out_cases(1, 20):
        before, after = (list(c.schema["properties"]) for c in (case, shuffled(case, Random(0))))
        assert sorted(before) == sorted(after)
        assert before != after or len(before) == 1


def test_hostile_runs_have_words_in_bytes() -> None:
    runs = HostileRuns(VOCABULARY, encode, 8)
    assert runs.tokens(b'{"name":"x', Guesses()) == [
        *ids('{"', "n", "a", "m", "e", '":"'),
        ord("x"),
    ]


def test_indented_answers_have_the_same_keys_in_the_same_order() -> None:
    plain, indented = (groups_of(name, [], 3, QUICK, 2) for name in ("extraction", "indented"))
    for ask, other in zip(*(chain(*groups) for groups in (plain, indented)), strict=True):
        assert ask.grammar is not None
        assert other == replace(ask, grammar=replace(ask.grammar, whitespace=4))


def test_a_third_side_asks_the_same() -> None:
    asks = [Ask("a", Grammar.choice(["b", "c"]), 9), Ask("d", Grammar.choice(["e"]), 9)]
    said = {"on": {"lengths": [3, 2]}}
    assert asked(asks, "off", said) == (asks, GREEDY)
    free, sampling = asked(asks, "free", said)
    assert free == [Ask("a", None, 3), Ask("d", None, 2)]
    assert sampling == {**GREEDY, "ignore_eos": True}
    faithful, sampling = asked(asks, "faithful", said)
    assert [ask.grammar and ask.grammar.faithful for ask in faithful] == [True, True]
    assert sampling == GREEDY


def sample(side: str, group: int, **fields: Any) -> dict[str, Any]:
    counts = {"verified_tokens": 30, "verifies": 10, "drafted_tokens": 50, "illegal_drafts": 5}
    grafts = {"grafted_tokens": 8, "accepted_grafts": 6}
    head = {"workload": "extraction", "drafter": "eagle3 chain", "side": side, "group": group}
    return {
        **head,
        **counts,
        **grafts,
        "tpot_ms": 4.0,
        "seconds": 1.0,
        "answers": 2,
        "lane_us": 50.0,
        "told_us": 20.0,
        **fields,
    }


def test_figures_are_sums_and_pairs() -> None:
    samples = [
        sample("off", 0),
        sample("on", 0, tpot_ms=2.0, lane_us=70.0, told_us=30.0, verifies=5, seconds=0.5),
        sample("off", 1, tpot_ms=10.0),
        sample("on", 1, tpot_ms=6.0, lane_us=60.0, accepted_grafts=2),
        sample("free", 0, tpot_ms=4.0),
        sample("free", 1, tpot_ms=5.0),
    ]
    found = summary(samples)["workloads"]["extraction"]["eagle3 chain"]
    assert found["on"]["accept_length"] == 60 / 15
    assert found["on"]["tpot_of_off"] == {"median": 0.55, "min": 0.5, "max": 0.6, "n": 2}
    assert found["on"]["seconds_of_off"]["median"] == 0.75
    assert found["on"]["verifies_an_answer"] == 15 / 4
    assert found["on"]["graft_accept_rate"] == 0.5
    assert found["on"]["illegal_share"] == 0.1
    assert found["on"]["lane_us"] == 65.0
    assert found["on"]["told_us"] == 25.0
    assert found["off"]["tpot_of_off"]["median"] == 1.0
    assert found["on"]["tpot_of_free"] == {"median": 0.85, "min": 0.5, "max": 1.2, "n": 2}
    assert found["off"]["tpot_of_free"] is found["free"]["tpot_of_free"] is None
    assert set(DRAFTERS) == {"eagle3 chain", "eagle3 tree", "ngram chain", "ngram tree"}
