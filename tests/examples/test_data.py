"""The training mixture: texts by grammar, questions about them, fillers, sums, tool turns."""

import json
import re
from collections import Counter
from random import Random

import jsonschema

from examples.embedded_model.clauses import Composer, all_clauses
from examples.embedded_model.data import chat, held_out_cases, held_out_choices, tools_text
from examples.embedded_model.fillers import word_lists
from examples.embedded_model.mixed import WideCases
from examples.embedded_model.sums import Sums
from examples.embedded_model.templates import forbidden_grams, library, parse_template
from examples.embedded_model.turns import WideTools

GSM8K = [("How many are 2 and 3?", "2+3=<<2+3=5>>5.\n#### 5"), ("What is 4 less 1?", "#### 3")]


def test_composed_texts_share_no_four_words_with_held_out_phrasings():
    composer = Composer(Random(1))
    assert len(forbidden_grams()) > 100
    for clauses in all_clauses().values():
        for _ in range(25):
            made = composer.compose(clauses)
            assert not made.grams() & forbidden_grams(), made.text
            assert clauses.subject in made.slots, made.text


def test_requests_and_tool_turns_share_no_four_words_with_held_out_phrasings():
    cases, tools = WideCases(Random(2)), WideTools(Random(2))
    for _ in range(300):
        asked = cases._frame(cases.older[0], "", ["name", "age", "city"])
        assert not parse_template("x", asked).grams() & forbidden_grams(), asked
    for tool in library().tools:
        for _ in range(20):
            turn = tools._turn(tool)
            assert not turn.grams() & forbidden_grams(), turn.text


def test_wide_cases_fit_their_schemas_and_miss_what_is_not_stated():
    cases = held_out_cases(5, 400, "wide")
    assert cases == held_out_cases(5, 400, "wide")
    assert cases != held_out_cases(6, 400, "wide")
    empty = Counter()
    for case in cases:
        jsonschema.Draft202012Validator.check_schema(case.schema)
        jsonschema.validate(case.answer, case.schema)
        empty.update(json.dumps(v) for v in case.answer.values() if v in (None, "", []))
    assert {"null", '""', "[]"} <= set(empty)
    assert 0.1 < sum(empty.values()) / len(cases) < 0.8


def test_held_out_wide_cases_name_no_training_filler():
    known = {name for kind in ("first", "last") for name in word_lists()[kind][0]}
    people = [c.answer["name"] for c in held_out_cases(8, 900, "wide") if "name" in c.answer]
    people = [name for name in people if isinstance(name, str) and name.count(" ") == 1]
    people = [name for name in people if re.fullmatch(r"[A-Z]\w+ [A-Z]\w+", name)]
    seen = [name for name in people if set(name.split()) <= known]
    assert len(people) > 20
    assert not seen


def test_choices_are_among_their_options_and_of_both_kinds():
    choices = held_out_choices(1, 400)
    assert choices == held_out_choices(1, 400)
    for choice in choices:
        assert choice.answer in choice.options
        assert len(set(choice.options)) == len(choice.options) >= 2
    words = Counter(c.answer for c in choices if c.options == ("yes", "no"))
    assert 0.3 < words["yes"] / words.total() < 0.7
    assert any(c.answer == "unknown" for c in choices)
    others = [c for c in choices if "yes" not in c.options]
    assert len(others) > 50


def test_a_yes_or_no_follows_the_text():
    asked = [c for c in held_out_choices(2, 3000) if c.prompt.count("Is breakfast included?") == 1]
    assert len(asked) >= 10
    for choice in asked:
        text = choice.prompt.replace("Is breakfast included?", "")
        if "unknown" in choice.options and choice.answer == "unknown":
            continue
        denied = re.search(r"(?i)not|without|no breakfast|skips|breakfast\W+no\b", text)
        if choice.answer == "yes":
            assert "breakfast" in text.lower()
        else:
            assert denied, choice


def test_word_problems_are_worked_out_right():
    sums = Sums(Random(8))
    for _ in range(400):
        question, worked, expression = sums.problem()
        result = eval(expression)  # a sum of digits that this module wrote
        assert worked.endswith(f"#### {result}")
        assert result >= 0
        assert question.endswith(("?", "."))
        for left, right in re.findall(r"<<([^=]+)=(\d+)>>", worked):
            assert eval(left) == int(right)


def test_tool_calls_of_training_fit_their_own_schemas():
    tools = WideTools(Random(12))
    for _ in range(200):
        case = tools.tool_call()
        jsonschema.validate(case.answer, case.schema)
        assert case.answer["name"] in tools_text(case)
        assert chat(case.prompt, case.text)[1][0].startswith('{"name":')
