"""Lexemes rewritten with more loops: same languages, and correct on long texts."""

from __future__ import annotations

import itertools
import re

import pytest

from overlap_spec.grammar import Grammar, Vocabulary, backends
from overlap_spec.grammar.automata.regex_ast import Alternation, CharClass, Concat, Node, Ref
from overlap_spec.grammar.dialects.rust import to_regex
from overlap_spec.grammar.ir import slice_hints
from overlap_spec.grammar.ir.epsilon import EpsilonFree
from overlap_spec.grammar.ir.slice_hints import later, letters_first
from overlap_spec.grammar.lowering import lower

Rules = dict[str, Node]


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


@pytest.mark.parametrize(("pattern", "has"), [("ab", True), ("^b.*ba", True), ("^ab*$", False)])
def test_later_is_some_of_the_language(
    pattern: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_hints, "_LATER", 3)
    rules = rules_of(Grammar.json_schema({"type": "string", "pattern": pattern}))
    found = later(rules["root"], rules)
    assert (found is not None) == has
    if found is not None:
        some = texts_of(found, rules, 'ab"', 9)
        assert some
        assert some < texts_of(rules["root"], rules, 'ab"', 9)


@pytest.mark.parametrize("pattern", ["ab1", "^http|x$", "[0-9]{3}"])
def test_long_texts_with_a_pattern_somewhere(pattern: str) -> None:
    vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), 257, (256,))
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
    found = backends.load("llguidance")(vocabulary).compile(Grammar.json_schema(schema))
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
