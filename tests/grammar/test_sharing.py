"""Compilers of one process with equal settings share workers, and close independently."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from overlap_spec.grammar import GrammarCompiler, Vocabulary
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from tests.support import faulty_backend
from tests.support.compile_workers import LIMITS, is_running, job, pids, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")


def made(
    vocabulary: Vocabulary = faulty_backend.VOCABULARY, limits: CompileLimits = LIMITS
) -> GrammarCompiler:
    return GrammarCompiler(faulty_backend.FaultyBackend(vocabulary), limits=limits)


@pytest.fixture
def two() -> Iterator[tuple[GrammarCompiler, GrammarCompiler]]:
    with made() as one, made(Vocabulary((b"a", b"b", b""), 3, (2,))) as other:
        yield one, other


def test_equal_wants_are_one_fork_server(two: tuple[GrammarCompiler, GrammarCompiler]) -> None:
    one, other = two
    assert one.compile(job("text")).memory_bytes == 4
    fork_server = pids(one)[0]
    assert other.compile(job("text")).memory_bytes == 4
    assert pids(other)[0] == fork_server
    # Each has a cache of its own.
    assert one.snapshot()["compiles"] == other.snapshot()["compiles"] == 1
    for different in (
        made(limits=dataclasses.replace(LIMITS, time_s=3.0)),
        made(Vocabulary((b"a", b"c", b""), 3, (2,))),
    ):
        with different:
            different.compile(job("text"))
            assert pids(different)[0] != fork_server


def test_closing_one_leaves_the_other_its_workers(
    two: tuple[GrammarCompiler, GrammarCompiler],
) -> None:
    one, other = two
    one.compile(job("text"))
    hung, mine = one.submit(job("hang")), other.submit(job("slow 0.3"))
    until(lambda: one.snapshot()["executor"]["fast_running"] == 2)
    fork_server = pids(one)[0]
    one.close()
    for future in (hung, one.submit(job("late"))):
        with pytest.raises(CompileFailure, match="closed"):
            future.result(0)
    assert mine.result(20).memory_bytes == 8
    until(lambda: other.snapshot()["executor"]["workers_killed"] == 1)
    assert other.compile(job("after")).memory_bytes == 5
    assert pids(other)[0] == fork_server
    other.close()
    until(lambda: not is_running(fork_server))


@pytest.mark.ci
def test_processes_end_with_the_last_however_it_goes() -> None:
    before = set(threading.enumerate())
    one, other, third = made(), made(), made()
    one.compile(job("text"))
    left = pids(one)
    # One is closed, one is forgotten, and one has started nothing.
    one.close()
    assert is_running(left[0])
    del other
    gc.collect()
    assert third.compile(job("text")).memory_bytes == 4
    assert pids(third)[0] == left[0]
    third.close()
    assert set(threading.enumerate()) <= before
    until(lambda: not any(map(is_running, left)))
    with made() as fourth:
        assert fourth.compile(job("text")).memory_bytes == 4
        assert pids(fourth)[0] != left[0]


@pytest.mark.ci
def test_a_fork_starts_workers_of_its_own(two: tuple[GrammarCompiler, GrammarCompiler]) -> None:
    two[0].compile(job("text"))
    fork_server = pids(two[0])[0]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with made() as here:
                here.compile(job("text"))
                status = 0 if pids(here)[0] != fork_server else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert two[1].compile(job("after")).memory_bytes == 5
    assert pids(two[1])[0] == fork_server


@pytest.mark.ci
def test_joining_and_leaving_at_once() -> None:
    faults: list[BaseException] = []

    def use(thread: int) -> None:
        try:
            for i in range(6):
                with made() as compiler:
                    assert compiler.compile(job(f"text {thread} {i}")).memory_bytes == 8
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
