"""The compile cache, and the isolation of faults in the matcher pool."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import (
    AcceptItem,
    FillItem,
    Grammar,
    GrammarCompiler,
    MatcherPool,
    Vocabulary,
)
from overlap_spec.grammar import compile as compile_module
from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.matching import pool as pool_module

VOCABULARY = Vocabulary((b"a", b"b", b""), 3, (2,))


class Counted(CompiledGrammar):
    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def matcher(self) -> Matcher:
        raise NotImplementedError


class Slow(Backend):
    """Counts compilations; a grammar's size is that of its source; `x` fails as the first."""

    name = "slow"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.source)
        assert self.gate.wait(10)
        if set(grammar.source) == {"x"} and (grammar.best_effort or len(self.compiled) == 1):
            raise GrammarError("once", "regex")
        return Counted(len(grammar.source))


def test_one_flight_for_many_callers() -> None:
    backend = Slow(VOCABULARY)
    compiler = GrammarCompiler(backend, isolated=False)
    backend.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        flights = [pool.submit(compiler.compile, Grammar.regex("ab")) for _ in range(8)]
        backend.gate.set()
        assert len({id(flight.result()) for flight in flights}) == 1
    assert backend.compiled == ["ab"]


def test_the_least_recently_used_goes_first() -> None:
    backend = Slow(VOCABULARY)
    compiler = GrammarCompiler(backend, cache_bytes=10, isolated=False)
    for source in ("a" * 4, "b" * 4, "a" * 4, "c" * 4, "a" * 4, "b" * 4):
        compiler.compile(Grammar.regex(source))
        assert compiler.snapshot()["cache_bytes"] <= 10
    assert backend.compiled == ["aaaa", "bbbb", "cccc", "bbbb"]
    compiler.compile(Grammar.regex("d" * 11))
    compiler.compile(Grammar.regex("d" * 11))
    assert backend.compiled[-2:] == ["d" * 11] * 2
    assert compiler.snapshot()["cache_bytes"] == 8


def test_a_failure_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, now = Slow(VOCABULARY), [100.0]
    compiler = GrammarCompiler(backend, isolated=False)
    monkeypatch.setattr(compile_module.time, "monotonic", lambda: now[0])
    errors = []
    for _ in range(3):
        with pytest.raises(GrammarError, match="once") as caught:
            compiler.compile(Grammar.regex("x"))
        errors.append(caught.value)
    assert backend.compiled == ["x"]
    assert len({id(error) for error in errors}) == 3
    assert {error.param for error in errors} == {"regex"}
    now[0] += compile_module.REFUSED_S
    assert compiler.compile(Grammar.regex("x")).memory_bytes == 1
    figures = compiler.snapshot()
    assert figures["failures"] == {"refused": 1}
    assert (figures["compiles"], figures["remembered"]) == (2, 2)


def test_failures_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "FAILURES", 2)
    backend = Slow(VOCABULARY)
    compiler = GrammarCompiler(backend, isolated=False)
    for source in ("x", "xx", "xxx", "x"):
        with pytest.raises(GrammarError):
            compiler.compile(Grammar("regex", source, "compact", best_effort=True))
    assert backend.compiled == ["x", "xx", "xxx", "x"]


def test_figures() -> None:
    compiler = GrammarCompiler(Slow(VOCABULARY), isolated=False)
    assert compiler.snapshot()["compile_ms"] is None
    for source in ("a", "b", "a"):
        compiler.compile(Grammar.regex(source))
    figures = compiler.snapshot()
    assert {name: figures[name] for name in ("compiles", "hits", "in_flight")} == {
        "compiles": 2,
        "hits": 1,
        "in_flight": 0,
    }
    assert (figures["cache_bytes"], figures["cache_entries"]) == (2, 2)
    assert 0 < figures["compile_ms"]["p50"] <= figures["compile_ms"]["p99"]
    compiler.close()
    with pytest.raises(CompileFailure, match="closed"):
        compiler.compile(Grammar.regex("c"))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_fault_in_one_request_stays_there(threads: int) -> None:
    compiled = XGrammarBackend(VOCABULARY).compile(Grammar.regex("ab*"))
    good, bad, short = (compiled.matcher() for _ in range(3))

    def dies(*_: object) -> bool:
        raise RuntimeError("broken matcher")

    bad.accept = bad.fill = bad.fill_tree = dies  # type: ignore[method-assign, assignment]
    one = np.array([0], np.int64), np.array([-1], np.int64), np.array([-1], np.int64)
    buffer = np.full((3, 1), -1, np.int32)
    runs = np.zeros((1, 4), np.int32)
    with MatcherPool(threads) as pool:
        fed = [(good, [0, 1]), (bad, [0]), (short, [0, 0])]
        accepts = [AcceptItem(i, m, t) for i, (m, t) in enumerate(fed)]
        pool.run(accepts)
        fills = [
            FillItem(i, m, *one, rows=buffer[i : i + 1], runs=runs) for i, (m, _) in enumerate(fed)
        ]
        pool.run(fills)
    assert [r.accepted for r in accepts] == [2, 0, 1]
    for results in (accepts, fills):
        assert [r.error is not None for r in results] == [False, True, False]
        assert all(r.start_ns <= r.end_ns for r in results)
    assert buffer[:, 0].tolist() == [0b110, 0, 0b110]
    assert (runs == -1).all()


class Timed(AcceptItem):
    """A call of ten milliseconds, which returns once all of ``others`` are under way."""

    def __init__(self, number: int, others: threading.Barrier | None) -> None:
        compiled = XGrammarBackend(VOCABULARY).compile(Grammar.regex("a"))
        super().__init__(number, compiled.matcher(), ())
        self._others = others

    def work(self) -> None:
        time.sleep(0.01)
        if self._others is not None:
            self._others.wait(10)


@pytest.mark.parametrize("long_s", [0.0005, 60.0])
def test_calls_that_take_long_wake_more_threads(
    long_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones are slower in several: Python's own work does not run side by side."""
    monkeypatch.setattr(pool_module, "LONG_S", long_s)
    with MatcherPool(4) as pool:
        for _ in range(2):
            others = threading.Barrier(4) if long_s < 1 else None
            calls = [Timed(number, others) for number in range(4)]
            pool.run(calls)
            assert [call.error for call in calls] == [None] * 4
            assert len({call.runner for call in calls}) == (4 if others else 1)


@pytest.mark.parametrize("threads", [0, 1])
def test_what_a_step_filled_is_not_kept_for_the_whole_output(threads: int) -> None:
    """A call waits for the one before it: keeping that would keep all calls of the output."""
    matcher = XGrammarBackend(VOCABULARY).compile(Grammar.regex("ab*")).matcher()
    one = np.array([0], np.int64), np.array([-1], np.int64), np.array([-1], np.int64)
    kept: list[weakref.ref[object]] = []
    with MatcherPool(threads) as pool:
        for token in (0, 1, 1):
            accept = AcceptItem(7, matcher, [token])
            rows, runs = np.zeros((1, 1), np.int32), np.zeros((1, 4), np.int32)
            fill = FillItem(7, matcher, *one, rows=rows, runs=runs)
            pool.run([accept])
            pool.run([fill])
            assert (accept.accepted, fill.error) == (1, None)
            kept.append(weakref.ref(rows))
        del rows, runs, fill
        pool.run([AcceptItem(7, matcher, [1])])
        gc.collect()
        assert [row() is None for row in kept] == [True, True, True]


def test_a_gated_grammar_is_its_inner_one_behind_a_gate() -> None:
    """The inner grammar is compiled once, whatever stands before it; failures are its own."""
    backend = XGrammarBackend(Vocabulary((b"a", b"<end>", b""), 3, (2,)))
    with GrammarCompiler(backend, isolated=False) as compiler:
        inner = Grammar.choice(["a"])
        matcher = compiler.compile(inner.after_thinking("<end>")).matcher()
        assert [matcher.accept(t) for t in (0, 2, 0, 1, 1, 0, 2)] == [1, 0, 1, 1, 0, 1, 1]
        assert matcher.is_terminated
        compiler.compile(inner)
        assert compiler.snapshot()["compiles"] == 1
        with pytest.raises(GrammarError, match="nothing is not defined"):
            compiler.compile(Grammar.ebnf("root ::= nothing").after_thinking("<end>"))
