"""Texts under a grammar come to their end within the tokens they have, whatever is chosen."""

import json
import random
from functools import cache

import numpy as np
import pytest
from jsonschema import validators

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import CompiledGrammar, Matcher
from overlap_spec.grammar.room import chart as charts
from overlap_spec.grammar.room.matcher import RoomMatcher, least_tokens
from tests.support.grammars import bits, random_ebnf, row_of
from tests.support.tiers import few

PIECES = (
    *(bytes([i]) for i in range(256)),
    *(b"ab", b"bc", b"abc", b'{"', b'":', b'","', b'"}', b'""', b"[]", b"tr", b"true", b'":""}'),
    *(b"</", b"think", b"</think>", b"\n\n", b"0,", b"1]", b"  "),
)
VOCABULARY = Vocabulary((*PIECES, b""), len(PIECES) + 1, (len(PIECES),))
SCHEMAS: dict[str, dict[str, object]] = {
    "members": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2},
            "tags": {"type": "array", "items": {"enum": ["ab", "abc", "true"]}, "minItems": 1},
            "ok": {"type": "boolean"},
            "age": {"type": "integer"},
        },
        "required": ["name", "tags", "age"],
    },
    "nested": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "left": {"$ref": "#/$defs/node"},
                    "rest": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "anything": {},
    "distinct": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 12},
        "uniqueItems": True,
        "minItems": 4,
    },
}
BACKENDS = ("reference", "xgrammar", "llguidance", "auto")


@cache
def compiler(backend: str) -> GrammarCompiler:
    return GrammarCompiler(load(backend)(VOCABULARY), isolated=False)


def fewest(matcher: Matcher, most: int) -> int | None:
    """Fewest tokens of a whole text, by trying all of up to ``most``."""

    def ends(left: int) -> bool:
        if matcher.is_complete:
            return True
        for token in bits(row_of(matcher)) if left else ():
            assert matcher.accept(token)
            found = ends(left - 1)
            matcher.rollback(1)
            if found:
                return True
        return False

    return next((count for count in range(most + 1) if ends(count)), None)


def roomy(compiled: CompiledGrammar, most: int) -> RoomMatcher:
    assert compiled.room is not None
    return RoomMatcher(compiled.matcher(), compiled.room, most)


def least(compiled: CompiledGrammar) -> int:
    found = least_tokens(compiled, 0)
    assert found is not None
    return found


def drawn(matcher: Matcher, most: int, rng: random.Random) -> tuple[bytes, bool]:
    """A text drawn from the masks, and whether it may end where it does."""
    text = b""
    for _ in range(most):
        token = rng.choice(bits(row_of(matcher)))
        assert matcher.accept(token)
        if matcher.is_terminated:
            break
        text += VOCABULARY.text[token]
    return text, matcher.is_complete


@pytest.mark.parametrize("seed", range(4))
def test_random_grammars_end_in_any_room_that_a_text_fits(seed: int) -> None:
    rng = random.Random(seed)
    tried = 0
    for _ in range(40):
        source = random_ebnf(rng)
        try:
            compiled = compiler("reference").compile(Grammar.ebnf(source), 0)
        except GrammarError:
            continue
        enough, truth = least(compiled), fewest(compiled.matcher(), 3)
        if truth is not None:
            assert enough == truth, source
        for most in (enough, enough + 1, enough + 4):
            for _ in range(4):
                text, whole = drawn(roomy(compiled, most), most, rng)
                assert whole, (source, most, text)
                tried += 1
    assert tried > 200


@pytest.mark.parametrize("backend", few(BACKENDS, "auto"))
@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_of_schemas_are_whole_and_valid(backend: str, name: str) -> None:
    schema, rng = SCHEMAS[name], random.Random(name)
    compiled = compiler(backend).compile(Grammar.json_schema(schema), 0)
    check = validators.validator_for(schema)(schema)
    for more in (0, 1, 2, 5, 20):
        most = least(compiled) + more
        for _ in range(8):
            text, whole = drawn(roomy(compiled, most), most, rng)
            assert whole, (most, text)
            # Random bytes in a string need not be characters that JSON's reader takes as they are.
            check.validate(json.loads(text, strict=False))


def test_objects_do_not_repeat_a_key_at_the_end_of_the_room() -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_object(), 0)
    rng = random.Random(0)
    for most in (2, 3, 6, 9, 14):
        for _ in range(30):
            text, whole = drawn(roomy(compiled, most), most, rng)
            assert whole, (most, text)
            pairs = json.loads(text, strict=False, object_pairs_hook=list)
            assert len({key for key, _ in pairs}) == len(pairs)


def test_thinking_ends_in_time_for_the_answer() -> None:
    grammar = Grammar.json_schema(SCHEMAS["members"]).after_thinking()
    compiled = compiler("xgrammar").compile(grammar, 0)
    rng = random.Random(0)
    for more in (0, 1, 3, 12):
        most = least(compiled) + more
        for _ in range(6):
            text, whole = drawn(roomy(compiled, most), most, rng)
            assert whole, (most, text)
            json.loads(text.partition(b"</think>")[2], strict=False)


def test_masks_with_room_to_spare_are_those_of_the_grammar() -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_schema(SCHEMAS["nested"]), 0)
    rng, matcher, plain = random.Random(3), roomy(compiled, 4000), compiled.matcher()
    for _ in range(300):
        row = row_of(plain)
        assert np.array_equal(row_of(matcher), row)
        token = rng.choice(bits(row & ~VOCABULARY.stop_row) or [VOCABULARY.stop_ids[0]])
        assert plain.accept(token)
        assert matcher.accept(token)
        if plain.is_terminated:
            break
    assert matcher.narrowed == 0


def test_rows_of_a_tree_have_the_room_of_their_depth() -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_schema(SCHEMAS["members"]), 0)
    rng, most = random.Random(5), least(compiled) + 3
    for _ in range(20):
        matcher = roomy(compiled, most)
        before = [rng.choice(bits(row_of(matcher))) for _ in range(1)]
        assert matcher.accept(before[0])
        tokens, parents, paths = [0], [-1], [before]
        for _ in range(12):
            parent = rng.randrange(len(tokens))
            node = roomy(compiled, most)
            if not all(node.accept(token) for token in paths[parent]) or not bits(row_of(node)):
                continue
            tokens.append(rng.choice(bits(row_of(node))))
            parents.append(parent)
            paths.append([*paths[parent], tokens[-1]])
        first, sibling = np.full((2, len(tokens)), -1, np.int64)
        for node in range(len(tokens) - 1, 0, -1):
            sibling[node], first[parents[node]] = first[parents[node]], node
        rows = np.full((len(tokens), VOCABULARY.words), 7, np.int32)
        matcher.fill_tree(np.array(tokens, np.int64), first, sibling, rows)
        assert matcher.accepted_tokens == 1
        for path, row in zip(paths, rows, strict=True):
            alone = roomy(compiled, most)
            assert all(alone.accept(token) for token in path)
            assert np.array_equal(row, row_of(alone)), path


def test_narrowed_tokens_are_counted_and_rolled_back() -> None:
    compiled = compiler("xgrammar").compile(Grammar.regex("a{2,9}"), 0)
    matcher = roomy(compiled, 3)
    for _ in range(2):
        assert matcher.accept(97) if bits(row_of(matcher)) else False
    rows = np.zeros((1, VOCABULARY.words), np.int32)
    none = np.full(1, -1, np.int64)
    matcher.fill_tree(np.zeros(1, np.int64), none, none, rows)
    assert matcher.is_complete
    before = matcher.narrowed
    assert matcher.accept(97)
    matcher.rollback(1)
    assert matcher.narrowed == before


def test_a_vocabulary_without_single_bytes_tells_what_it_can_spell() -> None:
    pieces = (b"ab", b"abab", b"c", b"")
    vocabulary = Vocabulary(pieces, 4, (3,))
    made = GrammarCompiler(load("reference")(vocabulary), isolated=False)
    compiled = made.compile(Grammar.regex("(ab){6}c"), 0)
    assert compiled.room is not None
    assert compiled.room.least(0) == 4


def test_no_rest_is_longer_than_the_reach_says() -> None:
    rng, told = random.Random(11), 0
    sources = [Grammar.ebnf(random_ebnf(rng)) for _ in range(60)]
    for grammar in [*sources, *map(Grammar.json_schema, SCHEMAS.values())]:
        try:
            compiled = compiler("reference").compile(grammar, 0)
        except GrammarError:
            continue
        assert compiled.room is not None
        chart = compiled.room.chart()
        assert chart is not None
        least, fixed, each, begins = compiled.room.reach
        assert chart.start.rest == least
        for _ in range(20):
            place, size, begun = chart.start, 0, 0
            while place.rest <= fixed + each * (begun + 1):
                told += 1
                low, high, _, _ = rng.choice(place.scans or [(0, -1, 0, place)])
                byte = rng.randint(low, max(low, high))
                after = chart.move(place, byte) if low <= high else None
                if after is None or size > 60:
                    break
                place, size, begun = after, size + 1, begun + (byte in begins)
            else:
                pytest.fail(f"{grammar.source}: {place.rest} bytes are left after {size}")
    assert told > 1000


def test_a_text_begins_early_only_where_nothing_can_be_narrowed_soon() -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_schema(SCHEMAS["members"]))
    room = compiled.room
    assert room is not None
    assert room.is_early(4000)
    assert not room.is_early(room.reach.least + 1)


def test_what_was_refused_is_not_made_again() -> None:
    compiled = compiler("xgrammar").compile(Grammar.regex("[ab]{70000}"), 0)
    room = compiled.room
    assert room is not None
    assert room.chart() is None
    assert room.ask(again=True) is room.ask()
    assert room.reach.least == 70000


STRINGS: dict[str, dict[str, object]] = {
    "members": SCHEMAS["members"],
    "free keys": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "nab": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 7},
    },
    "counted": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}},
    "pattern": {"type": "string", "pattern": "^[a-c][a-z0-9]{0,5}(-[a-z]+)*$"},
}


@pytest.mark.parametrize("most", [(0, 0), (150, 4), (2048, 256)])
@pytest.mark.parametrize("name", STRINGS)
def test_all_ways_of_reading_tokens_lead_to_the_same_places(
    name: str, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "FEW_TOKENS", most[0])
    monkeypatch.setattr(charts, "ENTERED_TOKENS", most[1])
    rng = random.Random(name)
    letters = [b"a", b"b", b"n", b"na", b"nam", b"z", b"7", b" ", "é".encode(), "漢".encode()]
    others = [b'"', b'",', b"-", b"\\", b"\\u00", "漢".encode()[:2], b"\x80", b'{"', b":", b"}"]
    weights = [8] * len(letters) + [1] * len(others)
    drawn = (rng.choices(letters + others, weights, k=rng.randint(1, 6)) for _ in range(800))
    pieces = (*PIECES, *sorted({b"".join(parts) for parts in drawn} - {*PIECES}))
    # A stop token, which has no text, stands before others.
    vocabulary = Vocabulary((b"", *pieces), len(pieces) + 1, (0,))
    made = GrammarCompiler(load("reference")(vocabulary), isolated=False)
    compiled = made.compile(Grammar.json_schema(STRINGS[name]), 0)
    assert compiled.room is not None
    chart = compiled.room.chart()
    assert chart is not None
    place, read = chart.start, 0
    for _ in range(60):
        behind = [chart.after(place, text) if text else None for text in vocabulary.text]
        legal = [token for token, there in enumerate(behind) if there is not None]
        row = row_with(legal, vocabulary.words) | vocabulary.stop_row
        step = chart.step(place, row)
        assert {place.number for place in step.places} >= {behind[t].number for t in legal}
        for number, there in enumerate(step.places):
            fits = np.arange(len(step.places)) == number
            assert bits(step.row(fits, row)) == [t for t in legal if behind[t] is there]
        read += len(legal)
        ways = [byte for byte in range(256) if chart.move(place, byte) is not None]
        after = chart.move(place, rng.choice(ways)) if ways else None
        place = chart.start if after is None else after
    assert read > 1000


def row_with(tokens: list[int], words: int) -> np.ndarray:
    flags = np.zeros(words * 32, np.uint8)
    flags[tokens] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def test_what_stands_in_strings_does_not_shorten_the_room() -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_schema(SCHEMAS["anything"]), 0)
    matcher = roomy(compiled, 600)
    for token in (*b'{"key":"', *b"any text, as long as it likes to be; " * 8, *b'"}'):
        row_of(matcher)
        assert matcher.accept(token)
    assert matcher.chart is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_behind_a_rollback_are_those_of_a_new_matcher(name: str) -> None:
    compiled = compiler("xgrammar").compile(Grammar.json_schema(SCHEMAS[name]), 0)
    rng = random.Random(name)
    for most in (least(compiled) + 6, 40, 90):
        matcher, tokens = roomy(compiled, most), list[int]()
        for _ in range(60):
            legal = bits(row_of(matcher) & ~VOCABULARY.stop_row)
            if not legal or len(tokens) > 30 or rng.random() < 0.2:
                count = rng.randint(0, len(tokens))
                matcher.rollback(count)
                del tokens[len(tokens) - count :]
                continue
            # What opens is drawn as often as all the rest.
            opens = [token for token in legal if VOCABULARY.text[token][-1:] in b"[{"]
            tokens.append(rng.choice(opens if opens and rng.random() < 0.5 else legal))
            assert matcher.accept(tokens[-1])
            new = roomy(compiled, most)
            assert all(new.accept(token) for token in tokens)
            assert np.array_equal(row_of(matcher), row_of(new)), (most, tokens)
