"""Outputs under a grammar come to their end within their tokens; thinking within its budget."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from overlap_spec import Engine, Grammar
from overlap_spec.errors import InvalidRequest
from overlap_spec.scheduler.sequence import UNTOLD
from overlap_spec.types import Output
from tests.support.tiers import few

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "more": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "tags", "more"],
}
GRAMMAR = Grammar.json_schema(SCHEMA)


@pytest.fixture(
    scope="module",
    params=few(
        ("once-sync eagle3 3", "none eagle3 1", "double-sync ngram 1"), "once-sync eagle3 3"
    ),
)
def engine(tiny: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Engine]:
    mode, algorithm, topk = request.param.split()
    settings = tiny | {
        "complete": True,
        "algorithm": algorithm,
        "num_steps": 4,
        "eagle_topk": int(topk),
    }
    if algorithm != "eagle3":
        settings["draft"] = None
    with Engine(**settings, overlap=mode) as made:
        yield made


def needed(engine: Engine, grammar: Grammar) -> int:
    """The tokens that a refusal says are needed."""
    with pytest.raises(InvalidRequest, match="shortest output") as refusal:
        engine.generate("go", grammar, max_tokens=1)
    assert refusal.value.param == "max_tokens"
    found = re.search(r"takes (\d+) tokens", str(refusal.value))
    assert found is not None
    return int(found[1])


def both(engine: Engine, grammar: Grammar, **sampling: Any) -> Output:
    """The output, which is the same with drafts as without where it is greedy."""
    output = engine.generate("go", grammar, **sampling)
    if sampling.get("temperature") == 0:
        plain = engine.generate("go", grammar, speculate=False, **sampling)
        assert (plain.token_ids, plain.finish_reason) == (output.token_ids, output.finish_reason)
        assert plain.stats.narrowed_tokens == output.stats.narrowed_tokens
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", few((0, 1, 2, 5, 17), 0, 5))
def test_outputs_are_whole_at_any_room(engine: Engine, more: int, temperature: float) -> None:
    most = needed(engine, GRAMMAR) + more
    for seed in range(3):
        output = both(engine, GRAMMAR, max_tokens=most, temperature=temperature, seed=seed)
        assert output.finish_reason == "stop"
        assert len(output.token_ids) <= most
        assert output.parsed.keys() == SCHEMA["properties"].keys()


def test_one_token_fewer_than_needed_is_refused_and_as_many_are_not(engine: Engine) -> None:
    least = needed(engine, GRAMMAR)
    with pytest.raises(InvalidRequest, match=f"takes {least} tokens"):
        engine.generate("go", GRAMMAR, max_tokens=least - 1)
    assert engine.generate("go", GRAMMAR, max_tokens=least).finish_reason == "stop"


def test_a_request_may_be_cut_if_it_says_so(engine: Engine) -> None:
    output = engine.generate("go", GRAMMAR, max_tokens=3, complete=False)
    assert output.finish_reason == "length"
    assert output.parsed is None
    assert output.stats.narrowed_tokens == 0


def test_the_context_is_a_room_as_well(engine: Engine) -> None:
    ids, context = engine.tokenizer.encode("go"), engine.context_length
    prompt = (ids * context)[: context - needed(engine, GRAMMAR) - 3]
    output = engine.generate(prompt, GRAMMAR, temperature=1.0, seed=1)
    assert output.finish_reason == "stop"
    assert output.parsed is not None
    with pytest.raises(InvalidRequest, match="shorten the prompt") as refusal:
        engine.generate((ids * context)[: context - 2], GRAMMAR)
    assert refusal.value.param == "prompt"


def test_ample_room_changes_nothing(engine: Engine) -> None:
    grammar = Grammar.regex("[ab]{3}(cd|ef){2}")
    roomy = both(engine, grammar, max_tokens=120, temperature=0.0)
    free = both(engine, grammar, max_tokens=120, temperature=0.0, complete=False)
    assert roomy.token_ids == free.token_ids
    assert roomy.stats.narrowed_tokens == 0


def test_statistics_tell_that_the_room_narrowed_the_choice(engine: Engine) -> None:
    grammar = Grammar.regex("a{2,200}")
    output = both(engine, grammar, max_tokens=12, temperature=0.0)
    assert output.finish_reason in ("stop", "length")
    tight = both(engine, GRAMMAR, max_tokens=needed(engine, GRAMMAR), temperature=0.0)
    assert tight.stats.narrowed_tokens > 0
    assert tight.stats.to_dict()["narrowed_tokens"] == tight.stats.narrowed_tokens


@pytest.mark.parametrize("budget", few((0, 1, 3, 9), 3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thinking_ends_at_its_budget(engine: Engine, budget: int, temperature: float) -> None:
    grammar = GRAMMAR.after_thinking("</t>")
    marker = len(engine.tokenizer.encode("</t>"))
    for seed in range(2):
        output = both(
            engine,
            grammar,
            thinking_budget=budget,
            max_tokens=budget + marker + 90,
            temperature=temperature,
            seed=seed,
        )
        thought, closed, answer = output.text.partition("</t>")
        assert closed
        assert json.loads(answer).keys() == SCHEMA["properties"].keys()
        text = ""
        for count in range(len(output.token_ids)):
            text = engine.tokenizer.decode(list(output.token_ids[: count + 1]))
            if "</t>" in text:
                break
        # The marker may take as many tokens as it has characters.
        assert count + 1 <= budget + 4
        del thought


def test_a_budget_without_thinking_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="after thinking") as refusal:
        engine.generate("go", GRAMMAR, max_tokens=90, thinking_budget=4)
    assert refusal.value.param == "thinking_budget"


def test_an_engine_may_cut_unless_a_request_says_otherwise(tiny: dict[str, Any]) -> None:
    with Engine(**tiny | {"complete": False}) as made:
        assert made.generate("go", GRAMMAR, max_tokens=3).finish_reason == "length"
        with pytest.raises(InvalidRequest, match="shortest output"):
            made.generate("go", GRAMMAR, max_tokens=3, complete=True)


def test_a_grammar_too_large_to_tell_is_cut_with_a_warning(engine: Engine) -> None:

    grammar = Grammar.regex("[ab]{70000}")
    output = engine.generate("go", grammar, max_tokens=4, complete=None)
    assert output.finish_reason == "length"
    assert UNTOLD in output.warnings
    with pytest.raises(InvalidRequest, match="how long the grammar's texts are") as refusal:
        engine.generate("go", grammar, max_tokens=4, complete=True)
    assert refusal.value.param == "complete"


def test_a_text_with_room_begins_before_its_rests_are_told(engine: Engine) -> None:
    grammar = Grammar.regex("[a-f]{5,700}")
    asked = engine.input_processor.process("go", grammar, max_tokens=100, temperature=1.0, seed=2)
    handle = engine.admit(asked, engine.compile(grammar))
    room = engine.compile(grammar).room
    assert room is not None
    assert handle.output is None
    while handle.output is None:
        engine.step()
    assert re.fullmatch("[a-f]{5,700}", handle.output.text)
    assert not handle.output.warnings
    engine.release([handle])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_text_is_cut_and_a_call_in_it_is_whole(engine: Engine, temperature: float) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "required": ["a"],
        "properties": {"a": {"type": "string"}}, "additionalProperties": False}}]  # fmt: skip
    grammar = Grammar.tools([{"type": "function", "function": t} for t in tools], format="hermes")
    for seed in range(6):
        output = both(engine, grammar, max_tokens=9, temperature=temperature, seed=seed)
        assert output.stats.narrowed_tokens > 0
        assert "<tool_call>" not in output.text
        # The engine's own stop token may come earlier.
        reason = "length" if len(output.token_ids) == 9 else "stop"
        assert output.finish_reason == reason
        free = engine.generate(
            "go", grammar, max_tokens=9, temperature=temperature, seed=seed, complete=False
        )
        assert len(free.token_ids) == len(output.token_ids)
    # Two texts where one may end: the second is led to its end.
    led = Grammar.regex("[ab]{5}|[ab]{5}(,c{5})+d")
    output = both(engine, led, max_tokens=12, temperature=temperature)
    assert output.finish_reason == "stop"


def test_a_stop_string_ends_an_output_where_it_stands(engine: Engine) -> None:
    most = needed(engine, GRAMMAR)
    output = engine.generate("go", GRAMMAR, max_tokens=most, stop=['"tags"'])
    assert output.finish_reason == "stop"
    assert output.stop_match == '"tags"'
    assert output.parsed is None


def test_a_bias_chooses_among_what_is_left(engine: Engine) -> None:
    quote = engine.tokenizer.encode('"')
    most = needed(engine, GRAMMAR) + 1
    output = both(
        engine, GRAMMAR, max_tokens=most, temperature=0.0, logit_bias=dict.fromkeys(quote, -100.0)
    )
    assert output.parsed.keys() == SCHEMA["properties"].keys()


def test_tool_calls_that_begin_are_whole(engine: Engine) -> None:

    tag = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}}
    source = {"type": "structural_tag", "format": {"type": "tag", **tag, "end": "</call>"}}
    grammar = Grammar.structural_tag(source)
    most = needed(engine, grammar) + 3
    output = both(engine, grammar, max_tokens=most, temperature=0.0)
    assert output.text.startswith("<call>")
    assert output.text.endswith("</call>")
    assert json.loads(output.text[6:-7]).keys() == SCHEMA["properties"].keys()
