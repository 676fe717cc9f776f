"""Runs behind the nodes of draft trees: forced bytes, and their canonical tokens."""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from overlap_spec.config import EMBEDDED
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, backends
from overlap_spec.grammar.contract import Matcher
from overlap_spec.grammar.drafting.forced import ForcedRuns
from overlap_spec.grammar.drafting.guesses import KINDS, Guesses
from overlap_spec.grammar.ir.reach import reach
from overlap_spec.grammar.isolation.jobs import compile_whole
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.matching import walk
from overlap_spec.grammar.reasoning.matcher import wrap
from overlap_spec.grammar.rows import allowed
from tests.support.grammars import STOP, TEXTS, VOCABULARY, encode, ids, legal, random_ebnf
from tests.support.tiers import few

PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "näh": {"enum": ["left", "less"]}},
        "required": ["name", "näh"],
        "additionalProperties": False,
    }
)
GRAMMARS = {
    "schema": PERSON,
    "regex": Grammar.regex(r"ab(cd|ce)f*"),
    "choice": Grammar.choice(["alpha", "alphabet", "alps"]),
    "characters": Grammar.choice(["über", "üben", "äß", "語"]),
    "nested": Grammar.ebnf('root ::= "a(" root ")" | "b"'),
}


@cache
def matcher_of(name: str, grammar: str) -> Matcher:
    if (name, grammar) == ("outlines", "nested"):
        pytest.skip("the backend refuses this grammar")
    return compile_whole(backends.load(name)(VOCABULARY), GRAMMARS[grammar]).matcher()


@pytest.fixture(params=backends.names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_forced_bytes_are_those_that_the_masks_leave(name: str, grammar: str) -> None:
    """On random walks: they are the bytes that single-byte tokens allow, one after the other."""
    rng = random.Random(grammar)
    for _ in range(12):
        matcher = matcher_of(name, grammar).fork()
        for _ in range(rng.randint(0, 14)):
            before, path = matcher.accepted_tokens, []
            fork = matcher.fork()
            for _ in range(rng.randint(0, 3)):
                choices = [t for t in legal(fork) if t != STOP]
                if not choices:
                    break
                path.append(rng.choice(choices))
                assert fork.accept(path[-1])
            forced = matcher.forced_bytes(path)
            assert matcher.accepted_tokens == before
            for byte in forced:
                assert [t for t in legal(fork) if len(VOCABULARY.text[t]) == 1 or t == STOP][
                    :1
                ] == [byte]
                assert {VOCABULARY.text[t][:1] for t in legal(fork)} == {bytes([byte])}
                assert fork.accept(byte)
            ahead = {VOCABULARY.text[t][:1] for t in legal(fork)}
            # A library may stop at the start of a character of several bytes.
            assert len(ahead) != 1 or ahead == {b""} or max(ahead) >= b"\x80"
            choices = [t for t in legal(matcher) if t != STOP]
            if not choices:
                break
            assert matcher.accept(rng.choice(choices))


def test_a_matcher_that_has_ended_forces_nothing(name: str) -> None:
    matcher = matcher_of(name, "regex").fork()
    for token in (*b"abcd", STOP):
        assert matcher.accept(token)
    assert matcher.forced_bytes() == b""


def runs_of(matcher: Matcher, tree: tuple[list[int], ...], tokens: int = 8) -> tuple[list, int]:
    runs = ForcedRuns(VOCABULARY, encode, tokens)
    arrays = [np.array(part, np.int64) for part in tree]
    rows = np.zeros((len(tree[0]), VOCABULARY.words), np.int32)
    matcher.fill_tree(*arrays, rows)
    found = np.full((len(rows), tokens), 5, np.int32)
    openings = runs.fill(matcher, *arrays, rows, found, Guesses())
    return [[t for t in run if t >= 0] for run in found.tolist()], openings.refused


def test_each_node_has_its_own_run(name: str) -> None:
    """Legal branches, inside the run of their parent; one that is not, and one behind that."""
    tokens = [0, *ids("{", '"', "x", "n", '{"', "name")]
    child = [1, 2, -1, -1, -1, 6, -1]
    sibling = [-1, 5, 3, -1, -1, -1, -1]
    runs, refused = runs_of(matcher_of(name, "schema").fork(), (tokens, child, sibling))
    # The runs of nodes 0, 1 and 5 begin with a child of theirs.
    assert runs[0] == runs[1] == runs[5] == []
    assert runs[2] == ids("name", '":"')
    assert runs[3] == runs[4] == []
    assert runs[6] == ids('":"')
    assert refused == 1


def test_the_fill_asks_only_where_a_run_opens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = matcher_of(name, "schema").fork()
    asked = []
    ask = type(matcher).forced_bytes

    def note(own: Matcher, path: Sequence[int] = ()) -> bytes:
        asked.append(list(path))
        return ask(own, path)

    monkeypatch.setattr(type(matcher), "forced_bytes", note)
    chain = [0, *ids('{"', "name", '":"', "x")]
    runs_of(matcher, (chain, [1, 2, 3, 4, -1], [-1] * 5))
    assert asked == [[]]


def test_a_run_ends_before_a_token_that_may_go_on(name: str) -> None:
    """`le` of two values is one token with what follows; the quote after `alp` belongs to it."""
    matcher = matcher_of(name, "choice").fork()
    runs = ForcedRuns(VOCABULARY, encode, 8)
    assert matcher.forced_bytes() == b"alp"
    assert runs.tokens(b"alp", Guesses()) == ids("a", "l", "p")
    # `":` and a quote would be one token.
    assert runs.tokens(b'name":', Guesses()) == ids("name")
    assert runs.tokens(b"\xc3", Guesses()) == []
    assert runs.tokens(b"x" * 400, Guesses()) == [ord("x")] * 8


def test_a_space_in_front_of_every_text_is_left_out() -> None:
    """As SentencePiece's tokenizers encode: the run is taken from behind another text."""

    def spaced(text: str) -> list[int]:
        return encode(" " + text)

    assert ForcedRuns(VOCABULARY, spaced, 8).tokens(b"name}", Guesses()) == ids("name", "}")


def test_tokens_beyond_the_vocabulary_are_none() -> None:
    runs = ForcedRuns(VOCABULARY, lambda text: [*encode(text), len(TEXTS) + 5], 8)
    assert runs.tokens(b"name}", Guesses()) == []


def test_what_was_chosen_before_comes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice counts for the bytes that were to come, wherever they come again."""
    monkeypatch.setattr(Guesses, "trusts", lambda *_: True)
    matcher = matcher_of(name, "schema").fork()
    runs, guesses = ForcedRuns(VOCABULARY, encode, 8), Guesses()
    tree = [np.array(part, np.int64) for part in ([0, *ids("{", '"')], [1, 2, -1], [-1] * 3)]
    rows = np.zeros((3, VOCABULARY.words), np.int32)
    matcher.fill_tree(*tree, rows)
    openings = runs.fill(matcher, *tree, rows, np.empty((3, 8), np.int32), guesses)
    runs.learn(openings, ids("{", '"', "na"), guesses)
    assert runs.tokens(b'{"name":"', guesses) == ids("{", '"', "na", "m", "e", '":"')
    assert runs.tokens(b'name":"', guesses) == ids("na", "m", "e", '":"')
    assert runs.tokens(b'{"names":"', guesses) == ids('{"', "name", "s", '":"')
    # Off the tree nothing is known.
    runs.learn(openings, ids('{"', "na"), guesses)
    assert runs.tokens(b'{"name":"', guesses)[:3] == ids('{"', "na", "m")


def test_each_kind_of_guess_is_judged_by_itself_and_against_the_drafter() -> None:
    guesses = Guesses()
    for number in range(12):
        guesses.note(b"%d" % number, 1, 2)
    assert [guesses.trusts(kind) for kind in range(KINDS)] == [False, True, True]
    # A drafter that is always wrong is no better than that.
    for _ in range(40):
        guesses.judge(False)
    assert [guesses.trusts(kind) for kind in range(KINDS)] == [True, True, True]
    for _ in range(40):
        guesses.judge(True)
    assert [guesses.trusts(kind) for kind in range(KINDS)] == [False, False, False]
    for number in range(12):
        guesses.note(b"%d" % number, 1, None)
    assert [guesses.trusts(kind) for kind in range(KINDS)] == [False, True, False]
    for number in range(12):
        guesses.note(b"%d" % number, 1, None)
    assert [guesses.trusts(kind) for kind in range(KINDS)] == [False, True, True]
    for _ in range(3):
        guesses.note(b"0", 5, None)
    assert guesses.find(b"0") == (5, 2)
    assert not guesses.trusts(1) or not guesses.trusts(2)


def test_the_drafter_is_judged_by_its_own_guesses(name: str) -> None:
    """In forced text alone, and not by what a run told it."""
    matcher = matcher_of(name, "schema").fork()
    runs, guesses = ForcedRuns(VOCABULARY, encode, 8), Guesses()
    judged: list[bool] = []
    guesses.judge = judged.append  # type: ignore[method-assign]
    links = [1, 2, 3, -1], [-1] * 4
    tree = [np.array(part, np.int64) for part in ([0, *ids("{", '"', "n")], *links)]
    rows = np.zeros((4, VOCABULARY.words), np.int32)
    matcher.fill_tree(*tree, rows)

    def step(told: list[int], *chosen: str) -> tuple[list[bool], list[int]]:
        judged.clear()
        openings = runs.fill(matcher, *tree, rows, np.empty((4, 8), np.int32), guesses)
        guesses.told = told
        runs.learn(openings, ids(*chosen), guesses)
        return list(judged), guesses.told

    # All right, and the run behind the last one begins with the bonus.
    assert step([], "{", '"', "n", "a") == ([True] * 3, ids("m", "e", '":"'))
    assert step(ids("{", '"'), "{", '"', "n", "a") == ([True], ids("m", "e", '":"'))
    # What was told was refused, and then what was guessed.
    assert step(ids("{", '"', "n"), "{", '"', "name") == ([], [])
    assert step([], '{"') == ([False], [])


def test_runs_of_what_terminates_are_none(name: str) -> None:
    matcher = matcher_of(name, "regex").fork()
    for token in b"abcd":
        assert matcher.accept(token)
    runs, refused = runs_of(matcher, ([0, STOP, ord("f")], [1, -1, -1], [-1, 2, -1]))
    assert runs == [[], [], []]
    assert refused == 0
    assert matcher.accept(STOP)
    runs, refused = runs_of(matcher, ([STOP, ord("f")], [1, -1], [-1, -1]))
    assert (runs, refused) == ([[], []], 0)


def test_text_before_the_end_of_thinking_is_free() -> None:
    inner = backends.load("llguidance")(VOCABULARY).compile(PERSON)
    matcher = wrap(inner, Grammar.after_thinking(PERSON, "</think>")).matcher()
    assert matcher.forced_bytes() == b""
    for token in b"x</think>":
        assert matcher.accept(token)
    assert matcher.forced_bytes() == b""
    assert matcher.accept(ord("{"))
    assert matcher.forced_bytes() == b'"name":"'


def test_runs_of_a_real_tokenizer_are_its_own() -> None:
    from overlap_spec.tokenizer import Tokenizer

    tokenizer = Tokenizer(EMBEDDED / "target", 2048)
    runs = ForcedRuns(tokenizer.vocabulary, tokenizer.encode, 16)
    text = '{"title":{"value":"'
    found = runs.tokens(text.encode(), Guesses())
    assert found == tokenizer.encode(text)
    assert allowed(tokenizer.vocabulary.text_row, found[0])


def doubled(times: int, more: str = "") -> Grammar:
    """A grammar of 2 ** times letters, before what else it has."""
    rules = "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(times))
    return Grammar.ebnf(f'root ::= a0 {more}\n{rules}a{times} ::= "a"\n')


LONG_TEXTS = {
    "ebnf": doubled(20),
    "both ways": doubled(20, '("b" | "c")'),
    "lark": Grammar.ebnf('start: a\na: b~1024\nb: "a"~1024\n'),
    "regex": Grammar.regex("a{100000}"),
    "items": Grammar.json_schema({"type": "array", "items": {"const": 1}, "minItems": 1_000_000}),
    "closing": Grammar.ebnf('root ::= "(" root "' + "a" * 1000 + '" | "a"'),
}


@pytest.mark.parametrize("grammar", few(LONG_TEXTS, "both ways", "items"))
def test_long_forced_text_is_told_in_part(name: str, grammar: str) -> None:
    """The libraries look for its end. The matcher, and others of its grammar, go on."""
    try:
        compiled = compile_whole(backends.load(name)(VOCABULARY), LONG_TEXTS[grammar])
    except GrammarError:
        pytest.skip("the backend refuses this grammar")
    matcher = compiled.matcher()
    if grammar == "closing":
        for _ in range(80):
            assert matcher.accept(ord("("))
        assert matcher.accept(ord("a"))
    forced = matcher.forced_bytes()
    assert 200 < len(forced) < 2**15
    for byte in forced[:30]:
        assert byte in legal(matcher)
        assert matcher.accept(byte)
        assert matcher.forced_bytes()
    assert compiled.matcher().forced_bytes()[:1] in (b"a", b"[", b"")


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_masks_tell_what_a_library_tells(name: str, grammar: str) -> None:
    rng = random.Random(grammar)
    matcher = matcher_of(name, grammar).fork()
    while choices := [t for t in legal(matcher) if t != STOP]:
        told, by_masks = matcher.forced_bytes(), walk.forced_bytes(matcher, ())
        # A library may stop at the start of a character of several bytes.
        assert by_masks.startswith(told)
        assert by_masks == told or by_masks[len(told)] >= 0x80
        token = rng.choice(choices)
        assert walk.forced_bytes(matcher, [token]).startswith(matcher.forced_bytes([token]))
        assert matcher.accept(token)
        if matcher.accepted_tokens > 40:
            break


def test_no_grammar_forces_more_than_its_bound() -> None:
    """Over random grammars, with rules that call each other in circles."""
    told = 0
    for seed in range(150):
        rng = random.Random(seed)
        text = random_ebnf(rng)
        try:
            syntax = lower(Grammar.ebnf(text))
        except GrammarError:
            continue
        bound = reach(syntax.plain)
        matcher = backends.load("reference")(VOCABULARY).compile(Grammar.ebnf(text)).matcher()
        size = 0
        while choices := [t for t in legal(matcher) if t < 256]:
            forced = matcher.forced_bytes()
            assert len(forced) <= bound.longest(size), text
            told += len(forced) > 1
            assert matcher.accept(rng.choice(choices))
            size += 1
            if size > 20:
                break
    assert told > 100
