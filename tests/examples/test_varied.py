"""Texts for training alone: free word order, labels, facts that are true or not; nothing leaks."""

import hashlib
from random import Random

import jsonschema
import pytest

from bench.embedded import open_cases
from examples.embedded_model.clauses import all_clauses
from examples.embedded_model.data import held_out_cases, held_out_choices
from examples.embedded_model.mixed import with_articles
from examples.embedded_model.relations import all_relations
from examples.embedded_model.scenes import all_scenes
from examples.embedded_model.templates import (
    forbidden_grams,
    fresh_library,
    library,
    parse_template,
)
from examples.embedded_model.varied import VariedCases

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


def test_varied_texts_share_no_four_words_with_held_out_phrasings():
    cases = VariedCases(Random(1))
    for clauses in cases.clauses.values():
        for _ in range(25):
            made = cases.varied(clauses)
            assert not made.grams() & forbidden_grams(), made.text
            assert set(made.slots) <= set(clauses.domain.fields), made.text


@pytest.fixture(scope="module")
def trained() -> set[tuple[str, ...]]:
    """Runs of four words of all that texts for training are made of."""
    parts = list(library().training())
    for scene in all_scenes():
        parts += [*scene.relations.cores, *scene.relations.tails, *scene.clauses.alone]
    for clauses in all_clauses().values():
        parts += [*clauses.follow, *clauses.aside, *clauses.front, *clauses.alone]
    for relations in all_relations().values():
        parts += [*relations.cores, *relations.tails, *relations.booleans]
    return set().union(*(part.grams() for part in parts))


def test_held_out_and_fresh_phrasings_share_no_four_words_with_training(trained):
    held, fresh = list(library().held_out()), fresh_library().domains
    assert len([t for t in held if not t.id.startswith("frame")]) >= 20
    assert sum(len(domain.held_out) for domain in fresh) == 36
    for template in (*held, *(t for domain in fresh for t in domain.held_out)):
        assert not template.grams() & trained, template.text


def test_open_sentences_share_no_four_words_with_training(trained):
    for case in open_cases():
        without = case.prompt
        for value in sorted(map(str, case.answer.values()), key=len, reverse=True):
            without = without.replace(value, " ")
        for text in (case.prompt, without):
            assert not parse_template("open", text).grams() & trained, case.prompt


def test_no_boolean_is_worded_as_in_a_held_out_phrasing():
    def wordings(templates):
        return {w for t in templates for p in t.parts for w in p.wordings or ()}

    held = wordings(library().held_out()) - wordings(library().training())
    ours = wordings(t for r in all_relations().values() for t in (*r.tails, *r.booleans))
    assert len(held) > 5
    assert not [(known, own) for known in held for own in ours if known in own]


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
