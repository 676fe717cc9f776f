r"""Patterns of schemas are ECMA-262's; expressions of their own match what Python matches too."""

import itertools
import json
import re
from typing import Any

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.automata import dfa
from overlap_spec.grammar.automata.dfa_to_regex import to_node
from overlap_spec.grammar.automata.dialect import explicit
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.schemas import formats
from tests.support.grammars import by_bytes, takes


def holds(schema: dict[str, Any], value: str) -> bool:
    return takes(Grammar.json_schema(schema), json.dumps(value, ensure_ascii=False))


# Pattern, texts that match whole, and texts that do not.
ECMA: list[tuple[str, list[str], list[str]]] = [
    (r"\d", ["0"], ["߀", "a"]),
    (r"\D", ["߀", "a"], ["0"]),
    (r"\w", ["a", "_"], ["é", "-"]),
    (r"\W", ["é", "-"], ["a", "_"]),
    (r"\s", [" ", "\t", "\u00a0", "\ufeff", "\u2029"], ["\x01", "\x85", "\x1c"]),
    (r"\S", ["\x85", "a"], [" ", "\ufeff"]),
    (r"[^\d\s]", ["߀", "é"], ["0", "\ufeff"]),
    (r"[\D]", ["߀"], ["0"]),
    (r".", ["a", "\x85"], ["\n", "\r", "\u2028", "\u2029"]),
    (r"[^]", ["a", "\n", "😀"], ["", "ab"]),
    (r"\cC\ca", ["\x03\x01"], ["cCca"]),
    (r"[\w-.]+", ["a-b.c"], ["é", "/"]),
    (r"[a\-\d-z]+", ["-", "5a", "z"], ["b"]),
    (r"\ud83d\ude00[\ud83d\ude00-\ud83d\ude02]", ["😀😁"], ["😀a"]),
    (r"(?<first>a)\/[\b]", ["a/\b"], ["a/b"]),
    (r"\x41\u0042\u{43}\0", ["ABC\0"], ["ABC0"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), ECMA, ids=[pattern for pattern, *_ in ECMA])
def test_a_schemas_patterns_are_ecma_262(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
    assert [text for text in good if not holds(schema, text)] == []
    assert [text for text in bad if holds(schema, text)] == []
    # Excluded is exactly what matches.
    other = {"type": "string", "not": {"pattern": schema["pattern"]}}
    assert [text for text in good if holds(other, text)] == []
    assert [text for text in bad if not holds(other, text)] == []
    # Keys by the same reading.
    matched = Pattern(schema["pattern"], "schema").matches
    assert [matched(text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_a_line_feed_does_not_stand_behind_the_end() -> None:
    schema = {"type": "string", "pattern": "^a$"}
    assert not holds(schema, "a\n")
    assert holds({"type": "string", "not": {"pattern": "^a$"}}, "a\n")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\D", ["a"], ["0", "߀"]),
        (r"\W", ["-"], ["a", "é"]),
        (r"[^\w]", ["-"], ["a", "é"]),
        (r"\s", [" "], ["\ufeff", "\x1c"]),
        (r"\S", ["a"], ["\ufeff", "\x1c"]),
        (r".", ["a"], ["\r"]),
        (r"[]a]+", ["]a"], [""]),
        (r"\a", ["\a"], ["a"]),
    ],
)
def test_an_expression_matches_what_both_dialects_do(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar.regex(pattern)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\a", r"is not a 'regex'"),
        (r"[z-a]", r"is not a 'regex'"),
        (r"[a", r"is not a 'regex'"),
        (r"\u00", r"is not a 'regex'"),
        (r"a\b", r"two ends only"),
        (r"a[]", r"class is empty"),
        (r"(?<n>a)\k<n>", r"back-reference"),
    ],
)
def test_what_is_broken_or_not_regular_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        by_bytes().compile(Grammar.json_schema({"type": "string", "pattern": pattern}))


def test_positions_in_errors_are_the_sources() -> None:
    with pytest.raises(re.error, match="position 3"):
        explicit(r"\da[z-", "ecma")
    with pytest.raises(GrammarError, match=r"nothing to repeat$"):
        Grammar.regex(r"\d|*")


def test_a_python_types_pattern_parses() -> None:
    pydantic = pytest.importorskip("pydantic")
    text_type = pydantic.constr(pattern=r"^\W\S$")
    grammar = Grammar.json_schema(text_type)
    for text in ("-é", "--"):
        assert takes(grammar, json.dumps(text, ensure_ascii=False))
        assert grammar.parse(json.dumps(text)) == text
    # ECMA-262 takes these; pydantic does not.
    for text in ("é-", "-\x85"):
        assert not takes(grammar, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("name", ["not date", "uri"])
def test_an_automaton_and_its_expression_have_the_same_texts(name: str) -> None:
    found = formats.pattern(name.removeprefix("not "))
    assert found is not None
    made = Pattern(found, "schema").automaton()
    made = dfa.neither(made) if name.startswith("not ") else made
    node = to_node(made, plain)
    assert node is not None
    again = dfa.from_node(node)
    assert dfa.both(again, dfa.neither(made)).is_empty
    assert dfa.both(made, dfa.neither(again)).is_empty


ANCHORED = (r"^$|^\d{2}$", "(a|$)", "(?:^|a)", "x(a|$)", "^|a$", "(^a|b)c?", "$", "(^|a)b?")


@pytest.mark.parametrize("pattern", ANCHORED)
def test_anchors_leave_the_ways_beside_them(pattern: str) -> None:
    texts = ["".join(text) for n in range(4) for text in itertools.product("abcx12", repeat=n)]
    wanted = [text for text in texts if re.fullmatch(pattern, text)]
    lark = Grammar.ebnf(f"start: /{pattern}/")
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    for grammar in (Grammar.regex(pattern), lark, Grammar.structural_tag(tag)):
        compiled = by_bytes().compile(grammar)
        assert [text for text in texts if takes(grammar, text)] == wanted, compiled
    # A schema's pattern may match anywhere.
    found = Grammar.json_schema({"type": "string", "pattern": pattern})
    for text in texts[:60]:
        assert takes(found, f'"{text}"') == bool(re.search(pattern, text)), text


def test_long_patterns_and_lark_are_read_by_the_compile() -> None:
    """They may take seconds, and a compile has limits."""
    ways = "|".join(f"w{number}" for number in range(2000))
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": f"({ways}"}}
    for grammar in (
        Grammar.regex(f"({ways}"),
        Grammar.ebnf(f"start: /({ways}/"),
        Grammar.structural_tag(tag),
    ):
        with pytest.raises(GrammarError, match=r"missing \), unterminated subpattern"):
            by_bytes().compile(grammar)
    assert takes(Grammar.regex(ways), "w1999")
    assert not takes(Grammar.regex(ways), "w2000")
