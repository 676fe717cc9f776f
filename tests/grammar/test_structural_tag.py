"""Structural tags: validation by path, texts byte by byte, and agreement with xgrammar."""

import itertools
import json
import random
from functools import cache
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.dialects.gbnf import to_gbnf
from overlap_spec.grammar.ir.rules import Rules, literal, sequence
from overlap_spec.grammar.lowering.free_text import free_start, free_text
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.parsing import read
from tests.support.grammars import by_bytes


@cache
def compiled(grammar: Grammar, name: str):
    return by_bytes(name).compile(grammar)


def reach(grammar: Grammar, text: str, name: str = "xgrammar") -> tuple[int, bool]:
    """How many bytes the grammar takes, and whether it may end there."""
    matcher, raw = compiled(grammar, name).matcher(), text.encode()
    taken = sum(1 for _ in itertools.takewhile(matcher.accept, raw))
    return taken, matcher.is_complete


def takes(grammar: Grammar, text: str) -> bool:
    return reach(grammar, text) == (len(text.encode()), True)


def tags(form: dict[str, Any], **more: Any) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", "format": form}, **more)


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
F, G = tag("<f>", NUMBER, "</f>"), tag("<g>", const("x"), ["</g>", "/"])
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}
DISPATCH = {"type": "dispatch", "rules": [["ab", const("!")], ["cc", const("")]]}
LEGACY = {
    "structures": [{"begin": "<f>", "schema": '{"type":"integer"}', "end": "</f>"}],
    "triggers": ["<f"],
}

# name: (format, texts taken, texts refused with the bytes taken before)
TEXTS: dict[str, tuple[dict[str, Any], list[str], dict[str, int]]] = {
    "const": (const("a\n\"é"), ["a\n\"é"], {"ab": 1}),
    "any text": (ANY, ["", "é\n<f>"], {}),
    "excludes": ({**ANY, "excludes": ["aab", "zz"]}, ["", "aa", "abab", "z"], {"xaaab": 4}),
    "regex": ({"type": "regex", "pattern": "[0-9]{2}"}, ["12"], {"1a": 1, "123": 2}),
    "grammar": ({"type": "grammar",
        "grammar": 'root ::= a*  # "root"\na ::= "[" a "]" | [\\]x] "\\""'}, ["", '[x"]', ']"'],
        {"[x]": 2},),
    "sequence": ({"type": "sequence", "elements": [const("a"), NUMBER]}, ["a1"], {"b": 0}),
    "or": ({"type": "or", "elements": [const("ab"), const("ac")]}, ["ab", "ac"], {"ad": 1}),
    "optional": ({"type": "optional", "content": const("a")}, ["", "a"], {"aa": 1}),
    "plus": ({"type": "plus", "content": const("a")}, ["a", "aaa"], {"": 0, "ab": 1}),
    "star": ({"type": "star", "content": const("a")}, ["", "aaa"], {"ab": 1}),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": NUMBER}, ["1", "12"], {"": 0}),
    "never": ({"type": "repeat", "min": 0, "max": 0, "content": NUMBER}, [""], {"1": 0}),
    "no bound": ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aaa"], {"a": 1}),
    "tag": (tag("<", NUMBER, ">"), ["<12>"], {"<a": 1, "<1>x": 3}),
    "tag of text": (tag("<", ANY, "</"), ["<</", "<a/<</"], {"<a</b": 4}),
    "open tag": (tag("<", ANY, ["/", ""]), ["<", "<a", "<a/"], {"<a/b": 3}),
    "triggered": (TRIGGERED, ["", "a < b <", "<f>1</f>", "<<f>1</f> <g>x/<g>x</g><"],
        {"<fa": 2, "<f>x": 3, "<g>": 3, "a<f>1</f": 8}),
    "at least one": ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>", "<g>x/ and <f>2</f> more"],
        {"": 0, "a": 0, "<f>1": 4}),
    "one": ({**TRIGGERED, "stop_after_first": True}, ["a", "a<g>x/"], {"<g>x/b": 5}),
    "exactly one": ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, ["<g>x/"],
        {"a": 0, "<g>x/<": 5}),
    "separated": (SEPARATED, ["", "<f>1</f>", "<f>1</f>, <g>x/"], {"<f>1</f>,<": 9, "a": 0}),
    "dispatch": (DISPATCH, ["", "a", "aab!", "cccc", "ab!ab!"], {"abx": 2}),
    "dispatch once": ({**DISPATCH, "loop": False}, ["aab!", "c"], {"ab!a": 3}),
}  # fmt: skip


@pytest.mark.parametrize("library", ["xgrammar", "reference"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str, library: str) -> None:
    form, good, bad = TEXTS[name]
    grammar = tags(form)
    for text in good:
        assert reach(grammar, text, library) == (len(text.encode()), True), text
    for text, taken in bad.items():
        reached, is_complete = reach(grammar, text, library)
        assert reached == taken, text
        assert reached < len(text.encode()) or not is_complete, text


def test_the_older_form() -> None:
    grammar = Grammar.structural_tag(json.dumps({"type": "structural_tag", **LEGACY}))
    assert grammar == Grammar.structural_tag(LEGACY)
    assert takes(grammar, "so <f>12</f>, and <")
    assert reach(grammar, "so <f>x") == (6, False)
    assert grammar.parse("so") == "so"


def test_layout_reaches_the_json_inside() -> None:
    form = tag("<", {"type": "json_schema", "json_schema": {"type": "object"}}, ">")
    assert takes(tags(form), '<{"a":1}>')
    assert not takes(tags(form), '<{"a": 1}>')
    assert takes(tags(form, whitespace="bounded"), '<{\n  "a": 1}>')


ORACLES = [
    {**ANY, "excludes": ["aab", "ba"]},
    tag("a", ANY, "aab"),
    tag("a", {**ANY, "excludes": ["bb"]}, ["b", "ca"]),
    tag("", {"type": "sequence", "elements": [ANY, const("a"), ANY]}, "bb"),
    {**TRIGGERED, "triggers": ["ab", "c"], "tags": [tag("aba", NUMBER, "a"), tag("c", ANY, "b")]},
    {**TRIGGERED, "triggers": ["aba"], "tags": [tag("aba", const(""), "")], "excludes": ["cc"]},
    {"type": "tags_with_separator", "tags": [tag("a", ANY, "b")], "separator": "c"},
    tag("", {"type": "sequence", "elements": [TRIGGERED, ANY]}, "c"),
    tag("c", {**DISPATCH, "rules": [["ab", const("c")], ["ba", const("")]]}, "bb"),
    {**DISPATCH, "rules": [["aab", ANY]], "loop": False, "excludes": ["cb"]},
]  # fmt: skip


@pytest.mark.parametrize("form", ORACLES, ids=range(len(ORACLES)))
def test_it_reads_as_xgrammar_reads(form: dict[str, Any]) -> None:
    own = tags(form)
    theirs = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": form})
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    library = compiler.compile_grammar(theirs)
    for length in range(7):
        for letters in itertools.product("abc", repeat=length):
            text = "".join(letters)
            matcher = xgrammar.GrammarMatcher(library)
            taken = sum(1 for _ in itertools.takewhile(matcher.accept_token, text.encode()))
            assert reach(own, text) == (taken, matcher.is_completed()), text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.lists(st.text("abéc", max_size=9), min_size=8, max_size=8),
)
def test_free_text_holds_none_of_the_strings(strings: list[str], texts: list[str]) -> None:
    grammar = tags({**ANY, "excludes": strings})
    for text in texts:
        assert takes(grammar, text) == (not any(each in text for each in strings))


def test_free_text_goes_on_after_the_first_string() -> None:
    rng = random.Random(0)
    for _ in range(30):
        strings = list({"".join(rng.choices("ab", k=rng.randint(2, 4))) for _ in range(3)})
        strings = [s for s in strings if not any(t != s and t in s for t in strings)]
        rules = Rules()
        exits = {text: literal(str(i)) for i, text in enumerate(strings)}
        syntax = rules.syntax(free_text(rules, exits, may_end=False))
        grammar = Grammar.ebnf(to_gbnf(syntax))
        for _ in range(30):
            text = "".join(rng.choices("abc", k=8))
            found = min(
                ((text.find(s) + len(s), str(i)) for i, s in enumerate(strings) if s in text),
                default=None,
            )
            if found is None:
                assert reach(grammar, text) == (8, False)
            else:
                assert takes(grammar, text[: found[0]] + found[1])
                assert reach(grammar, text[: found[0]] + "9")[0] == found[0]


def test_text_that_may_not_begin_so() -> None:
    rules = Rules()
    syntax = rules.syntax(free_start(rules, {"{": literal("}"), "<|p": None}))
    grammar = Grammar.ebnf(to_gbnf(syntax))
    for text in ("", "a{", "<|", "<|x<|p", "<{", "{}"):
        assert takes(grammar, text), text
    assert reach(grammar, "{x") == (1, False)
    assert reach(grammar, "<|p") == (2, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tag("a", ANY, "b"), r"`\$\.type`|unknown field"),
        ({"type": "structural_tag"}, "missing required field `format`"),
        ({"format": {"type": "xml"}}, r"Invalid value 'xml' - at `\$\.format\.type`"),
        ({"format": {**const("a"), "x": 1}}, r"unknown field `x` - at `\$\.format`"),
        ({"format": {**NUMBER, "style": "yaml"}}, r"'yaml' - at `\$\.format\.style`"),
        ({"format": {**NUMBER, "any_order": True}}, "any_order"),
        ({"format": {**NUMBER, "json_schema": {"type": "x"}}}, r"json_schema: \$\.type: 'x'"),
        ({"format": {"type": "regex", "pattern": "("}}, r"pattern: regex '\('"),
        ({"format": {"type": "sequence", "elements": []}}, r">= 1 - at `\$\.format\.elements`"),
        ({"format": {"type": "or", "elements": [ANY, 3]}}, r"`object`.*elements\[1\]"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": ANY}}, "below min"),
        ({"format": {**TRIGGERED, "triggers": ["<f"]}}, r"tags\[1\]\.begin: '<g>' starts with 0"),
        ({"format": {**TRIGGERED, "triggers": ["<f", "<"]}}, "'<' is part of '<f'"),
        ({"format": {**SEPARATED, "tags": [ANY]}}, r"'any_text' - at .*tags\[0\]\.type"),
        ({**LEGACY, "structures": [{**LEGACY["structures"][0], "tag": 1}]}, "unknown field `tag`"),
        ({"format": {**ANY, "excludes": ["a"] * 1025}}, r"<= 1024 - at `\$\.format\.excludes`"),
        ("{", "structural tag is not JSON"),
    ],
)
def test_broken_tags_name_the_place(spec: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        Grammar.structural_tag(spec)
    assert caught.value.param == "structural_tag"


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(GrammarError, match="half a surrogate"):
        tags(const("\ud800"))


def test_nesting_is_bounded() -> None:
    form = ANY
    for _ in range(2000):
        form = {"type": "star", "content": form}
    with pytest.raises(GrammarError, match="too deep"):
        tags(form)
    with pytest.raises(GrammarError, match="too deep"):
        Grammar.structural_tag('{"format":' + '{"type":"star","content":' * 90000)


@pytest.mark.parametrize(
    ("ebnf", "message"),
    [
        ('a ::= "x"', "no rule named root"),
        ("root ::= b", "rule b is not defined"),
        ('root ::= "a"\nroot ::= "b"', "root is defined more than once"),
        ('root ::= TagDispatch(("a", root))', "TagDispatch"),
    ],
)
def test_broken_ebnf_inside_is_refused(ebnf: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lower(tags({"type": "grammar", "grammar": ebnf}))


def test_grammars_inside_keep_their_own_names() -> None:
    one = 'root ::= "root" a  # a\na ::= [a\\]"]\n  | Regex("a(b|c)")'
    rules = Rules()
    parts = [rules.embed(read(text)) for text in (one, 'root ::= a "!" \na ::= "z"')]
    grammar = Grammar.ebnf(to_gbnf(rules.syntax(sequence(*parts))))
    assert takes(grammar, "root]z!")
    assert takes(grammar, "rootacz!")
    assert not takes(grammar, "rootzz!")
