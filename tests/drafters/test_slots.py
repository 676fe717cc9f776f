"""Drafts by where they go: spans of the prompt that are legal there, values that came before."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import HostDraft
from overlap_spec.drafters.slots import PROMPT_BYTES, VALUES, SlotDrafter
from overlap_spec.engine import Engine
from overlap_spec.grammar.drafting.byte_states import byte_states
from overlap_spec.grammar.drafting.state_table import Standing, StateTable
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import COMMON_STATES, DEAD, FIRST, Guide, History
from overlap_spec.tiers import Tier
from tests.support.counted import lines_run

# Tokens are bytes, and the end.
VOCABULARY = Vocabulary(tuple(bytes((n,)) for n in range(256)), 257, (256,))
CHAIN, TREE = Tier(40, 1, 41), Tier(24, 4, 60)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "state": {"enum": ["pending", "shipped", "paid"]},
    },
    "required": ["name", "age", "state"],
    "additionalProperties": False,
}
PROMPT = "State the name and age: Maria Lopez, 34 years old, has shipped everything."
REQUESTS = count()


def table(schema: Any = PERSON) -> StateTable:
    return byte_states(Grammar.json_schema(schema), VOCABULARY)


def drafter(**settings: Any) -> SlotDrafter:
    return SlotDrafter(EngineConfig.build(algorithm="slots", **settings))


def history(
    states: StateTable | None,
    output: str | list[int],
    prompt: str = PROMPT,
    forced: Sequence[int] = (),
    salt: str = "",
    request: int | None = None,
) -> History:
    guide = None
    if states is not None:
        guide = Guide(states, VOCABULARY.text, lambda text: list(text.encode()), salt)
    said = list(output.encode()) if isinstance(output, str) else output
    number = next(REQUESTS) if request is None else request
    return History(number, list(prompt.encode()), said, forced, guide)


def paths(draft: HostDraft) -> list[bytes]:
    """The text of each node's path."""
    found = [b""]
    assert draft.parents is not None
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append(found[parent] + bytes((token,)))
    return found[1:]


def chain(of: SlotDrafter, known: History) -> str:
    (draft,) = of.propose([known], CHAIN)
    return bytes(draft.tokens.tolist()).decode()


def test_a_value_goes_on_to_its_end_and_into_the_next_slots() -> None:
    drafted = chain(drafter(), history(table(), '{"name":"M'))
    assert drafted == 'aria Lopez","age":34,"state":"shipped"}'


def test_a_slot_has_what_is_legal_there_alone() -> None:
    of, states = drafter(), table()
    assert chain(of, history(states, '{"name":"Maria Lopez","age":')).startswith("34,")
    assert chain(of, history(states, '{"name":"x","age":3,"state":"')) == 'shipped"}'
    # Of a choice that the prompt says nothing of, the grammar's own texts are.
    of_choice = chain(of, history(states, '{"name":"x","age":3,"state":"p', "Nothing."))
    assert of_choice in ('ending"}', 'aid"}')


def test_what_is_forced_comes_first() -> None:
    known = history(table(), "{", forced=list(b'"name":"'))
    assert chain(drafter(), known).startswith('"name":"Maria Lopez"')


def test_a_tree_has_several_values() -> None:
    (draft,) = drafter().propose([history(table(), '{"name":"')], TREE)
    found = paths(draft)
    assert b'Maria Lopez"' in found
    assert b'Maria"' in found
    assert any(not path.startswith(b"M") for path in found)


def test_words_of_the_key_tell_the_span() -> None:
    prompt = "Sender Anna Berg, recipient Carl Diallo, courier Eve Foster."
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("courier", "recipient", "sender")},
        "required": ["courier", "recipient", "sender"],
        "additionalProperties": False,
    }
    of, states = drafter(), table(schema)
    assert chain(of, history(states, '{"courier":"', prompt)).startswith("Eve Foster")
    known = history(states, '{"courier":"Eve Foster","recipient":"', prompt)
    assert chain(of, known).startswith("Carl Diallo")


def test_other_grammars_have_slots_too() -> None:
    states = byte_states(Grammar.regex(r"Name: [A-Z][a-z]{1,20}; years: [0-9]+\."), VOCABULARY)
    assert chain(drafter(), history(states, "Name: M")) == "aria; years: 34."


def test_nothing_is_drafted_without_a_table() -> None:
    assert chain(drafter(), history(None, "free text")) == ""


def test_random_trees_are_legal_and_obey_the_contract() -> None:
    rng = random.Random(3)
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "left": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "is_é": {"type": "boolean"},
        },
        "required": ["tags", "left", "is_é"],
        "additionalProperties": False,
    }
    states = table(schema)
    whole = '{"tags":["añb","c d","\\n,"],"left":-1.5e3,"is_é":true}'.encode()
    of, letters = drafter(), "ab ,.\"'-1é[]{}tn"
    drafted = 0
    for _ in range(150):
        prompt = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
        output = list(whole[: rng.randint(0, len(whole))])
        tier = Tier(rng.randint(1, 9), rng.randint(1, 4), rng.randint(2, 30))
        standing = Standing()
        standing.enter(states, COMMON_STATES)
        state = standing.after(FIRST, bytes(output))
        forced = list(standing.forced(state, rng.randint(0, 4)))
        (draft,) = of.propose([history(states, output, prompt, forced)], tier)
        depths, siblings = [0], set()
        assert draft.parents is not None
        nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.scores, strict=True)
        for node, (token, parent, score) in enumerate(nodes, 1):
            assert parent < node < tier.nodes
            assert (parent, token) not in siblings
            assert parent == 0 or score <= draft.scores[parent - 1]
            siblings.add((parent, token))
            depths.append(depths[parent] + 1)
        assert max(depths) <= tier.steps
        parents = draft.parents.tolist()
        assert all(parents.count(parent) <= max(1, tier.top_k) for parent in parents)
        for path in paths(draft):
            assert standing.after(state, path) != DEAD, path
        drafted += len(draft.tokens)
    assert drafted > 500


@pytest.mark.parametrize("shares", [False, True])
def test_earlier_values_come_where_they_were_asked_for(shares: bool) -> None:
    """Of the same grammar, in the same slot, of the same salt."""
    of, states, nothing = drafter(slots_earlier=shares), table(), "Nothing is said here."
    answer = '{"name":"Zoe Quist","age":51,"state":"paid"}'
    known = history(states, answer, nothing, salt="a", request=10**6)
    of.propose([known], CHAIN)
    of.forget(known)
    start = '{"name":"'
    mine = chain(of, history(states, start, nothing, salt="a"))
    assert mine.startswith('Zoe Quist","age":51,"state":"paid"}') == shares
    for salt, other in (("b", states), ("a", table())):
        assert "Zoe" not in chain(of, history(other, start, nothing, salt=salt))


def test_a_request_drafts_its_own_earlier_values() -> None:
    item = {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]}
    schema = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": item | {"additionalProperties": False}}},
        "required": ["rows"],
        "additionalProperties": False,
    }
    output = '{"rows":[{"unit":"kilometre"},{"unit":"kilometre"},{"unit":"'
    assert chain(drafter(), history(table(schema), output, "")).startswith('kilometre"}')


def test_nothing_is_left_of_a_request_and_values_are_bounded() -> None:
    of, states = drafter(slots_earlier=True, max_running_requests=2), table()
    for number in range(3 * VALUES):
        known = history(states, f'{{"name":"n{number}","age":{number},"state":"paid"}}')
        of.propose([known], CHAIN)
        of.forget(known)
    assert not of.fillings
    ((_, values),) = of.grammars.values()
    assert max(len(had) for had in values.values()) == VALUES
    for _ in range(5):
        of.propose([history(states, "{")], CHAIN)
    assert len(of.fillings) == 2


def test_a_step_costs_no_more_in_a_long_prompt() -> None:
    """Lines that are run at a slot's start, where the prompt is as long as is looked at and where
    it is ten times as long."""
    costs = []
    for length in (PROMPT_BYTES, 10 * PROMPT_BYTES):
        rng = random.Random(1)
        words = ("Ana", "Berg", "went", "12", "home.", "to", "Oslo,")
        prompt = " ".join(rng.choice(words) for _ in range(length // 4))[:length]
        of, output = drafter(), list(b"{")
        known = history(table(), output, prompt)
        of.propose([known], TREE)
        output += b'"name":"'
        costs.append(lines_run(partial(of.propose, [known], TREE)))
    assert costs[1] < 1.5 * costs[0]
    assert costs[0] < 60_000


def test_extraction_needs_no_head() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
        "required": ["name", "city"],
        "additionalProperties": False,
    }
    prompts = [
        "Extract name and city: Maria Lopez from Lisbon has paid.",
        "JSON with name and city: Our guest Carl Diallo lives in San Francisco.",
    ]
    found = {}
    for algorithm in ("none", "slots"):
        settings = {"adaptive": "static", "context_length": 256, "grammar_isolated": False}
        with Engine(algorithm=algorithm, **settings) as engine:
            found[algorithm] = engine.generate(
                prompts, Grammar.json_schema(schema), {"temperature": 0}
            )
            assert engine.snapshot()["drafter"]["faults"] == 0
    for mine, its in zip(found["slots"], found["none"], strict=True):
        assert mine.token_ids == its.token_ids
        assert mine.stats.accept_length > 2.5
