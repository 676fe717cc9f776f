"""Items and keys that must differ do, and no text comes to a place from which they cannot."""

import itertools
import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Matcher, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.distinct.matcher import DistinctGrammar, DistinctMatcher
from overlap_spec.grammar.rows import allowed
from tests.support.grammars import legal, row_of, takes

PIECES = [
    *('",', ',"', '","', '["', '"]', '],[', '],', '[[', '["a"', '"a"', '"a', 'a"', '"a",', '"a","'),
    *('"a","b"', '","a"', 'ab"', 'a","', '"b","b"', '["a","a"', "1,", ",1", "10", "[1,1", "1,2,"),
    *("true", "true,", "tr", ",tr", "ue,fa", "[true", "false]", ",true,", "[0,0", "0,1", "null,"),
    *('{"', '":', '"}', '"x":', ',"x"', '{"a":1,', '"a":1,"a"', '1,"a":', '"a":', '1}', '},{'),
    *(" ", ", ", ' "', '", "', ",\n", "\n", ' "a"', "[\n", "\\n", "\\", "é", "\\u00"),
]  # fmt: skip
VOCABULARY = Vocabulary(
    (*(bytes([i]) for i in range(256)), *(piece.encode() for piece in PIECES), b""),
    257 + len(PIECES),
    (256 + len(PIECES),),
)
STOP = VOCABULARY.stop_ids[0]


@cache
def compiler(backend: str = "xgrammar") -> GrammarCompiler:
    return GrammarCompiler(load(backend)(VOCABULARY), cache_bytes=0, isolated=False)


def compiled(schema: Any, backend: str = "xgrammar", **layout: Any) -> CompiledGrammar:
    return compiler(backend).compile(Grammar.json_schema(schema, **layout))


def unique(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": True, **keywords}


def begins(text: str, values: list[str], least: int, most: int) -> bool:
    """Whether a text begins an array of different values, given by their texts."""

    def items(rest: str, left: tuple[str, ...], count: int) -> bool:
        if not rest:
            return bool(left) and count < most
        for value in left if count < most else ():
            others = tuple(other for other in left if other != value)
            if value.startswith(rest):
                if count + 1 + len(others) >= least:
                    return True
            elif rest.startswith(value) and after(rest[len(value) :], others, count + 1):
                return True
        return False

    def after(rest: str, left: tuple[str, ...], count: int) -> bool:
        if rest == "]":
            return count >= least
        return rest.startswith(",") and items(rest[1:], left, count)

    if text in ("", "[", "[]"):
        return text != "[]" or least == 0
    return text.startswith("[") and items(text[1:], tuple(values), 0)


def pairs(*parts: list[Any]) -> list[str]:
    return [json.dumps(list(p), separators=(",", ":")) for p in itertools.product(*parts)]


AB = ['"a"', '"b"', '"aa"', '"ab"', '"ba"', '"bb"']
TUPLE = {
    "type": "array",
    "prefixItems": [{"type": "boolean"}, {"enum": ["a", "b"]}],
    "items": False,
    "minItems": 2,
}
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 1}, "x": {"type": "null"}},
    "required": ["a"],
    "additionalProperties": False,
}
FINITE: dict[str, tuple[Any, list[str]]] = {
    "patterns": ({"type": "string", "pattern": "^[ab]{1,2}$"}, AB),
    "numbers": ({"type": "integer", "minimum": 0, "maximum": 12}, [str(n) for n in range(13)]),
    "steps": ({"multipleOf": 0.5, "minimum": 0, "maximum": 2, "type": "number"},
              ["0", "0.5", "1", "1.5", "2"]),
    "mixed": ({"anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "pattern": "^a$"}]},
              ["true", "false", "null", '"a"']),
    "tuples": (TUPLE, pairs([True, False], ["a", "b"])),
    "objects": (OBJECT, ['{"a":0}', '{"a":1}', '{"a":0,"x":null}', '{"a":1,"x":null}']),
    "fixed": ({"enum": [1, 10, "a", "ab", True, None, [1], {"a": 1}, 2, "b", 3, 4, 5, 6]},
              ["1", "10", '"a"', '"ab"', "true", "null", "[1]", '{"a":1}', "2", '"b"', "3", "4",
               "5", "6"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("bounds", [(0, None), (2, 3), (3, None)])
@pytest.mark.parametrize("backend", ["xgrammar", "reference"])
def test_masks_are_exact_for_tokens_of_any_length(
    name: str, bounds: tuple[int, int | None], backend: str
) -> None:
    items, values = FINITE[name]
    least, most = bounds
    schema = unique(items=items, minItems=least, **({} if most is None else {"maxItems": most}))
    made = compiled(schema, backend)
    rng, full = random.Random(name), len(values) if most is None else most
    for _ in range(2 if backend == "xgrammar" else 1):
        matcher, text = made.matcher(), b""
        while True:
            found = legal(matcher)
            wanted = [
                token
                for token, piece in enumerate(VOCABULARY.text)
                if piece and _begins(text + piece, values, least, full)
            ]
            ended = text.endswith(b"]") and _begins(text, values, least, full) and _whole(text)
            assert found == wanted + [STOP] * ended, text
            if ended:
                break
            token = rng.choice(found)
            assert matcher.accept(token)
            text += VOCABULARY.text[token]
        assert Draft202012Validator(schema).is_valid(json.loads(text))


def _begins(text: bytes, values: list[str], least: int, most: int) -> bool:
    try:
        return begins(text.decode(), values, least, most)
    except UnicodeDecodeError:
        return False


def _whole(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


FREE: dict[str, Any] = {
    "strings": unique(items={"type": "string"}, minItems=2),
    "numbers": unique(items={"type": "number"}),
    "anything": unique(minItems=2),
    "bounded": unique(items={"type": "string", "maxLength": 1}, minItems=3),
    "dates": unique(items={"type": "string", "format": "date"}),
    "after fixed": unique(prefixItems=[{"type": "boolean"}, {"type": "boolean"}], minItems=2),
    "nested": unique(items=unique(items={"type": "string"}), minItems=1),
    "objects": unique(items={"properties": {"a": {"type": "integer"}}, "type": "object"}),
    "inside": {"type": "object", "properties": {"a": unique(items={"type": "integer"}),
        "b": {"type": "array"}}, "patternProperties": {"^x": unique(items={"type": "integer"})},
        "additionalProperties": {"type": "integer"}},
    "counted": {"type": "object", "minProperties": 3, "maxProperties": 4},
    "counted beside names": {"properties": {"a": {"type": "integer"}, "x": {}}, "type": "object",
        "required": ["x"], "minProperties": 4, "additionalProperties": {"type": "boolean"}},
    "counted by pattern": {"type": "object", "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": False, "minProperties": 2},
}  # fmt: skip


def walk(matcher: Matcher, rng: random.Random, soft: int) -> bytes:
    """Choose tokens at random to the end; past `soft` tokens those that end soon come first."""
    text = b""
    for step in itertools.count():
        found = legal(matcher)
        assert found, text
        assert step < 500, text
        if STOP in found and (step > soft or len(found) == 1 or rng.random() < 0.2):
            return text
        found = [token for token in found if token != STOP]
        if step > soft:
            ending = [ord(mark) for mark in '"]}:\n ,10' if ord(mark) in found]
            found = ending[:1] or found
        elif rng.random() < 0.6:
            plain = [t for t in found if VOCABULARY.text[t] in (b"a", b"1", b'"', b",", b"x")]
            found = plain or found
        token = rng.choice(found)
        assert matcher.accept(token)
        text += VOCABULARY.text[token]
    raise AssertionError


def repeats_no_key(members: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in members}) == len(members)
    return dict(members)


# Indentation needs a bounded depth.
FLAT = ("strings", "numbers", "bounded", "dates", "nested", "counted by pattern")


@pytest.mark.parametrize(
    ("name", "layout"),
    [*itertools.product(FREE, ("compact", "bounded")), *((name, 2) for name in FLAT)],
)
def test_walks_never_come_to_a_dead_end_and_end_valid(name: str, layout: Any) -> None:
    schema = FREE[name]
    made = compiled(schema, whitespace=layout)
    assert isinstance(made, DistinctGrammar)
    rng = random.Random(f"{name} {layout}")
    for _ in range(4):
        text = walk(made.matcher(), rng, 12)
        hook = repeats_no_key if name.startswith("counted") else None
        value = json.loads(text, object_pairs_hook=hook)
        assert Draft202012Validator(schema).is_valid(value), text


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("strings", ['["a","aa","é","\\n"]'], ['["a","b","a"]', '["\\n","\\n"]', '["a"]']),
        ("numbers", ["[1,1.5,-1,10,100]"], ["[0,0]", "[0.5,1,0.5]", "[1,1.0]"]),
        ("anything", ['[1,"1",[1],{"a":1},true]', '[{"a":1,"b":[]},{"b":[],"a":2}]'],
            ['[{"a":1,"b":2},{"b":2,"a":1}]', '[{"a":1},{"a":1.0}]', "[[],[]]",
            '[["a"],["\\u0061"]]']),
        ("after fixed", ['[true,false,"a",null]'], ["[true,true]", "[true,false,true]"]),
        ("nested", ['[["a"],["b","a"],["a","b"]]'], ['[["a","a"]]', '[["a"],["a"]]']),
        ("inside", ['{"a":[1,2],"b":[1,1],"x":[3],"k":1}'], ['{"a":[1,1]}', '{"xy":[2,2]}']),
        ("counted", ['{"a":1,"b":1,"":1}'], ['{"a":1,"b":1}', '{"a":1,"b":1,"a":2}']),
    ],
)  # fmt: skip
def test_equal_values_are_refused_however_they_are_written(
    name: str, good: list[str], bad: list[str]
) -> None:
    made = compiled(FREE[name])
    assert [text for text in good if not takes(made, text)] == []
    assert [text for text in bad if takes(made, text)] == []


@pytest.mark.parametrize("name", ["anything", "counted", "bounded"])
def test_rollback_fork_and_trees_are_exact(name: str) -> None:
    made = compiled(FREE[name])
    rng = random.Random(name)
    matcher, path = made.matcher(), list[int]()
    for _ in range(60):
        found = legal(matcher)
        back = rng.randrange(len(path) + 1) if not found or rng.random() < 0.2 else 0
        matcher.rollback(back)
        del path[len(path) - back :]
        choices = legal(matcher)
        token = rng.choice([*choices, rng.randrange(VOCABULARY.size)])
        before = row_of(matcher)
        assert matcher.accept(token) == (token in choices)
        if token in choices:
            path.append(token)
        else:
            assert np.array_equal(row_of(matcher), before)
        again, twin = made.matcher(), matcher.fork()
        assert all(map(again.accept, path))
        assert np.array_equal(row_of(matcher), row_of(again))
        assert np.array_equal(row_of(matcher), row_of(twin))
        assert matcher.accepted_tokens == len(path)
        if matcher.is_terminated:
            continue
        children = [t for t in rng.sample(range(VOCABULARY.size), 12) if t != STOP]
        tokens = np.array([0, *children], np.int64)
        first = np.array([1, *[-1] * len(children)], np.int64)
        siblings = np.array([-1, *range(2, len(children) + 1), -1], np.int64)
        rows = np.full((len(tokens), VOCABULARY.words), -1, np.int32)
        matcher.fill_tree(tokens, first, siblings, rows)
        root = row_of(matcher)
        assert np.array_equal(rows[0], root)
        for node, child in enumerate(children, 1):
            if allowed(root, child):
                assert again.accept(child)
                assert np.array_equal(rows[node], row_of(again))
                again.rollback(1)
            else:
                assert not rows[node].any()


def test_a_draft_of_what_is_forced_may_repeat_nothing() -> None:
    schema = unique(items={"enum": ["ab", "ac"]}, minItems=2, prefixItems=[{"const": "ab"}])
    matcher = compiled(schema).matcher()
    assert isinstance(matcher, DistinctMatcher)
    assert all(map(matcher.accept, b'["ab","a'))
    assert legal(matcher) == [ord("c")]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (unique(prefixItems=[{"type": "null"}, {"type": "null"}], minItems=2),
            "no value for item 1"),
        (unique(items={"type": "string", "pattern": "^[ab]$"}, minItems=3), "no value for item 2"),
        (unique(contains={"type": "string"}), "beside contains"),
        ({"anyOf": [unique(), {"type": "array", "items": {"type": "null"}}]}, "another way to be"),
        (unique(items={"type": "array", "prefixItems": [{"type": "object"}], "items": False}),
            "over these arrays"),
        ({"properties": {"a": unique(items={"$ref": "#"})}, "additionalProperties": False,
            "type": "object"}, "over these objects"),
        ({"type": "object", "minProperties": 2, "propertyNames": {"maxLength": 1}},
            "keyword 'minProperties' may leave no free key"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compiled(schema)


def test_only_the_compiler_takes_what_a_matcher_must_look_at() -> None:
    with pytest.raises(GrammarError, match="'uniqueItems' is supported in whole schemas only"):
        load("reference")(VOCABULARY).compile(Grammar.json_schema(FREE["strings"]))
    few = unique(items={"enum": ["a", "b"]})
    assert load("reference")(VOCABULARY).compile(Grammar.json_schema(few))


def test_plans_travel_from_the_workers() -> None:
    backend = load("reference")(VOCABULARY)
    with GrammarCompiler(backend, isolated=True) as isolated:
        made = isolated.compile(Grammar.json_schema(FREE["strings"]).after_thinking())
    matcher = made.matcher()
    assert all(map(matcher.accept, b'hm</think>["a","a'))
    assert not matcher.accept(ord('"'))
    assert all(map(matcher.accept, b'a"]'))


def test_a_vocabulary_without_some_byte_is_refused() -> None:
    texts = tuple(bytes([i]) for i in range(255))
    backend = load("reference")(Vocabulary((*texts, b""), 256, (255,)))
    with (
        GrammarCompiler(backend, isolated=False) as small,
        pytest.raises(GrammarError, match="a token for every byte"),
    ):
        small.compile(Grammar.json_schema(FREE["strings"]))


def test_a_published_metaschema_keeps_its_items_apart() -> None:
    made = compiled({"$ref": "http://json-schema.org/draft-07/schema#"})
    assert takes(made, '{"required":["a","b"]}')
    assert not takes(made, '{"required":["a","a"]}')


def test_a_key_with_a_control_character_may_depend_on_others() -> None:
    schema = {"type": "object", "dependentRequired": {"a\nb": ["c"]}, "minProperties": 2}
    made = compiled(schema)
    assert takes(made, '{"c":2,"a\\nb":1}')
    assert not takes(made, '{"a\\nb":1,"d":2}')


def goes(made: CompiledGrammar, text: str) -> bool:
    matcher = made.matcher()
    return all(map(matcher.accept, text.encode()))


def said(token: int) -> str:
    return VOCABULARY.text[token].decode("latin-1")


def repeats_a_key(text: str) -> bool:
    """Whether an object in the beginning of a JSON text has a key twice, by reading it again."""
    open_keys: list[set[str] | None] = []
    at_key = False
    for found in re.finditer(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\],:]', text):
        mark = found.group()
        if mark[0] == '"':
            if len(mark) == 1 or not mark.endswith('"') or re.search(r"(?<!\\)(\\\\)*\\\"$", mark):
                return False
            keys = open_keys[-1] if open_keys else None
            if at_key and keys is not None:
                key = json.loads(mark)
                if key in keys:
                    return True
                keys.add(key)
            at_key = False
        elif mark in "{[":
            open_keys.append(set() if mark == "{" else None)
            at_key = mark == "{"
        elif mark in "}]":
            open_keys.pop()
        else:
            at_key = mark == "," and open_keys[-1] is not None
    return False


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("whitespace", ["compact", "bounded"])
def test_an_object_repeats_no_key_at_any_depth(backend: str, whitespace: Any) -> None:
    grammar = Grammar.json_object(whitespace=whitespace)
    made = compiler(backend).compile(grammar)
    # The rules alone, which let keys repeat.
    plain = load(backend)(VOCABULARY).compile(replace(grammar, apart=True))
    for text in ('{"a":1,"b":[{"a":{"x":2}}],"é":""}', '{"a":{"a":{"a":[]}}}', "{}"):
        assert takes(made, text)
    twice = ['{"a":1,"a"', '{"x":[{"b":1,"b"', '{"a":{"b":1},"a"']
    for text in (*twice, '{"é":1,"\\u00e9"', '{"a":1,"\\u0061"'):
        assert goes(plain, text), text
        assert not goes(made, text), text
    chosen = random.Random(7)
    looked = refused = 0
    for start in (
        '{"a":1,',
        '{"a":[{"b":1,"a":2},',
        '{"x":{"a":1},"b":"',
        '{"a":1,"\\u00',
        '{"b":1',
    ):
        matcher, free = made.matcher(), plain.matcher()
        text = start
        for token in text.encode():
            assert matcher.accept(token)
            assert free.accept(token)
        for _ in range(12):
            row, every = legal(matcher), legal(free)
            want = [t for t in every if not repeats_a_key(text + said(t))]
            assert row == want, text
            looked, refused = looked + len(every), refused + len(every) - len(want)
            # Short names come again.
            token = chosen.choice([t for t in row if said(t).strip('"ab,:{}1 x') == ""] or row)
            if token == STOP:
                break
            text += said(token)
            assert matcher.accept(token)
            assert free.accept(token)
    assert looked > 2000
    assert refused > 20
