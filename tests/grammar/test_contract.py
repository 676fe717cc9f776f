"""Every backend file is held to the contract in `overlap_spec.grammar.contract`."""

import random
from functools import cache

import numpy as np
import pytest
import xgrammar

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, Vocabulary, backends
from overlap_spec.grammar.contract import Backend, Matcher
from overlap_spec.grammar.matching import walk
from tests.support.grammars import bits, legal, row_of

NONE = -1
STOPS = (3, 7)
SPECIAL = 5
GRAMMARS = {
    "ab*": Grammar.regex("ab*"),
    "nested": Grammar.ebnf('root ::= "a" root "b" | "c"'),
    "schema": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    ),
    "closed": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    ),
    "choice": Grammar.choice(["a", "ab", "cab"]),
}
# What nests without bound is not read by a library of regular expressions.
REFUSED = {("outlines", "nested"), ("outlines", "schema")}
# name: (tokens by text, first child, next sibling); node 0 is already in the matcher.
TREES = {
    "root alone": (["a"], [NONE], [NONE]),
    "chain": (["a", "b", "b", "b"], [1, 2, 3, NONE], [NONE] * 4),
    "illegal in the middle": (["a", "b", "c", "b"], [1, 2, 3, NONE], [NONE] * 4),
    "siblings": (["a", "c", "b", "bb"], [1, NONE, NONE, NONE], [NONE, 2, 3, NONE]),
    "branches": (
        ["a", "b", "bb", "b", "c", "b"],
        [1, 3, 5, NONE, NONE, NONE],
        [NONE, 2, NONE, 4, NONE, NONE],
    ),
    "stop, then a child": (["a", "stop", "b", "b"], [1, 2, NONE, NONE], [NONE, 3, NONE, NONE]),
    "special": (["a", "special", "b"], [1, NONE, NONE], [NONE, 2, NONE]),
    "outside": (["a", "outside", "b"], [1, NONE, NONE], [NONE, 2, NONE]),
    "unlinked": (["a", "b", "b"], [1, NONE, NONE], [NONE, NONE, NONE]),
}


@cache
def vocabulary(size: int) -> Vocabulary:
    texts = [
        b"a",
        b"b",
        b"c",
        b"",
        b"bb",
        b"<s>",
        b'{"',
        b"",
        b"ab",
        b'"a"',
        b":",
        b"1",
        b"}",
        b"{",
        *(b'"', b"0", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"-"),
    ]
    return Vocabulary(tuple(texts), size, STOPS, frozenset({SPECIAL}))


def token(text: str, size: int) -> int:
    if text in ("stop", "special", "outside"):
        return {"stop": STOPS[0], "special": SPECIAL, "outside": size + 40}[text]
    return vocabulary(size).tokens.index(text.encode())


@cache
def backend(name: str, size: int) -> Backend:
    return backends.load(name)(vocabulary(size))


def start(name: str, size: int, grammar: str, fed: list[int]) -> Matcher:
    if (name, grammar) in REFUSED:
        pytest.skip("the backend refuses this grammar")
    matcher = backend(name, size).compile(GRAMMARS[grammar]).matcher()
    assert all(matcher.accept(t) for t in fed)
    return matcher


def expected(name: str, size: int, grammar: str, fed: list[int], tree) -> np.ndarray:
    """Each node by itself: a fresh matcher fed with the whole path, legal by its parent's row."""
    tokens, first, sibling = tree
    rows = np.zeros((len(tokens), vocabulary(size).words), np.int32)
    pending = [(0, list(fed))]
    while pending:
        node, path = pending.pop()
        matcher = start(name, size, grammar, path)
        if matcher.is_terminated:
            continue
        matcher.fill(rows[node])
        child = first[node]
        while child != NONE:
            if tokens[child] in bits(rows[node]):
                pending.append((child, [*path, tokens[child]]))
            child = sibling[child]
    return rows


def arrays(tree) -> tuple[np.ndarray, ...]:
    return tuple(np.array(part, np.int64) for part in tree)


def check_tree(name: str, size: int, grammar: str, fed: list[int], tree) -> None:
    matcher = start(name, size, grammar, fed)
    before = row_of(matcher)
    want = expected(name, size, grammar, fed, tree)
    for fill in (matcher.fill_tree, lambda *a: walk.fill_tree(matcher, *a)):
        rows = np.full(want.shape, -1, np.int32)
        fill(*arrays(tree), rows)
        np.testing.assert_array_equal(rows, want)
        assert matcher.accepted_tokens == len(fed)
        np.testing.assert_array_equal(row_of(matcher), before)


@pytest.fixture(params=backends.names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_is_not_read_exactly_is_refused(name: str) -> None:
    for grammar, spec in GRAMMARS.items():
        if (name, grammar) in REFUSED:
            with pytest.raises(GrammarError, match=f"{name} cannot read this {spec.kind} grammar"):
                backend(name, 41).compile(spec)
        else:
            backend(name, 41).compile(spec)


def test_a_compiled_grammar_travels(name: str) -> None:
    spec = GRAMMARS["closed"]
    here, there = backend(name, 41), backends.load(name)(vocabulary(41))
    compiled = there.compile(spec)
    data = compiled.serialize()
    again = here.rebuild(spec) if data is None else here.deserialize(spec, data)
    assert again.backend == compiled.backend
    matcher, other = compiled.matcher(), again.matcher()
    for text in ('{"', "a", None):
        np.testing.assert_array_equal(row_of(matcher), row_of(other))
        if text is not None:
            assert matcher.accept(token(text, 41))
            assert other.accept(token(text, 41))


def test_a_dead_end_of_the_vocabulary_allows_nothing(name: str) -> None:
    holey = backends.load(name)(Vocabulary((b"a", b"b", b"", b"c"), 33, (2,)))
    spec = Grammar.regex("a(bd|c)")
    if name == "outlines":
        # Its table has no row for such a state.
        with pytest.raises(GrammarError, match="vocabulary"):
            holey.compile(spec)
        return
    matcher = holey.compile(spec).matcher()
    assert matcher.accept(0)
    assert matcher.accept(1)
    for _ in range(2):
        assert not row_of(matcher).any()
        assert not matcher.accept(3)
    matcher.rollback(1)
    assert legal(matcher) == [1, 3]
    assert matcher.accept(3)
    assert matcher.ended()


@pytest.mark.parametrize("tree", TREES)
def test_named_trees(name: str, tree: str) -> None:
    texts, first, sibling = TREES[tree]
    tokens = [token(text, 41) for text in texts]
    check_tree(name, 41, "ab*", [token("a", 41)], (tokens, first, sibling))


@pytest.mark.parametrize("remainder", range(32))
def test_random_trees_over_every_remainder(name: str, remainder: int) -> None:
    size = 32 + remainder
    rng = random.Random(remainder)
    for grammar in GRAMMARS:
        if (name, grammar) in REFUSED:
            continue
        matcher = start(name, size, grammar, [])
        fed: list[int] = []
        for _ in range(rng.randrange(4)):
            allowed = [t for t in legal(matcher) if t not in STOPS]
            if allowed:
                fed.append(rng.choice(allowed))
                assert matcher.accept(fed[-1])
        check_tree(name, size, grammar, fed, random_tree(rng, size))


@pytest.mark.parametrize("seed", range(8))
def test_random_chains_of_legal_tokens_and_others(name: str, seed: int) -> None:
    size, rng = 41, random.Random(seed)
    for grammar in GRAMMARS:
        if (name, grammar) in REFUSED:
            continue
        matcher, chain = start(name, size, grammar, []), [0]
        for _ in range(rng.randint(1, 7)):
            texts = [t for t in legal(matcher) if t not in STOPS]
            if texts and rng.random() < 0.9:
                chain.append(rng.choice(texts))
                assert matcher.accept(chain[-1])
            else:
                chain.append(rng.choice([0, 1, *STOPS, SPECIAL, size]))
        links = [*range(1, len(chain)), NONE]
        check_tree(name, size, grammar, [], (chain, links, [NONE] * len(chain)))


def random_tree(rng: random.Random, size: int):
    nodes = rng.randint(1, 8)
    first, sibling = [NONE] * nodes, [NONE] * nodes
    for node in range(nodes - 1, 0, -1):
        parent = rng.randrange(node)
        first[parent], sibling[node] = node, first[parent]
    return (
        [rng.choice([0, 0, 1, 1, 2, 3, 4, 6, 10, 11, 12, 13, size]) for _ in range(nodes)],
        (first),
        sibling,
    )


def test_bits_past_the_vocabulary_and_of_special_tokens_are_zero(name: str) -> None:
    anything = Grammar.ebnf(r"root ::= [\x00-\U0010ffff]*")
    for size in range(32, 65):
        matcher = backend(name, size).compile(anything).matcher()
        text = {i for i, t in enumerate(vocabulary(size).tokens) if t and i != SPECIAL}
        assert set(legal(matcher)) == text | set(STOPS)


def test_rejected_tokens_leave_the_state(name: str) -> None:
    matcher = start(name, 41, "ab*", [0])
    before = row_of(matcher)
    for bad in (token("c", 41), SPECIAL, 20, 41, 10**9, -1):
        assert matcher.accept(bad) is False
    assert matcher.accepted_tokens == 1
    np.testing.assert_array_equal(row_of(matcher), before)


def test_every_stop_token_ends(name: str) -> None:
    for stop in STOPS:
        matcher = start(name, 41, "ab*", [])
        assert not matcher.accept(stop)
        assert matcher.accept(0)
        assert matcher.is_complete
        assert set(STOPS) <= set(legal(matcher))
        assert matcher.accept(stop)
        assert matcher.is_terminated


def test_a_terminated_matcher_is_safe(name: str) -> None:
    matcher = start(name, 41, "ab*", [0, STOPS[0]])
    assert matcher.accept(1) is False
    assert not row_of(matcher).any()
    rows = np.full((2, matcher.vocabulary.words), -1, np.int32)
    matcher.fill_tree(*arrays(([STOPS[0], 1], [1, NONE], [NONE, NONE])), rows)
    assert not rows.any()
    matcher.rollback(1)
    assert not matcher.is_terminated
    assert 1 in legal(matcher)


def test_rollback_is_exact(name: str) -> None:
    matcher = start(name, 41, "nested", [])
    seen = [row_of(matcher)]
    for text in ("a", "a", "a", "c", "b", "b", "b"):
        assert matcher.accept(token(text, 41))
        seen.append(row_of(matcher))
    assert matcher.accept(STOPS[1])
    matcher.rollback(1)
    for row in reversed(seen):
        np.testing.assert_array_equal(row_of(matcher), row)
        if matcher.accepted_tokens:
            matcher.rollback(1)
    for count in (-1, 1):
        with pytest.raises(ValueError, match="roll back"):
            matcher.rollback(count)


def test_forks_are_independent(name: str) -> None:
    matcher = start(name, 41, "nested", [0])
    fork = matcher.fork()
    assert fork.accept(2)
    assert (matcher.accepted_tokens, fork.accepted_tokens) == (1, 2)
    fork.rollback(2)
    assert matcher.accept(0)


def test_the_grammar_end_is_told_apart(name: str) -> None:
    matcher = start(name, 41, "choice", [0])
    assert matcher.is_complete
    assert not matcher.ended()
    assert matcher.accept(1)
    assert matcher.ended()
    assert not start(name, 41, "choice", []).ended()


@pytest.mark.parametrize(
    ("tree", "rows", "message"),
    [
        (([0, 0], [0, NONE], [NONE, NONE]), (2, 2), "first_child"),
        (([0, 0], [2, NONE], [NONE, NONE]), (2, 2), "first_child"),
        (([0, 0], [1, NONE], [NONE, 1]), (2, 2), "next_sibling"),
        (([0, 0], [1], [NONE, NONE]), (2, 2), "shape"),
        (([0, 0], [1, NONE], [NONE, NONE]), (3, 2), "mask rows"),
        (([0, 0], [1, NONE], [NONE, NONE]), (2, 1), "mask rows"),
        (([], [], []), (0, 2), "at least one"),
    ],
)
def test_broken_trees_are_refused(name: str, tree, rows, message: str) -> None:
    matcher = start(name, 41, "ab*", [0])
    with pytest.raises(ValueError, match=message):
        matcher.fill_tree(*arrays(tree), np.zeros(rows, np.int32))


def test_views_and_read_only_links_work(name: str) -> None:
    matcher = start(name, 41, "ab*", [0])
    wide = np.array([[0, 9], [1, 9], [1, 9]], np.int64)
    first, sibling = np.array([1, 2, NONE]), np.full(3, NONE)
    first.flags.writeable = False
    buffer = np.full((6, matcher.vocabulary.words), -1, np.int32)
    matcher.fill_tree(wide[:, 0], first, sibling, buffer[2:5])
    assert (buffer[[0, 1, 5]] == -1).all()
    assert all(1 in bits(row) for row in buffer[2:5])
    with pytest.raises(ValueError, match="contiguous"):
        matcher.fill_tree(wide[:, 0], first, sibling, buffer[::2])


def test_a_fault_inside_the_library_leaves_the_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = start("xgrammar", 41, "ab*", [0])
    before = row_of(matcher)

    def dies(library: xgrammar.GrammarMatcher, *_: object) -> None:
        assert library.accept_token(1)
        raise RuntimeError("midway")

    monkeypatch.setattr(xgrammar.GrammarMatcher, "traverse_draft_tree", dies)
    rows = np.full((1, matcher.vocabulary.words), -1, np.int32)
    with pytest.raises(RuntimeError, match="midway"):
        matcher.fill_tree(*arrays(([0], [NONE], [NONE])), rows)
    assert not rows.any()
    np.testing.assert_array_equal(row_of(matcher), before)


def test_backends_are_found_by_name() -> None:
    from overlap_spec.errors import ConfigError
    from overlap_spec.grammar.backends.xgrammar import XGrammarBackend

    own = "overlap_spec.grammar.backends.xgrammar:XGrammarBackend"
    assert {backends.load(n) for n in ("xgrammar", "XGrammar", own)} == {XGrammarBackend}
    with pytest.raises(ConfigError, match="xgrammar"):
        backends.load("xgramar")
    with pytest.raises(ConfigError, match="not a grammar backend"):
        backends.load("collections:OrderedDict")
