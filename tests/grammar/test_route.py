"""`auto`: which backend it picks, and that the choice survives serialisation."""

import numpy as np
import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, backends
from overlap_spec.grammar.backends.auto import AutoBackend
from overlap_spec.grammar.contract import Backend
from overlap_spec.grammar.ir.route import SMALL, longest_count, route
from overlap_spec.grammar.lowering.lower import lower
from overlap_spec.grammar.parsing import read
from tests.support.grammars import BYTES

NAMED = {
    "type": "object",
    "properties": {"name": {"type": "integer"}},
    "additionalProperties": True,
}
PATTERNED = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "patternProperties": {".*": {"type": "string"}},
    "required": ["name"],
}
AMBIGUOUS = 'root ::= x "b" | "c"\nx ::= "a" root | [ab]*'


@pytest.fixture(scope="module")
def auto() -> Backend:
    return backends.load("auto")(BYTES)


@pytest.mark.parametrize(
    ("grammar", "backend", "reason"),
    [
        (Grammar.regex("[a-z]+"), "xgrammar", "small"),
        (Grammar.choice(["yes", "no"]), "xgrammar", "small"),
        (Grammar.json_schema({"type": "boolean"}), "xgrammar", "small"),
        (Grammar.json_schema(
            {"type": "string", "pattern": "^[A-Z]{2}$"}), "xgrammar", "small"),
        (Grammar.json_schema({"type": "string"}), "llguidance", "strings of any text"),
        (Grammar.json_object(), "llguidance", "strings of any text"),
        (Grammar.json_schema({"type": "string", "maxLength": 400}), "llguidance", "counts to 400"),
        (Grammar.json_schema(NAMED), "llguidance", "free keys"),
        (Grammar.json_schema(PATTERNED), "llguidance", "of patterns"),
        (Grammar.ebnf(
            AMBIGUOUS.replace('| "c"', '| "c"{40}')), "xgrammar", "no lexemes"),
        (Grammar.ebnf('root ::= "a" (= "b")'), "xgrammar", "xgrammar's own"),
    ],
)  # fmt: skip
def test_routes(auto: Backend, grammar: Grammar, backend: str, reason: str) -> None:
    compiled = auto.compile(grammar)
    assert compiled.backend == backend
    assert reason in compiled.reason


def test_a_choice_travels(auto: Backend) -> None:
    grammar = Grammar.json_schema(NAMED)
    compiled = auto.compile(grammar)
    data = compiled.serialize()
    assert data is not None
    again = backends.load("auto")(BYTES).deserialize(grammar, data)
    assert (again.backend, again.reason) == (compiled.backend, compiled.reason)
    rows = np.zeros((2, BYTES.words), np.int32)
    for row, found in zip(rows, (compiled, again), strict=True):
        matcher = found.matcher()
        assert matcher.accept(ord("{"))
        matcher.fill(row)
    assert rows[0].any()
    np.testing.assert_array_equal(*rows)


def test_the_next_backend_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = AutoBackend(BYTES)

    def refuses(*_: object) -> None:
        raise GrammarError("too much")

    monkeypatch.setattr(backends.load("xgrammar"), "compile", refuses)
    compiled = auto.compile(Grammar.regex("ab*"))
    assert compiled.backend == "llguidance"
    assert "xgrammar refused" in compiled.reason
    for name in SMALL.backends:
        monkeypatch.setattr(backends.load(name), "compile", refuses)
    with pytest.raises(GrammarError, match=r"xgrammar: too much; llguidance: too much"):
        auto.compile(Grammar.regex("ab*"))


def test_a_fault_that_is_no_refusal_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = AutoBackend(BYTES)

    def dies(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(backends.load("xgrammar"), "compile", dies)
    with pytest.raises(RuntimeError, match="a fault"):
        auto.compile(Grammar.regex("ab*"))


def test_what_no_lowering_holds_is_refused_by_name(auto: Backend) -> None:
    schema = {"type": "string", "pattern": r"(a|b)\1"}
    with pytest.raises(GrammarError, match="back-reference"):
        auto.compile(Grammar.json_schema(schema))


def test_counts_are_read_off_the_syntax() -> None:
    syntax = lower(Grammar.json_schema({"type": "string", "maxLength": 300}))
    assert max(map(longest_count, syntax.plain.rules.values())) == 300
    assert route(read('root ::= "a"{300}')).backends[0] == "llguidance"
    assert route(read('root ::= ("a")?')) is SMALL
