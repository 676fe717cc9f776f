"""Scenes to train on, and the sentences of open domains that are kept from training."""

import json
import re
from random import Random

import jsonschema

from bench.embedded import open_cases
from examples.embedded_model.data import DocumentMaker
from examples.embedded_model.mixed import with_articles
from examples.embedded_model.scenes import SceneCases, all_scenes, kept_out_grams
from examples.embedded_model.templates import fresh_library, library


def test_open_sentences_are_a_hundred_of_ten_domains_whose_values_stand_in_them():
    cases = open_cases()
    domains = [case.template_id for case in cases]
    assert len(cases) == len({case.prompt for case in cases}) == 100
    assert {domains.count(domain) for domain in domains} == {10}
    assert len(set(domains[:10])) == 10
    for case in cases:
        jsonschema.validate(case.answer, case.schema)
        assert all(str(value) in case.prompt for value in case.answer.values()), case.prompt


def test_scene_texts_share_no_four_words_with_held_out_or_fresh_phrasings():
    cases = SceneCases(Random(1))
    fresh = [t for domain in fresh_library().domains for t in domain.held_out]
    held = set().union(*(t.grams() for t in (*fresh, *library().held_out())))
    assert held == kept_out_grams()
    for scene in all_scenes():
        for _ in range(10):
            made = cases.scene_text(scene)
            assert not made.grams() & held, made.text
            assert set(made.slots) <= set(scene.clauses.domain.fields)


def test_scene_cases_fit_their_schemas_and_their_answers_stand_in_the_text():
    cases = SceneCases(Random(2))
    seen: set[str] = set()
    while len(seen) < 60:
        case = cases.extraction()
        jsonschema.validate(case.answer, case.schema)
        if not case.template_id.startswith("scene:"):
            continue
        seen.add(case.template_id)
        for value in case.answer.values():
            # Dates and times are written in many ways, a text of words in one.
            if isinstance(value, str) and not re.search(r"\d", value):
                text = case.prompt
                assert value in text or with_articles(value) in text, (value, text)


def test_training_draws_scenes():
    maker = DocumentMaker(Random(4), [])
    made = [maker.cases.extraction() for _ in range(300)]
    share = sum(case.template_id.startswith("scene:") for case in made) / len(made)
    assert 0.4 < share < 0.8
    assert all(json.loads(case.text) == case.answer for case in made)
