"""The compile cache, and the lane's isolation of faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import AcceptItem, FillItem, Grammar, GrammarCompiler, Lane, Vocabulary
from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Matcher

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
    """Counts compilations; a grammar's size is that of its source; `x` fails the first time."""

    name = "slow"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.source)
        assert self.gate.wait(10)
        if grammar.source == "x" and self.compiled.count("x") == 1:
            raise GrammarError("once")
        return Counted(len(grammar.source))


def test_one_flight_for_many_callers() -> None:
    backend = Slow(VOCABULARY)
    compiler = GrammarCompiler(backend)
    backend.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        flights = [pool.submit(compiler.compile, Grammar.regex("ab")) for _ in range(8)]
        backend.gate.set()
        assert len({id(flight.result()) for flight in flights}) == 1
    assert backend.compiled == ["ab"]


def test_the_least_recently_used_goes_first() -> None:
    backend = Slow(VOCABULARY)
    compiler = GrammarCompiler(backend, cache_bytes=10)
    for source in ("a" * 4, "b" * 4, "a" * 4, "c" * 4, "a" * 4, "b" * 4):
        compiler.compile(Grammar.regex(source))
        assert compiler.used_bytes <= 10
    assert backend.compiled == ["aaaa", "bbbb", "cccc", "bbbb"]
    compiler.compile(Grammar.regex("d" * 11))
    compiler.compile(Grammar.regex("d" * 11))
    assert backend.compiled[-2:] == ["d" * 11] * 2
    assert compiler.used_bytes == 8


def test_a_failure_is_not_remembered() -> None:
    compiler = GrammarCompiler(Slow(VOCABULARY))
    with pytest.raises(GrammarError, match="once"):
        compiler.compile(Grammar.regex("x"))
    assert compiler.compile(Grammar.regex("x")).memory_bytes == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_a_fault_in_one_request_stays_there(threads: int) -> None:
    compiled = XGrammarBackend(VOCABULARY).compile(Grammar.regex("ab*"))
    good, bad, short = (compiled.matcher() for _ in range(3))

    def dies(*_: object) -> bool:
        raise RuntimeError("broken matcher")

    bad.accept = bad.fill = bad.fill_tree = dies  # type: ignore[method-assign, assignment]
    one = np.array([0], np.int64), np.array([-1], np.int64), np.array([-1], np.int64)
    buffer = np.full((3, 1), -1, np.int32)
    with Lane(threads) as lane:
        accepts = lane.accept_batch(
            [
                AcceptItem(i, m, t)
                for i, (m, t) in enumerate([(good, [0, 1]), (bad, [0]), (short, [0, 0])])
            ]
        )
        fills = lane.fill_batch(
            [FillItem(i, m, *one, buffer[i : i + 1]) for i, m in enumerate((good, bad, short))]
        )
    assert [r.request_id for r in accepts] == [0, 1, 2]
    assert [r.accepted for r in accepts] == [2, 0, 1]
    for results in (accepts, fills):
        assert [r.error is not None for r in results] == [False, True, False]
        assert all(r.start_ns <= r.end_ns for r in results)
    assert buffer[:, 0].tolist() == [0b110, 0, 0b110]
