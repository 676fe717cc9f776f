"""What ends a text or keeps tokens out of it: the same with drafts and in pieces as without."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from overlap_spec import Engine, Grammar
from overlap_spec.errors import InvalidRequest, RequestFailed
from overlap_spec.types import Output
from tests.support.tiers import few

FREE: dict[str, Any] = {"temperature": 1.3, "max_tokens": 40, "ignore_eos": True}
SEEDS: list[dict[str, Any]] = [{"seed": seed} for seed in range(4)]


@pytest.fixture(scope="module", params=few(("none", "once-sync"), "once-sync"))
def engine(tiny: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3, eagle_topk=2, overlap=request.param) as made:
        yield made


def same(engine: Engine, asked: list[dict[str, Any]], grammar: Any = None) -> list[Output]:
    """The outputs of requests side by side, which drafts and pieces do not change."""
    every = [FREE | each for each in asked]
    handles = [engine.submit("go", grammar, each) for each in every]
    texts = ["".join(delta.text for delta in engine.pieces(handle)) for handle in handles]
    undrafted = [each | {"speculate": False} for each in every]
    plain = engine.generate(["go"] * len(every), grammar, undrafted)
    outputs = [handle.output for handle in handles if handle.output is not None]
    assert [output.text for output in outputs] == texts
    for mine, its in zip(outputs, plain, strict=True):
        assert (mine.text, mine.token_ids) == (its.text, its.token_ids)
        assert mine.stop_match == its.stop_match
    return outputs


def ids_of(engine: Engine, letters: str) -> list[int]:
    return [engine.tokenizer.encode(letter)[0] for letter in letters]


def of_letters(engine: Engine, asked: list[dict[str, Any]]) -> list[Output]:
    """As :func:`same`, of the letters from a to h."""
    return same(engine, [{"allowed_token_ids": ids_of(engine, "abcdefgh"), **a} for a in asked])


def has(ids: tuple[int, ...], sequence: tuple[int, ...]) -> bool:
    width = len(sequence)
    return any(ids[n : n + width] == sequence for n in range(len(ids)))


@pytest.mark.parametrize("width", few((1, 2, 3), 2))
def test_bad_words_are_not_written(engine: Engine, width: int) -> None:
    asked, spelled, met = [], [], 0
    for free, each in zip(same(engine, SEEDS), SEEDS, strict=True):
        words = {engine.tokenizer.decode(free.token_ids[n : n + width]) for n in range(30)}
        words = {w for w in words if w.strip() and w.isprintable() and "�" not in w}
        asked.append({**each, "bad_words": sorted(words)})
        spelled.append([tuple(engine.tokenizer.encode(word)) for word in words])
        met += any(has(free.token_ids, ids) for ids in spelled[-1])
    for held, forbidden in zip(same(engine, asked), spelled, strict=True):
        assert not any(has(held.token_ids, ids) for ids in forbidden)
    assert met > 1, "the words are some that would have come"


def test_words_are_counted_along_every_path_of_a_grammar(engine: Engine) -> None:
    grammar = Grammar.regex("(ab|ac|bb){12}")
    assert any("ab" in output.text for output in same(engine, SEEDS, grammar))
    words = ["ab", "bab"]
    spelled = [tuple(engine.tokenizer.encode(word)) for word in words]
    for held in same(engine, [{**each, "bad_words": words} for each in SEEDS], grammar):
        assert not any(has(held.token_ids, ids) for ids in spelled)
        assert held.finish_reason in ("stop", "length")


def test_no_token_but_the_allowed_ones_is_written(engine: Engine) -> None:
    allowed = {"allowed_token_ids": ids_of(engine, "abc")}
    for output in same(engine, [each | allowed for each in SEEDS]):
        assert set(output.token_ids) <= set(allowed["allowed_token_ids"])
        assert len(set(output.token_ids)) > 1
    for one in same(engine, [{**each, **allowed, "bad_words": ["a", "b"]} for each in SEEDS]):
        assert set(one.text) == {"c"}
    # A neighbour without such a wish is as it was.
    alone = engine.generate("go", seed=1, **FREE)
    _, beside = engine.generate(["go", "go"], None, [allowed, {}], seed=1, **FREE)
    assert beside.token_ids == alone.token_ids


def test_a_dead_end_says_whose_it_is(engine: Engine) -> None:
    token = engine.tokenizer.encode("a")[0]
    output = engine.generate("go", Grammar.regex("bbb"), allowed_token_ids=[token], **FREE)
    assert (
        output.error == "the grammar and allowed_token_ids together allow no token here: a dead end"
    )
    with pytest.raises(RequestFailed, match="bad_words"):
        list(engine.stream("go", allowed_token_ids=[token], bad_words=["a"], **FREE))
    output = engine.generate("go", Grammar.regex("bbb"), min_tokens=20, **FREE)
    assert output.error == "the grammar and min_tokens together allow no token here: a dead end"
    assert engine.generate("go", Grammar.regex("bbb"), **FREE).text == "bbb"


@pytest.mark.parametrize(
    "pattern", few(("[ab][^ab]", "([ac]{2}|b)[d-h]", "..d|..e|^[a-d]+f"), "[ab][^ab]")
)
def test_a_pattern_ends_the_text_where_it_first_matches(engine: Engine, pattern: str) -> None:
    ended, asked = 0, [{**each, "stop_regex": pattern} for each in SEEDS]
    for free, output in zip(of_letters(engine, SEEDS), of_letters(engine, asked), strict=True):
        ends = (n for n in range(len(free.text) + 1) if re.search(pattern, free.text[:n]))
        end = next(ends, None)
        assert output.text == free.text[:end]
        assert output.finish_reason == ("length" if end is None else "stop")
        assert output.stop_match == (None if end is None else pattern)
        ended += end is not None
    for least in of_letters(engine, [each | {"min_tokens": 12} for each in asked]):
        assert len(least.token_ids) >= 12
    assert ended > 1


def test_a_stop_string_is_kept_where_that_is_asked_for(engine: Engine) -> None:
    free = of_letters(engine, SEEDS)
    stops = [output.text[9:11] for output in free]
    cut, kept = (
        of_letters(
            engine,
            [
                {**each, "stop": [stop], "include_stop_str_in_output": keep}
                for each, stop in zip(SEEDS, stops, strict=True)
            ],
        )
        for keep in (False, True)
    )
    for output, stop, without, whole in zip(free, stops, cut, kept, strict=True):
        assert whole.text == output.text[: output.text.index(stop) + len(stop)]
        assert without.text + stop == whole.text
    tokens = [output.token_ids[8] for output in free]
    ended = of_letters(
        engine,
        [
            {**each, "stop_token_ids": [token], "include_stop_str_in_output": True}
            for each, token in zip(SEEDS, tokens, strict=True)
        ],
    )
    assert all(one.text == engine.tokenizer.decode(one.token_ids) for one in ended)
    assert sum(one.stop_match == token for one, token in zip(ended, tokens, strict=True)) > 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bad_words": ["x" * 400]}, "has over 16 tokens"),
        ({"bad_words": ["x"] * 1025}, "1024 are allowed"),
        ({"bad_words": [""]}, "non-empty"),
        ({"allowed_token_ids": []}, "allows no token"),
        ({"allowed_token_ids": [10**6]}, "outside the vocabulary"),
        ({"stop_regex": "(a"}, "unterminated"),
        ({"stop_regex": "a*"}, "matches the empty text"),
        ({"stop_regex": "a{600}"}, "smaller repeats"),
        ({"stop_regex": "(?=a)b"}, "look-around"),
        ({"stop_regex": "a" * 257}, "256 are allowed"),
        ({"stop_regex": ["a"] * 9}, "8 are allowed"),
        ({"include_stop_str_in_output": 1}, "true or false"),
    ],
)
def test_what_cannot_be_held_is_refused(engine: Engine, fields: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        engine.generate("go", **fields)
    assert caught.value.param == next(iter(fields))


def test_no_most_probable_tokens_are_all(engine: Engine) -> None:
    texts = {engine.generate("go", seed=3, top_k=k, **FREE).text for k in (0, -1)}
    assert len(texts) == 1
