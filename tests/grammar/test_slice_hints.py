"""Lexemes rewritten with more loops: same languages, and correct on long texts."""

import itertools
import json
import re
from collections.abc import Callable

import jsonschema
import pytest

from overlap_spec.grammar import Grammar
from overlap_spec.grammar.automata.dfa import from_node
from overlap_spec.grammar.automata.escape import plain
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.automata.regex_ast import Alternation, CharClass, Concat, Node, Ref
from overlap_spec.grammar.dialects.rust import to_regex
from overlap_spec.grammar.ir.epsilon import EpsilonFree
from overlap_spec.grammar.ir.slice_hints import later, letters_first, straight
from overlap_spec.grammar.lowering.lower import lower
from tests.support.grammars import by_bytes, takes

Rules = dict[str, Node]
Hint = Callable[[Node, Rules], Node | None]


def rules_of(grammar: Grammar) -> Rules:
    return EpsilonFree(lower(grammar).plain).rules


def texts_of(node: Node, rules: Rules, chars: str, length: int) -> set[str]:
    """The texts of some characters, up to a length, that an expression matches."""

    def rule(name: str) -> str:
        return to_regex(rules[name], rule)

    pattern = re.sub(r"\\x\{(\w+)\}", lambda at: f"\\U{at[1]:0>8}", to_regex(node, rule))
    fits = re.compile(pattern).fullmatch
    sizes = (itertools.product(chars, repeat=size) for size in range(length + 1))
    return {text for text in map("".join, itertools.chain(*sizes)) if fits(text)}


@pytest.mark.parametrize(
    "pattern",
    ["[A-Za-z][A-Za-z0-9_]*", "[A-Za-z](-*[A-Za-z])*b?", "(-|[A-Za-z][A-Za-z]*0)+", "a-*"],
)  # fmt: skip
def test_letters_first_is_the_same_language(pattern: str) -> None:
    rules = rules_of(Grammar.regex(pattern))
    for body in rules.values():
        want = texts_of(body, rules, "ab0_-", 5)
        assert want
        assert texts_of(letters_first(body), rules, "ab0_-", 5) == want


def test_letters_first_begins_with_a_loop() -> None:
    rules = rules_of(Grammar.regex("[A-Za-z][A-Za-z0-9]*"))
    changed = [letters_first(body) for body in rules.values()]
    assert any(re.match(r"\(\?:\[A-Za-z\]\)\+", to_regex(body, str)) for body in changed)


def finds_some(hint: Hint, rules: Rules, has: bool, letters: str, most: int) -> None:
    """A hint is for some texts of a language and not all, where there is one."""
    found = hint(rules["root"], rules)
    assert (found is not None) == has
    if found is not None:
        some = texts_of(found, rules, letters, most)
        assert some
        assert some < texts_of(rules["root"], rules, letters, most)


@pytest.mark.parametrize(
    ("pattern", "has"),
    [("ab", True), ("^b.*ba", True), ("^[^_].*$", True), ("^b?.*$", False), ("^ab*$", False)],
)
def test_later_is_some_of_the_language(pattern: str, has: bool) -> None:
    rules = rules_of(Grammar.json_schema({"type": "string", "pattern": pattern}))
    finds_some(later, rules, has, 'ab"\U0010ffff', 6)


@pytest.mark.parametrize(
    ("pattern", "has"),
    [("(_|[A-Za-z]+)b", True), ("_(-[A-Za-z]+|b)?", False), ("-((b|_)|_[A-Za-z]+-)", True)],
)
def test_straight_is_some_of_the_language(pattern: str, has: bool) -> None:
    rules = rules_of(Grammar.regex(pattern))
    finds_some(straight, rules, has, "ab_-", 5)


@pytest.mark.parametrize("pattern", ["ab1", "^http|x$", "[0-9]{3}"])
def test_long_texts_with_a_pattern_somewhere(pattern: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
    found = by_bytes("llguidance").compile(Grammar.json_schema(schema))
    for length in (3, 198, 201, 260):
        for text in ("y" * length, "y" * length + "ab1 http 123 x", "http" + "b" * length):
            matcher = found.matcher()
            assert all(map(matcher.accept, f'["{text}'.encode()))
            assert matcher.accept(ord('"')) == bool(re.search(pattern, text))


def test_rules_that_many_share_are_visited_once() -> None:
    """Each of 60 rules refers to the next one twice: visited by every path, that is 2^60 times."""
    letter = CharClass(((0x61, 0x61),))
    rules: dict[str, Node] = {"r60": letter}
    for number in range(60):
        following = Ref(f"r{number + 1}")
        rules[f"r{number}"] = Alternation((Concat((letter, following)), following))
    assert later(Ref("r0"), rules) is None


def members(schema: dict[str, object], backend: str) -> tuple[list[bool], ...]:
    """Whether each of some objects is let through, by what the backend and pure logic say."""
    found = by_bytes(backend).compile(Grammar.json_schema(schema))
    values: list[object] = [None, "", 3, {}]
    keys = ["X-a", "Xa", "name", "n\U0010ffff", "X-\U0010ffff", "X", "X\U0010ffff", "", "nam"]
    let, right = [], []
    for key, value in itertools.product(keys, values):
        text = json.dumps({key: value}, ensure_ascii=False, separators=(",", ":"))
        let.append(takes(found, text))
        right.append(jsonschema.Draft202012Validator(schema).is_valid({key: value}))
    return let, right


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "reference"])
@pytest.mark.parametrize("kind", ["^X-", "^X", "^[^nX]"])
@pytest.mark.parametrize("free", [{"type": ["integer", "null"]}, {"type": "integer"}, False])
def test_keys_of_several_kinds(backend: str, free: object, kind: str) -> None:
    """A member that stands for all kinds of keys adds none."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "patternProperties": {kind: {"type": ["string", "null"]}},
        "additionalProperties": free,
    }
    let, right = members(schema, backend)
    assert let == right
    assert any(right)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "reference"])
def test_keys_beside_names_and_patterns_have_one_form(backend: str) -> None:
    """So they are a loop of all characters without the names, which a lexer's slices see."""
    schema = {
        "type": "object",
        "properties": {"image": {"type": "integer"}, "é": {"type": "integer"}},
        "patternProperties": {"^[.]": {"type": "null"}},
        "additionalProperties": {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
    }
    found = by_bytes(backend).compile(Grammar.json_schema(schema))
    wanted = {
        '"image":1': True, '"image":"x"': False, r'"\u0069mage":"x"': False,
        '".a":null': True, '".a":"x"': False, r'"\u002ea":"x"': False, '".image":null': True,
        '"imag":"x"': True, '"images":"x"': True, '"":"x"': True, r'"a\nb":"x"': True,
        '"é":1': True, '"é":"x"': False, r'"\u00e9":"x"': False, '"è":"x"': True,
    }  # fmt: skip
    assert {text: takes(found, f"{{{text}}}") for text in wanted} == wanted
    if backend == "llguidance":
        assert b"& ~/" in found.serialize()


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        (".*", ""),
        ("[a-z]*", ""),
        ("a*b?|c", ""),
        ("^a+", "^a"),
        ("(a|b)+$", "(a|b)$"),
        ("x*ab+c*", "ab"),
        ("^a*$", "^a*$"),
    ],
)
def test_a_free_end_takes_in_what_it_may_be(pattern: str, same: str) -> None:
    found = [Pattern(text, "schema").found(plain) for text in (pattern, same)]
    assert found[0] == found[1]
    assert from_node(found[0]) == Pattern(pattern, "schema").automaton()
