"""Several questions about one text: the answers are those of its facts."""

from __future__ import annotations

from collections import Counter
from random import Random

from examples.embedded_model.data import ASSISTANT, BOS, DocumentMaker
from examples.embedded_model.interviews import Interviews
from examples.embedded_model.mixed import with_articles
from examples.embedded_model.templates import Field
from examples.embedded_model.varied import VariedCases


def interviews(seed):
    return Interviews(VariedCases(Random(seed)))


def test_every_answer_is_one_of_its_options():
    counts = Counter()
    made = interviews(1)
    for _ in range(150):
        asked = made.several()
        assert 1 <= len(asked) <= 7
        assert len({choice.prompt for choice in asked}) == len(asked)
        assert len({choice.template_id for choice in asked}) == 1
        # Only the first question brings the text along.
        assert all(len(choice.prompt) < 200 for choice in asked[1:])
        for choice in asked:
            assert choice.answer in choice.options
            counts[choice.answer] += 1
    assert 0.4 < counts["yes"] / (counts["yes"] + counts["no"]) < 0.6


def test_a_value_is_asked_for_rightly():
    made = interviews(2)
    facts = {
        "city": ("Paris", "Paris"),
        "date": ("2024-05-02", "2 May 2024"),
        "seats": (731, "731"),
    }
    kinds = {"city": "city", "date": "date", "seats": "int:1-9"}
    domain = next(d for d in made.cases.domains if d.name == "travel")
    domain = type(domain)("made", fields={s: Field(s, k, (s,)) for s, k in kinds.items()})
    found = Counter()
    for _ in range(300):
        asked = made._is_value(domain, facts)
        if asked is None:
            continue
        question, options, answer = asked
        slot = next(s for s in facts if f" {s}" in question.replace("?", " ").replace(",", ""))
        words = {str(x) for x in facts[slot]}
        assert options == ("yes", "no")
        assert (answer == "yes") == any(word in question for word in words), asked
        found[slot, answer] += 1
    assert len(found) == 6


def test_a_document_asks_and_answers_in_turns():
    maker = DocumentMaker(Random(3), [])
    for _ in range(60):
        document = maker.interview()
        text = "".join(segment for segment, _ in document)
        assert text.startswith(BOS)
        assert text.count(BOS) == 1
        assert text.count(ASSISTANT) * 2 == len(document)
        assert [weight for _, weight in document][1::2] == [1.0] * (len(document) // 2)


def test_texts_about_anything_are_asked_about_too():
    made = interviews(4)
    names = {made.several()[0].template_id.partition(":")[0] for _ in range(80)}
    assert "anything" in names
    assert len(names) > 8
    assert with_articles("a apple") == "an apple"
