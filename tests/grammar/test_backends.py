"""All backends give the same masks as the reference backend, on random grammars."""

import itertools
import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, Vocabulary, backends
from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.grammar.dialects.lark import to_lark
from overlap_spec.grammar.ir.lexemes import conflict, cut
from overlap_spec.grammar.ir.network import utf8_spans
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.parsing.ebnf import ForeignConstruct, read
from tests.support.grammars import bits, legal

STOPS = (0, 41)
OTHERS = [name for name in backends.names() if name != "reference"]
few = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@cache
def vocabulary(size: int = 300) -> Vocabulary:
    """Every byte, as tokenizers have them, and pieces that cross what a grammar tells apart."""
    pieces = ["ab", "bc", "aab", '{"', '":', '"}', "],", "12", "true", "é", '"a"', ',"', "null"]
    pieces += ["ab", "false", "\\u", '","', "-1", "0.5", "abc"]
    texts = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in pieces]
    for stop in STOPS:
        texts.insert(stop, b"")
    return Vocabulary(tuple(texts), size, STOPS)


def token(text: bytes) -> int:
    return vocabulary().tokens.index(text)


@cache
def backend(name: str, size: int = 300) -> Backend:
    return backends.load(name)(vocabulary(size))


def compiled(name: str, grammar: Grammar, size: int = 300) -> CompiledGrammar | None:
    """The grammar by a backend, or None where the backend refuses it, as outlines alone may."""
    try:
        return backend(name, size).compile(grammar)
    except GrammarError:
        if name != "outlines":
            raise
        return None


def check_walks(grammar: Grammar, seed: int, walks: int = 2, length: int = 8) -> None:
    """Random legal walks, with a wrong token and a rollback now and then."""
    oracle = compiled("reference", grammar)
    assert oracle is not None
    others = {name: found for name in OTHERS if (found := compiled(name, grammar))}
    assert {"xgrammar", "llguidance", "auto"} <= others.keys()
    rng = random.Random(seed)
    for _ in range(walks):
        reference = oracle.matcher()
        matchers = {name: found.matcher() for name, found in others.items()}
        want, got = (np.zeros(vocabulary().words, np.int32) for _ in range(2))
        for _ in range(length):
            reference.fill(want)
            for name, matcher in matchers.items():
                matcher.fill(got)
                assert bits(got) == bits(want), (name, grammar.source)
                assert matcher.is_complete == reference.is_complete, (name, grammar.source)
            allowed = bits(want)
            if not allowed:
                break
            chosen = rng.choice(allowed if rng.random() < 0.85 else range(vocabulary().size))
            accepted = reference.accept(chosen)
            assert accepted == (chosen in allowed)
            assert {m.accept(chosen) for m in matchers.values()} == {accepted}
            if reference.is_terminated or (reference.accepted_tokens and rng.random() < 0.15):
                count = rng.randint(1, reference.accepted_tokens)
                for matcher in (reference, *matchers.values()):
                    matcher.rollback(count)


chars = st.sampled_from(["[ab]", "[^a]", "[a-c]", '"a"', '"b"', '"ab"', '"é"', '"\\"a"', "[0-2]"])


@st.composite
def bodies(draw: st.DrawFn, names: tuple[str, ...]) -> str:
    inner = st.one_of(chars, st.sampled_from(names)) if names else chars

    def grown(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.lists(part, min_size=2, max_size=3).map(" ".join),
            st.lists(part, min_size=2, max_size=3).map(lambda ways: f"({' | '.join(ways)})"),
            st.tuples(part, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
            part.map(lambda one: f'({one} | "")'),
        )

    return draw(st.recursive(inner, grown, max_leaves=6))


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    names = ("root", "x", "y")[: draw(st.integers(1, 3))]
    rules = [f"{name} ::= {draw(bodies(names))}" for name in names]
    return Grammar.ebnf("\n".join(rules))


@few
@given(grammars(), st.integers(0, 2**16))
def test_random_ebnf(grammar: Grammar, seed: int) -> None:
    try:
        read(grammar.source)
    except GrammarError as error:
        assume("no finite text" not in str(error))
        raise
    check_walks(grammar, seed)


patterns = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", "ab", "é", "c"]),
    lambda part: st.one_of(
        st.lists(part, min_size=2, max_size=3).map("".join),
        st.lists(part, min_size=2, max_size=2).map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(part, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{2,}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@few
@given(patterns, st.integers(0, 2**16))
def test_random_regexes(pattern: str, seed: int) -> None:
    check_walks(Grammar.regex(pattern), seed)


scalars = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 2},
        {"type": "string", "pattern": "^a*b$"},
        {"type": "integer"},
        {"type": "integer", "minimum": 5, "maximum": 120},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["a", 1, None]},
        {"const": "ab"},
        {},
    ]
)
schemas = st.recursive(
    scalars,
    lambda part: st.one_of(
        st.tuples(part, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1]}
        ),
        st.tuples(
            st.dictionaries(st.sampled_from(["a", "b", "ab"]), part, max_size=2),
            st.booleans(),
            st.booleans(),
        ).map(
            lambda found: {
                "type": "object",
                "properties": found[0],
                "required": list(found[0])[: int(found[1])],
                "additionalProperties": found[2],
            }
        ),
        st.lists(part, min_size=2, max_size=2).map(lambda ways: {"anyOf": ways}),
    ),
    max_leaves=3,
)


@few
@given(schemas, st.integers(0, 2**16))
def test_random_schemas(schema: dict[str, object], seed: int) -> None:
    check_walks(Grammar.json_schema(schema), seed, length=16)


@pytest.mark.parametrize(
    ("ebnf", "by_characters"),
    [
        (
            'root ::= "{" (pair ("," pair)*)? "}"\n'
            'pair ::= key ":" root\nkey ::= "\\"" [ab]* "\\""',
            0,
        ),
        ('root ::= x "b" | "c"\nx ::= "a" root | [ab]*', 1),
        ('root ::= [a]* "ab" root | "c"', 1),
        ('root ::= "a" root "b" | "ab"', 0),
    ],
)
def test_lexemes_are_proved_or_cut(ebnf: str, by_characters: int) -> None:
    lexemes = cut(read(ebnf))
    assert lexemes.by_characters == bool(by_characters)
    assert not conflict(lexemes)
    check_walks(Grammar.ebnf(ebnf), 1)


def test_a_quote_that_is_escaped_ends_no_lexeme() -> None:
    # The pattern's quotes are no JSON strings of their own: its expression is one lexeme.
    name = {"type": "string", "pattern": '^([a-z]+"|n(ull)?[0-9]*)+$'}
    schema = {"properties": {"a": name, "b": {"items": {"$ref": "#"}}}, "type": "object"}
    grammar = Grammar.json_schema(schema, additional_properties="schema")
    lexemes = cut(lower(grammar))
    assert not lexemes.by_characters
    assert not conflict(lexemes)
    check_walks(grammar, 2)
    made = backend("auto").compile(grammar)
    assert made.backend == "llguidance"


def test_keys_that_are_taken_are_left_out_by_one_word() -> None:
    names = [f"{'long-key-' * 5}{i}é\n" for i in range(60)]
    schema = {"type": "object", "properties": dict.fromkeys(names, True)}
    text = to_lark(lower(Grammar.json_schema({**schema, "additionalProperties": True}))).text
    assert text.count("& ~") == 1
    # Not as a tree of all that differs.
    assert len(text) < 25_000


@pytest.mark.parametrize(
    ("pattern", "words"), [("^[a-z]*$", 1), ("^[a-z]+$", 1), ("^[a-z]*b$", 0), ("^[a-z]{0,9}$", 0)]
)
def test_keys_of_a_pattern_but_some(pattern: str, words: int) -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "null"}, "b": {"type": "null"}},
        "patternProperties": {pattern: {"$ref": "#"}},
        "additionalProperties": False,
    }
    grammar = Grammar.json_schema(schema)
    assert to_lark(lower(grammar)).text.count("& ~") == words
    check_walks(grammar, 3, walks=6, length=24)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("names", [["a", "ab"], ["", "é\n", '"'], ["\u0001", "a"]])
@pytest.mark.parametrize("rest", [{"type": "integer"}, {}])
def test_free_keys_are_the_same_everywhere(name: str, names: list[str], rest: object) -> None:
    schema = {"properties": dict.fromkeys(names, False), "additionalProperties": rest}
    grammar = Grammar.json_schema({"type": "object", **schema})
    found, oracle = compiled(name, grammar), compiled("reference", grammar)
    assert oracle is not None
    verdicts = set()
    for key in [*names, "b", "a\u0001", "\u0001b", "aa", "abc", "é", "\n", '""', "x"]:
        text = json.dumps({key: 1}, separators=(",", ":"), ensure_ascii=False).encode()
        tokens = [token(text[i : i + 1]) for i in range(len(text))]
        want = all(map(oracle.matcher().accept, tokens))
        assert not (want and key in names)
        assert found is None or all(map(found.matcher().accept, tokens)) == want, key
        verdicts.add(want)
    assert verdicts == {True, False}
    assert found is not None or name == "outlines"


@pytest.mark.parametrize(
    "pattern",
    ["ab", "[0-9]{2}a", "^a|b1", "^a.*b", "^[a-z]", "^[A-Za-z][A-Za-z0-9_]*$", "^a.+$",
     "^[A-Za-z](-*[A-Za-z])*@[A-Za-z]*$"],
)  # fmt: skip
def test_patterns_that_are_spelled_with_more_loops(pattern: str) -> None:
    for seed in range(3):
        grammar = Grammar.json_schema({"type": "array", "items": {"pattern": pattern}})
        check_walks(grammar, seed, walks=2, length=12)


@pytest.mark.parametrize(("low", "high"), [(0, 0x10FFFF), (0x7F, 0x800), (0xE9, 0x1F600)])
def test_utf8_spans_hold_exactly_the_range(low: int, high: int) -> None:
    spans = utf8_spans(low, high)
    step = max(1, (high - low) // 5000)
    for point in itertools.chain(range(low, high + 1, step), (low, high)):
        if 0xD800 <= point <= 0xDFFF:
            continue
        held = [all(a <= b <= c for b, (a, c) in zip(chr(point).encode(), span, strict=False))
                and len(span) == len(chr(point).encode()) for span in spans]  # fmt: skip
        assert sum(held) == 1
    total = sum(int(np.prod([b - a + 1 for a, b in span])) for span in spans)
    assert total == high - low + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a" x', "rule x is not defined"),
        ('roots ::= "a"', "no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "more than once"),
        ('root ::= ("a"', "incomplete"),
        ('root ::= * "a"', "nothing to repeat"),
        ('root ::= "a" & "b"', "line 1, column 14"),
        ("root ::= [b-a]", "reversed"),
        ('root ::= "a"{3,2}', "reversed"),
        ('root ::= "a" root', "no finite text"),
        ('root ::= []', "no finite text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["auto", "llguidance", "outlines", "reference"])
def test_broken_ebnf_is_refused_with_the_place(name: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        backend(name).compile(Grammar.ebnf(text))


def test_ways_that_cannot_end_are_never_entered() -> None:
    check_walks(Grammar.ebnf('root ::= "a" (x | "b") | [] "c"\nx ::= "c" x'), 0)


@pytest.mark.parametrize("text", ['root ::= Regex("a.b")', 'root ::= "a" (= "b")'])
def test_constructs_of_xgrammar_alone_are_told_apart(text: str) -> None:
    with pytest.raises(ForeignConstruct):
        read(text)


@pytest.mark.parametrize("pattern", ["((a)*b)*", "(a|ab)", "(|a)b*", "a*(ab)?", "(ab|a)(bc|c)?"])
def test_patterns_that_a_library_reads_otherwise(pattern: str) -> None:
    check_walks(Grammar.regex(pattern), 5, walks=6)


@pytest.mark.parametrize(
    "ebnf",
    ["root ::= root{0,2}", 'root ::= root root | "a" | ""', 'root ::= x | ""\nx ::= root | "b"'],
)
def test_rules_that_call_themselves_first(ebnf: str) -> None:
    check_walks(Grammar.ebnf(ebnf), 7)


def test_half_a_surrogate_is_no_character() -> None:
    check_walks(Grammar.ebnf('root ::= [^"]*'), 3)
    for name in backends.names():
        found = compiled(name, Grammar.ebnf('root ::= [^"]*'))
        assert found is not None
        matcher = found.matcher()
        assert matcher.accept(token(b"\xed"))
        assert token(b"\xa0") not in legal(matcher)
