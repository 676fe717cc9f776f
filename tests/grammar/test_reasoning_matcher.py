"""The reasoning matcher: against a byte-level oracle, in draft trees, backwards and forked."""

import random
from functools import cache

import numpy as np
import pytest

from overlap_spec.errors import ConfigError, GrammarError
from overlap_spec.grammar import Grammar, Vocabulary, backends
from overlap_spec.grammar.contract import Backend, Matcher
from overlap_spec.grammar.reasoning import matcher as reasoning_matcher
from overlap_spec.grammar.reasoning.reply import ReasoningStream, load_reasoning, opened_by
from tests.support.grammars import by_bytes, legal

NONE = -1
PIECES = [
    *"abx1<>/\n{}:\"tkhin ",
    "</think>", "<think>", "</", "think", ">\n\n", ">\n{", ">a", "k>ab", "k>b", "\n\n", "\n\n\n",
    "\na", "ab", 'x</think>{"', '{"', "<<", "</think>\n\nab", "</think></think>", "<th",
    "k>\n\n\na",
]  # fmt: skip
SPECIAL, STOPS, SIZE = len(PIECES), (len(PIECES) + 1, len(PIECES) + 3), 75
GRAMMARS = {
    "letters": Grammar.regex("[ab]*x?"),
    "schema": Grammar.json_schema(
        {"properties": {"x": {"type": "integer"}}, "additionalProperties": False, "type": "object"}
    ),
    "choice": Grammar.choice(["ab", "abx", "<think>", "<a"]),
}


@cache
def vocabulary() -> Vocabulary:
    texts = (*(piece.encode() for piece in PIECES), b"<pad>", b"", b"q", b"")
    return Vocabulary(texts, SIZE, STOPS, frozenset({SPECIAL}))


@cache
def backend(name: str) -> Backend:
    return backends.load(name)(vocabulary())


@cache
def oracle(grammar: Grammar):
    return by_bytes().compile(grammar)


@cache
def with_thinking(name: str, grammar: str, begin: str | None):
    thinking = GRAMMARS[grammar].after_thinking(begin=begin)
    assert thinking.inner == GRAMMARS[grammar]
    return reasoning_matcher.wrap(backend(name).compile(GRAMMARS[grammar]), thinking), thinking


def token(text: str) -> int:
    return PIECES.index(text)


def bits(matcher: Matcher) -> set[int]:
    return set(legal(matcher))


def feed(matcher: Matcher, text: str | bytes) -> bool:
    raw = text.encode() if isinstance(text, str) else text
    return all(map(matcher.accept, raw))


def legal_by_bytes(grammar: Grammar, text: bytes) -> set[int]:
    """Every token tried byte by byte against the grammar as one EBNF."""
    at = oracle(grammar).matcher()
    assert feed(at, text)
    found = set(STOPS) if at.is_complete else set()
    for candidate, piece in enumerate(vocabulary().text):
        fork = at.fork()
        if piece and feed(fork, piece):
            found.add(candidate)
    return found


@pytest.fixture(params=backends.names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("begin", [None, "<think>"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_masks_are_those_of_the_whole_grammar(grammar: str, begin: str | None) -> None:
    compiled, thinking = with_thinking("xgrammar", grammar, begin)
    texts = vocabulary().text
    for seed in range(25):
        rng = random.Random(seed)
        matcher, text = compiled.matcher(), b""
        for _ in range(14):
            allowed = bits(matcher)
            want = legal_by_bytes(thinking, text)
            # The whole grammar lets "<think>" be an answer as well; the matcher reads a beginning.
            if not (grammar == "choice" and begin):
                assert allowed == want, text
            choices = sorted(allowed - set(STOPS))
            if not choices:
                break
            marks = [t for t in choices if b"think" in texts[t] or b"k>" in texts[t]]
            chosen = rng.choice(marks if marks and rng.random() < 0.3 else choices)
            for other in set(range(SIZE)) - allowed:
                assert not matcher.accept(other)
            assert matcher.accept(chosen)
            text += texts[chosen]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_trees_rollback_and_forks(name: str, grammar: str) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        compiled, _ = with_thinking(name, grammar, rng.choice([None, "<think>"]))
        matcher, fed = compiled.matcher(), list[int]()
        for _ in range(rng.randrange(7)):
            choices = sorted(bits(matcher))
            fed.append(pick(rng, choices))
            assert matcher.accept(fed[-1])
            if matcher.is_terminated:
                break
        tree = random_tree(rng)
        rows = np.full((len(tree[0]), vocabulary().words), -1, np.int32)
        before = bits(matcher)
        matcher.fill_tree(*(np.array(part, np.int64) for part in tree), rows)
        np.testing.assert_array_equal(rows, expected(compiled, fed, tree))
        assert matcher.accepted_tokens == len(fed)
        assert bits(matcher) == before
        fork = matcher.fork()
        for length in range(len(fed), -1, -1):
            twin = compiled.matcher()
            assert all(map(twin.accept, fed[:length]))
            assert bits(matcher) == bits(twin)
            assert matcher.is_complete == twin.is_complete
            assert matcher.ended() == twin.ended()
            if length:
                matcher.rollback(1)
        assert bits(fork) == before
        fork.rollback(len(fed))
        assert bits(fork) == bits(compiled.matcher())
        with pytest.raises(ValueError, match="roll back"):
            fork.rollback(1)


def pick(rng: random.Random, choices: list[int]) -> int:
    ends = [t for t in choices if t < SPECIAL and ("k>" in PIECES[t] or PIECES[t] in ("</", "th"))]
    return rng.choice(ends if ends and rng.random() < 0.4 else choices)


def random_tree(rng: random.Random):
    nodes = rng.randint(1, 8)
    first, sibling = [NONE] * nodes, [NONE] * nodes
    for node in range(nodes - 1, 0, -1):
        parent = rng.randrange(node)
        first[parent], sibling[node] = node, first[parent]
    usual = [token(text) for text in ("a", "b", "</think>", "</think>\n\nab", ">\n{", "\n", '{"')]
    odd = [*STOPS, SPECIAL, SIZE + 9, -1, SIZE - 1, *range(len(PIECES))]
    return [rng.choice(usual if rng.random() < 0.7 else odd) for _ in range(nodes)], first, sibling


def expected(compiled, fed: list[int], tree) -> np.ndarray:
    tokens, first, sibling = tree
    rows = np.zeros((len(tokens), vocabulary().words), np.int32)
    pending = [(0, fed)]
    while pending:
        node, path = pending.pop()
        matcher = compiled.matcher()
        assert all(map(matcher.accept, path))
        if matcher.is_terminated:
            continue
        matcher.fill(rows[node])
        child = first[node]
        while child != NONE:
            if tokens[child] in bits(matcher):
                pending.append((child, [*path, tokens[child]]))
            child = sibling[child]
    return rows


def test_nothing_ends_inside_the_thinking(name: str) -> None:
    compiled, _ = with_thinking(name, "letters", None)
    matcher = compiled.matcher()
    for text in ("a", "</", "th"[:1]):
        assert not matcher.is_complete
        assert not matcher.ended()
        assert not any(matcher.accept(stop) for stop in STOPS)
        assert matcher.accept(token(text))
    matcher.rollback(1)
    assert matcher.accept(token("think"))
    assert matcher.accept(token(">\n\n"))
    assert matcher.is_complete
    assert not matcher.accept(token("\n"))
    assert matcher.accept(token("x"))
    assert matcher.ended()
    assert matcher.accept(STOPS[1])
    assert matcher.is_terminated
    assert bits(matcher) == set()
    matcher.rollback(3)
    assert matcher.accepted_tokens == 3
    assert token("1") in bits(matcher)


def test_line_breaks_are_gap_first() -> None:
    inner = Grammar.regex(r"\n?a")
    compiled = reasoning_matcher.wrap(backend("xgrammar").compile(inner), inner.after_thinking())
    for text, whole in (("\na", True), ("\n\na", True), ("\n\n\na", True), ("\n\n\n\na", False)):
        matcher = compiled.matcher()
        taken = all(matcher.accept(token(part)) for part in ("</think>", *text))
        assert (taken and matcher.is_complete) is whole
    matcher = compiled.matcher()
    assert matcher.accept(token("</think>\n\nab")) is False
    assert matcher.accept(token("k>\n\n\na"))
    matcher.rollback(1)
    assert all(matcher.accept(token(part)) for part in ("</", "think"[:1], "h", "i", "n"))
    assert matcher.accept(token("k>\n\n\na"))
    assert matcher.ended()


def test_without_the_opening_marker_the_grammar_holds_from_the_start(name: str) -> None:
    compiled, thinking = with_thinking(name, "letters", "<think>")
    matcher = compiled.matcher()
    assert matcher.is_complete
    assert {token("a"), token("<"), token("<th"), token("<think>"), *STOPS} <= bits(matcher)
    assert token("1") not in bits(matcher)
    assert matcher.accept(token("<"))
    assert not matcher.is_complete
    assert bits(matcher) == {token("t"), token("think")}
    matcher.rollback(1)
    assert matcher.accept(token("a"))
    assert token("1") not in bits(matcher)
    matcher.rollback(1)
    assert matcher.accept(token("<think>"))
    assert token("1") in bits(matcher)
    assert thinking.parse("ab") == "ab"
    assert thinking.parse("<think>1</think>\nab") == "ab"


def test_parse_and_names() -> None:
    number = Grammar.json_schema(int).after_thinking()
    assert number.parse("so 1</think>\n\n12") == 12
    with pytest.raises(ValueError, match="has no end"):
        number.parse("12")
    with pytest.raises(GrammarError, match="already"):
        number.after_thinking()
    with pytest.raises(GrammarError, match="marker"):
        Grammar.json_object().after_thinking(end="")
    with pytest.raises(ConfigError, match="deepseek_r1"):
        load_reasoning("r2")


def test_a_prompt_may_say_whether_there_is_thinking() -> None:
    qwen = load_reasoning("Qwen3")
    assert opened_by(qwen, "user: hi\nassistant: <think>\n") is True
    assert opened_by(qwen, "assistant: <think>\n\n</think>\n\n") is False
    assert opened_by(qwen, "user: what is <think>? assistant:") is None


REPLIES = [
    ("qwen3", None, "<think>a</th b</think>\n\n\nyes</think>", "a</th b", "\nyes</think>"),
    ("qwen3", None, "no <think>", "", "no <think>"),
    ("qwen3", True, "a</think>b", "a", "b"),
    ("qwen3", None, "<thi", "", "<thi"),
    ("deepseek-r1", None, "a</think>\nb", "a", "b"),
    ("deepseek_r1", None, "<think>a</think>b", "a", "b"),
    ("deepseek_r1", None, "never ends</thin", "never ends</thin", ""),
    ("deepseek_r1", None, "<th", "<th", ""),
    ("deepseek_r1", False, "b</think>", "", "b</think>"),
    ("mistral", None, "[THINK]a[/THINK]b", "a", "b"),
    ("mistral", None, "", "", ""),
]


@pytest.mark.parametrize(("format", "inside", "text", "thinking", "answer"), REPLIES)
def test_replies_are_split_alike_however_they_come(
    format: str, inside: bool | None, text: str, thinking: str, answer: str
) -> None:
    for size in (1, 2, 3, 5, 100):
        stream = ReasoningStream(format, inside)
        pieces = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
        pieces.append(stream.finish())
        assert tuple(map("".join, zip(*pieces, strict=True))) == (thinking, answer)
