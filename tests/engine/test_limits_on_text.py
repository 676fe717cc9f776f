"""What ends a text or keeps tokens out of it: the same with drafts and in pieces as without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from overlap_spec import Engine, Grammar
from overlap_spec.errors import InvalidRequest, RequestFailed
from overlap_spec.types import Output
from tests.support.tiers import few

FREE: dict[str, Any] = {"temperature": 1.3, "max_tokens": 40, "ignore_eos": True}
SEEDS = range(4)


@pytest.fixture(scope="module", params=few(("none", "once-sync"), "once-sync"))
def engine(tiny: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        **tiny,
        num_steps=3,
        eagle_topk=2,
        adaptive="static",
        overlap=request.param,
    ) as made:
        yield made


def same(engine: Engine, grammar: Any = None, **fields: Any) -> Output:
    """The output, which drafts and pieces do not change."""
    asked = FREE | fields
    output = engine.generate("go", grammar, **asked)
    plain = engine.generate("go", grammar, speculate=False, **asked)
    assert (output.text, output.token_ids) == (plain.text, plain.token_ids)
    assert output.stop_match == plain.stop_match
    pieces = [delta.text for delta in engine.stream("go", grammar, **asked)]
    assert "".join(pieces) == output.text
    return output


def ids_of(engine: Engine, letters: str) -> list[int]:
    return [engine.tokenizer.encode(letter)[0] for letter in letters]


def of_letters(engine: Engine, seed: int, **fields: Any) -> Output:
    """As :func:`same`, of the letters from a to h."""
    return same(engine, seed=seed, allowed_token_ids=ids_of(engine, "abcdefgh"), **fields)


def has(ids: tuple[int, ...], sequence: tuple[int, ...]) -> bool:
    width = len(sequence)
    return any(ids[n : n + width] == sequence for n in range(len(ids)))


@pytest.mark.parametrize("width", few((1, 2, 3), 2))
def test_bad_words_are_not_written(engine: Engine, width: int) -> None:
    met = 0
    for seed in SEEDS:
        free = same(engine, seed=seed)
        words = {engine.tokenizer.decode(free.token_ids[n : n + width]) for n in range(30)}
        words = {w for w in words if w.strip() and w.isprintable() and "�" not in w}
        spelled = {w: tuple(engine.tokenizer.encode(w)) for w in words}
        met += any(has(free.token_ids, ids) for ids in spelled.values())
        held = same(engine, seed=seed, bad_words=sorted(words))
        for ids in spelled.values():
            assert not has(held.token_ids, ids)
    assert met > 1, "the words are some that would have come"


def test_words_are_counted_along_every_path_of_a_grammar(engine: Engine) -> None:
    grammar = Grammar.regex("(ab|ac|bb){12}")
    free = [same(engine, grammar, seed=seed).text for seed in SEEDS]
    assert any("ab" in text for text in free)
    words = ["ab", "bab"]
    spelled = [tuple(engine.tokenizer.encode(word)) for word in words]
    for seed in SEEDS:
        held = same(engine, grammar, seed=seed, bad_words=words)
        assert not any(has(held.token_ids, ids) for ids in spelled)
        assert held.finish_reason in ("stop", "length", "error")


def test_no_token_but_the_allowed_ones_is_written(engine: Engine) -> None:
    allowed = ids_of(engine, "abc")
    for seed in SEEDS:
        output = same(engine, seed=seed, allowed_token_ids=allowed)
        assert set(output.token_ids) <= set(allowed)
        assert len(set(output.token_ids)) > 1
        one = same(engine, seed=seed, allowed_token_ids=allowed, bad_words=["a", "b"])
        assert set(one.text) == {"c"}
    # A neighbour without such a wish is as it was.
    alone = engine.generate("go", seed=1, **FREE)
    _, beside = engine.generate(
        ["go", "go"], None, [{"allowed_token_ids": allowed}, {}], seed=1, **FREE
    )
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
    ended = 0
    for seed in SEEDS:
        free = of_letters(engine, seed)
        output = of_letters(engine, seed, stop_regex=pattern)
        ends = (n for n in range(len(free.text) + 1) if re.search(pattern, free.text[:n]))
        end = next(ends, None)
        assert output.text == free.text[:end]
        assert output.finish_reason == ("length" if end is None else "stop")
        assert output.stop_match == (None if end is None else pattern)
        ended += end is not None
        least = of_letters(engine, seed, stop_regex=pattern, min_tokens=12)
        assert len(least.token_ids) >= 12
    assert ended > 1


def test_a_stop_string_is_kept_where_that_is_asked_for(engine: Engine) -> None:
    met = 0
    for seed in SEEDS:
        free = of_letters(engine, seed)
        stop = free.text[9:11]
        cut, kept = (
            of_letters(
                engine,
                seed,
                stop=[stop],
                include_stop_str_in_output=keep,
            )
            for keep in (False, True)
        )
        assert kept.text == free.text[: free.text.index(stop) + len(stop)]
        assert cut.text + stop == kept.text
        token = free.token_ids[8]
        kept = of_letters(
            engine,
            seed,
            stop_token_ids=[token],
            include_stop_str_in_output=True,
        )
        assert kept.text == engine.tokenizer.decode(kept.token_ids)
        met += kept.stop_match == token
    assert met > 1


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
