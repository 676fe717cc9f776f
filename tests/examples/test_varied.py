"""Texts for training alone: free word order, labels, facts that are true or not; nothing leaks."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from random import Random

import jsonschema
import pytest

from examples.embedded_model.clauses import all_clauses
from examples.embedded_model.data import DocumentMaker, held_out_cases, held_out_choices
from examples.embedded_model.fillers import plain_words, read_lines
from examples.embedded_model.labels import Labelled, label
from examples.embedded_model.mixed import with_articles
from examples.embedded_model.relations import all_relations, capital, sentence
from examples.embedded_model.scenes import all_scenes
from examples.embedded_model.templates import (
    Field,
    forbidden_grams,
    fresh_library,
    library,
    parse_template,
)
from examples.embedded_model.varied import VariedAnything, VariedCases, VariedFillers, truths

# What the published figures were measured on: digests of prompts and answers.
EVALUATION = {
    "seen": "3e74e1447be124b5",
    "unseen": "ec5b05f4814a399f",
    "seen_tools": "48eea1f78c47dc7e",
    "unseen_tools": "2034b576d3564dd2",
    "wide": "a8ee1719c92dea5c",
}
CHOICES = "a039f17269e60fa7"


def digest(texts: list[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("kind", EVALUATION)
def test_evaluation_cases_are_those_of_the_published_figures(kind):
    cases = held_out_cases(7, 60, kind)
    assert digest([c.prompt + c.text for c in cases]) == EVALUATION[kind]


def test_evaluation_choices_are_those_of_the_published_figures():
    assert digest([c.prompt + c.answer for c in held_out_choices(7, 60)]) == CHOICES


def test_words_of_training_grammars_are_not_drawn_as_plain_words():
    own = {w for line in read_lines("varied_facts.txt") for w in re.findall(r"[a-z]{3,}", line)}
    assert len(own - set(plain_words())) > 50


def test_varied_texts_share_no_four_words_with_held_out_phrasings():
    cases = VariedCases(Random(1))
    for clauses in cases.clauses.values():
        for _ in range(25):
            made = cases.varied(clauses)
            assert not made.grams() & forbidden_grams(), made.text
            assert set(made.slots) <= set(clauses.domain.fields), made.text


def test_fresh_phrasings_share_no_four_words_with_training():
    trained = set().union(*(t.grams() for t in library().training()))
    for clauses in all_clauses().values():
        for part in (*clauses.follow, *clauses.aside, *clauses.front, *clauses.alone):
            trained |= part.grams()
    for parts in all_relations().values():
        for part in (*parts.cores, *parts.tails, *parts.booleans):
            trained |= part.grams()
    for scene in all_scenes():
        for part in (*scene.relations.cores, *scene.relations.tails, *scene.clauses.alone):
            trained |= part.grams()
    fresh = [t for domain in fresh_library().domains for t in domain.held_out]
    assert len(fresh) == 36
    assert not [t.text for t in fresh if t.grams() & trained]


def test_no_boolean_is_worded_as_in_a_held_out_phrasing():
    def wordings(templates):
        return {w for t in templates for p in t.parts for w in p.wordings or ()}

    held = wordings(library().held_out()) - wordings(library().training())
    ours = wordings(t for r in all_relations().values() for t in (*r.tails, *r.booleans))
    assert len(held) > 5
    assert not [(known, own) for known in held for own in ours if known in own]


def test_every_line_of_the_relations_is_used_and_every_boolean_has_three_clauses():
    written = Counter(line.partition(" ")[0] for line in read_lines("varied_relations.txt"))
    kept = Counter()
    for name, parts in all_relations().items():
        kept.update(h=len(parts.cores), t=len(parts.tails), b=len(parts.booleans))
        domain = next(d for d in library().domains if d.name == name)
        stated = Counter(slot for part in parts.booleans for slot in part.slots)
        for slot, field in domain.fields.items():
            if field.kind == "bool":
                assert stated[slot] >= 3, (name, slot)
    assert set(all_relations()) == {domain.name for domain in library().domains}
    assert {kind: written[kind] for kind in "htb"} == dict(kept)


def test_a_sentence_states_no_fact_twice():
    rng = Random(2)
    for parts in all_relations().values():
        for _ in range(40):
            used = {"name"}
            made = sentence(rng, parts, used)
            if made is None:
                continue
            slots = re.findall(r"\{(\w+)", made)
            assert len(slots) == len(set(slots))
            assert set(slots) <= used
            assert "name" not in slots


def test_varied_texts_state_the_facts_that_they_claim():
    cases = VariedCases(Random(3))
    for domain in cases.domains:
        for _ in range(20):
            text, facts, _ = cases.composed(domain)
            assert facts, text
            for slot, (value, wording) in facts.items():
                if not isinstance(value, bool):
                    assert wording in text or with_articles(wording) in text, (slot, text)


def test_cases_fit_their_schemas():
    cases = VariedCases(Random(4))
    nested = 0
    for _ in range(500):
        case = cases.extraction()
        jsonschema.validate(case.answer, case.schema)
        objects = [v for v in case.answer.values() if isinstance(v, dict)]
        nested += len(objects) == 2
        assert all(len(inner) >= 2 for inner in objects)
    assert nested


def test_a_boolean_is_stated_both_ways_and_differently():
    rng = Random(5)
    anything = VariedAnything(rng)
    found = Counter()
    for _ in range(400):
        made = anything.make()
        for part in (*made.follow, *made.aside, *made.front, *made.alone):
            for piece in part.parts:
                if piece.wordings:
                    found[part.slots[0]] += 1
                    assert piece.wordings[0] != piece.wordings[1], part.text
                    assert made.domain.fields[piece.slot].kind == "bool"
    assert len(found) > 100


def test_truths_have_a_key_of_words_and_an_opposite_that_differs():
    assert len(truths()) > 150
    for word, opposite, key in truths():
        assert re.fullmatch(r"[a-z_ ]+", key), key
        assert word != opposite


def test_labels_are_nouns_of_their_field():
    rng = Random(6)
    field = Field("date", "date", ("date", "ordered_on", "order_date"))
    assert {label(rng, field) for _ in range(60)} == {"date", "order date"}
    assert label(rng, Field("x", "city", ("from", "to"))) is None
    paid = Field("paid", "bool", ("is_paid",))
    assert label(rng, paid) == "paid"


def test_a_wrong_value_beside_the_right_one_is_no_fact():
    cases = VariedCases(Random(7))
    contacts = next(c for c in cases.clauses.values() if c.domain.name == "contacts")
    labelled = Labelled(Random(8), lambda _: "WRONG")
    made = [labelled.clause(contacts, "email", with_subject) for with_subject in [True, False] * 80]
    wrong = [text for text in made if text and "WRONG" in text]
    assert len(wrong) > 8
    assert all("{email}" in text for text in wrong)
    assert not any("WRONG" in slot for text in wrong for slot in parse_template("", text).slots)


def test_loose_values_are_of_different_kinds():
    cases = VariedCases(Random(12))
    words = Counter()
    for clauses in cases.clauses.values():
        for _ in range(30):
            text = cases.labelled.loose(clauses)
            if text is None:
                continue
            made = parse_template("", text)
            kinds = [clauses.domain.fields[slot].kind.partition(":")[0] for slot in made.slots]
            assert kinds
            assert len(set(kinds)) == len(kinds)
            words.update(re.findall(r"[a-z]+", re.sub(r"{.*?}", "", text)))
    assert len(words) > 200


def test_lists_and_records_hold_every_value():
    fillers = VariedFillers(Random(9))
    shapes = set()
    for _ in range(400):
        values, text = fillers.draw("list:noun")
        assert all(value in text for value in values)
        rows, text = fillers.draw("items")
        for row in rows:
            word, amount = row.values()
            assert word in text
            assert str(amount) in text
        shapes.add(re.sub(r"\w+", "w", text))
    assert len(shapes) > 40


def test_domains_of_addresses_end_in_anything():
    fillers = VariedFillers(Random(10))
    ends = {fillers.draw("email")[0].rpartition(".")[2] for _ in range(300)}
    assert len(ends) > 80


def test_capital_letters_begin_both_wordings_of_a_boolean():
    assert capital("the rent is {rent}") == "The rent is {rent}"
    assert capital("{paid|it is paid|it is open}") == "{paid|It is paid|It is open}"
    assert capital("{name} {paid|paid|did not pay}") == "{name} {paid|paid|did not pay}"


def test_training_documents_come_from_the_varied_texts():
    maker = DocumentMaker(Random(11), [])
    assert isinstance(maker.cases, VariedCases)
    assert maker.questions.cases is maker.cases
    assert all(json.loads(maker.cases.extraction().text) is not None for _ in range(20))
