"""llguidance's lexer keeps each state that a text has led to: it is a cache, and is counted."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from overlap_spec.config import EMBEDDED
from overlap_spec.errors import GrammarError, GrammarFailed
from overlap_spec.grammar import Grammar, GrammarCompiler, Matcher
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import Backend, CompiledGrammar
from overlap_spec.tokenizer import Tokenizer
from tests.support.grammars import bits, row_of

# Each text leads to states of its own.
MANY = "{}([a-z ]*[aeiou][a-z ]{{20}})([a-z ]*[bcd][a-z ]{{21}})[a-z ]*"


@pytest.fixture(scope="module")
def backend() -> Backend:
    vocabulary = Tokenizer(EMBEDDED / "target", 2048).vocabulary
    return load("llguidance")(vocabulary)


def write(matcher: Matcher, rng: np.random.Generator, tokens: int) -> list[int]:
    """Text drawn from the masks, without stop tokens."""
    found = []
    for _ in range(tokens):
        found.append(int(rng.choice(bits(row_of(matcher) & matcher.vocabulary.text_row))))
        assert matcher.accept(found[-1])
    return found


def anew(compiled: CompiledGrammar, backend: Backend, tokens: list[int]) -> Matcher:
    """A matcher with a lexer of its own behind some tokens."""
    matcher = backend.deserialize(Grammar.regex("a"), compiled.serialize() or b"").matcher()
    assert all(map(matcher.accept, tokens))
    return matcher


def anywhere(most: int) -> Grammar:
    """One name a character or two, each inside the one before."""
    return Grammar.json_schema({"type": "string", "pattern": "aa", "maxLength": most})


def test_names_too_deep_for_its_stack_are_refused(backend: Backend) -> None:
    with pytest.raises(GrammarError, match=r"3120 of its names and groups .* at most 3100"):
        backend.compile(anywhere(1040))


@pytest.mark.ci
def test_names_as_deep_as_its_stack_allows_are_read_in_threads(backend: Backend) -> None:
    def text() -> str:
        matcher = backend.compile(anywhere(1000)).matcher()
        rng = np.random.default_rng(0)
        written = write(matcher, rng, 20)
        return b"".join(matcher.vocabulary.text[token] for token in written).decode()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(text).result().startswith('"')


def test_texts_outlast_a_full_lexer(backend: Backend) -> None:
    """Two requests of one grammar, whose texts fill its lexer several times: their masks, trees
    and drafts are those of lexers that have read nothing else."""
    rng = np.random.default_rng(0)
    compiled = backend.compile(Grammar.regex(MANY.format("w")))
    one, two = compiled.matcher(), compiled.matcher()
    texts: list[list[int]] = [[], []]
    for turn in range(16):
        matcher, text = (one, two)[turn % 2], texts[turn % 2]
        text += write(matcher, rng, 25)
        twin = anew(compiled, backend, text)
        assert np.array_equal(row_of(matcher), row_of(twin))
        drafts = np.array([text[-1], *write(twin, rng, 2)])
        links = np.array([1, 2, -1]), np.full(3, -1)
        rows = np.zeros((3, matcher.vocabulary.words), np.int32)
        matcher.fill_tree(drafts, *links, rows)
        assert np.array_equal(rows[2], row_of(twin))
        twin.rollback(1)
        assert np.array_equal(rows[1], row_of(twin))
        assert matcher.forced_bytes() == b""
        assert not matcher.accept(matcher.vocabulary.byte_tokens[ord("!")])
        matcher.rollback(3)
        del text[-3:]
        assert matcher.accepted_tokens == len(text)


def test_a_long_grammar_is_not_read_anew_within_a_step(backend: Backend) -> None:
    """That takes as long as to compile it."""
    compiled = backend.compile(Grammar.regex(MANY.format("w") + f"({'z' * 5000})?"))
    room = compiled.memory_bytes
    write(compiled.matcher(), np.random.default_rng(0), 8)
    assert compiled.memory_bytes == room


def test_memory_is_counted_as_it_grows(backend: Backend) -> None:
    compiled = backend.compile(Grammar.regex(MANY.format("w")))
    before = compiled.memory_bytes
    write(compiled.matcher(), np.random.default_rng(0), 100)
    assert compiled.memory_bytes > before + 10 * 2**20
    # Not without end.
    write(compiled.matcher(), np.random.default_rng(1), 100)
    assert compiled.memory_bytes < before + 32 * 2**20


def test_a_cache_drops_grammars_that_have_grown(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    with GrammarCompiler(backend, 64 * 2**20, isolated=False) as compiler:
        for number in range(5):
            compiled = compiler.compile(Grammar.regex(MANY.format(f"w{number}")))
            assert compiler.snapshot()["cache_bytes"] <= 64 * 2**20
            write(compiled.matcher(), rng, 60)
        compiler.compile(Grammar.regex("[ab]"))
        assert compiler.snapshot()["cache_bytes"] <= 64 * 2**20
        assert 2 < compiler.snapshot()["cache_entries"] < 6


def test_a_step_that_takes_too_long_ends_its_request_alone(backend: Backend) -> None:
    ways = "|".join(f"(.*{letter}.{{30}})" for letter in "abcdefghijklmnopqrst")
    compiled = backend.compile(Grammar.regex(f"a*b({ways})*"))
    fine = compiled.matcher()
    assert fine.accept(fine.vocabulary.byte_tokens[ord("a")])
    before = row_of(fine)
    with pytest.raises(GrammarFailed, match="too many expressions"):
        write(compiled.matcher(), np.random.default_rng(0), 150)
    assert fine.accept(fine.vocabulary.byte_tokens[ord("a")])
    assert np.array_equal(row_of(fine), before)
    assert np.array_equal(row_of(compiled.matcher()), before)
