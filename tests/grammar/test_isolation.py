"""Compiling in worker processes: limits, queues, cancellation and clean-up."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from overlap_spec.errors import ConfigError, GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from tests.support import faulty_backend
from tests.support.faulty_backend import VOCABULARY, FaultyBackend, Homebound, Text, limit_growth
from tests.support.serving import children, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")

ROOT = Path(__file__).parents[2]


LIMITS = CompileLimits(
    time_s=2.0,
    memory_bytes=2**26,
    result_bytes=2**24,
    fast_s=0.5,
    fast_running=2,
    long_running=1,
    long_waiting=1,
    nice=0,
)


def job(text: str) -> Grammar:
    return Grammar.ebnf(text)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids(compiler: GrammarCompiler) -> list[int]:
    fork_server = cast("int", compiler.snapshot()["executor"]["fork_server_pid"])
    return [fork_server, *children(fork_server)]


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    with GrammarCompiler(FaultyBackend(VOCABULARY), limits=LIMITS) as made:
        yield made


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("hang", "timeout", "longer than 2 s"),
        ("eat", "out_of_memory", "more than 64 MiB"),
        ("rust", "out_of_memory", "more than 64 MiB"),
        ("swell 20000000", "out_of_memory", "compiled form takes more than 16 MiB"),
        ("abort", "crash", "SIGABRT: a library's last words"),
        ("segfault", "crash", "SIGSEGV"),
        ("raise", "crash", "RuntimeError: a fault \N{SKULL}"),
        ("unreadable", "crash", "ValueError: not mine"),
    ],
)
def test_what_goes_wrong_costs_one_grammar(
    compiler: GrammarCompiler, source: str, kind: str, says: str
) -> None:
    bad = compiler.submit(job(source))
    good = [compiler.submit(job(f"good {i}")) for i in range(8)]
    wait(good)
    with pytest.raises(CompileFailure, match=says) as caught:
        bad.result(20)
    assert (caught.value.kind, caught.value.param) == (kind, "ebnf")
    assert all(future.exception() is None for future in good)
    assert compiler.snapshot()["failures"] == {kind: 1}
    assert compiler.compile(job("after")).memory_bytes == 5


@pytest.mark.parametrize(
    "message",
    [
        "]",
        "[" * 60_000,
        # Of what it sends itself: with nothing that was done, and with a value of another type.
        "\x80",
        "\x81\xa6failed\x01",
    ],
    ids=lambda message: ascii(message[:10]),
)
def test_what_no_worker_sends_costs_one_grammar(compiler: GrammarCompiler, message: str) -> None:
    with pytest.raises(CompileFailure, match="sent what none sends") as caught:
        compiler.submit(job(f"forge {message}")).result(20)
    assert caught.value.kind == "crash"
    assert compiler.submit(job("after")).result(20).memory_bytes == 5


def test_a_plan_that_cannot_be_read_costs_one_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(CompileFailure, match="cannot be read") as caught:
        compiler.submit(job("forge-plan")).result(20)
    assert caught.value.kind == "crash"
    assert compiler.submit(job("after")).result(20).memory_bytes == 5


@pytest.mark.parametrize("source", ["eat", "rust"])
def test_the_machines_lack_of_memory_is_no_grammars_fault(
    compiler: GrammarCompiler, source: str
) -> None:
    compiler.compile(job("warm"))
    fork_server, *_ = pids(compiler)
    # The fork server first: what it forks from then on has its limit.
    for pid in (fork_server, *children(fork_server)):
        limit_growth(pid, LIMITS.memory_bytes // 2)
    with pytest.raises(CompileFailure, match="the machine has less") as caught:
        compiler.submit(job(source)).result(20)
    assert caught.value.kind == "no_memory"


def test_a_refusal_comes_back_as_it_was(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(job("refuse"))
    assert (type(caught.value), str(caught.value)) == (GrammarError, "$.not: no")
    assert caught.value.param == "schema"
    assert compiler.snapshot()["failures"] == {"refused": 1}


def test_it_is_compiled_elsewhere_and_kept_here(compiler: GrammarCompiler) -> None:
    first = compiler.compile(job("text"))
    assert isinstance(first, Text)
    assert first.pid != os.getpid()
    again = compiler.submit(job("text"))
    assert again.done()
    assert again.result() is first
    large = compiler.compile(job("large " + "x" * 2_000_000))
    assert large.memory_bytes == 2_000_006
    rebuilt = compiler.compile(job("rebuild"))
    assert isinstance(rebuilt, Text)
    assert rebuilt.pid == os.getpid()


def test_what_a_first_grammar_needs_is_built_once_for_all_workers(
    compiler: GrammarCompiler,
) -> None:
    found = compiler.compile(job("warmed"))
    assert isinstance(found, Text)
    server = compiler.snapshot()["executor"]["fork_server_pid"]
    assert (int(found.source), found.pid == server) == (server, False)
    wait_for(lambda: compiler.backend.warmed_in == os.getpid())


def test_workers_build_nothing_for_masks(compiler: GrammarCompiler) -> None:
    assert cast("Text", compiler.compile(job("masks"))).source == "False"
    assert FaultyBackend.makes_masks


def test_a_worker_holds_no_sockets_but_its_own(compiler: GrammarCompiler) -> None:
    # One that is at work while the other is forked.
    running = compiler.submit(job("slow 0.3"))
    wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 1)
    futures = [compiler.submit(job(f"sockets {i}")) for i in range(4)]
    assert {cast("Text", future.result(20)).source for future in futures} == {"1"}
    running.result(20)


def test_types_of_the_caller_stay_here(compiler: GrammarCompiler) -> None:
    class Local:
        pass

    compiler.compile(Grammar("ebnf", "text", output=Local))


def test_what_a_worker_prints_is_not_seen(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler.compile(job("print"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.ci
def test_short_ones_do_not_wait_for_long_ones(compiler: GrammarCompiler) -> None:
    hung = [compiler.submit(job(f"hang {i}")) for i in range(4)]
    wait_for(lambda: compiler.snapshot()["executor"]["long_running"] == 1)
    # One runs on, one waits its turn, and the others find no room.
    done, _ = wait(hung, 20, "FIRST_COMPLETED")
    assert {cast("CompileFailure", one.exception()).kind for one in done} == {"busy"}
    for i in range(20):
        compiler.compile(job(f"short {i}"))
    kinds = [cast("CompileFailure", one.exception(20)).kind for one in hung]
    assert sorted(kinds) == ["busy", "busy", "timeout", "timeout"]
    state = compiler.snapshot()
    assert state["compiles"] == 24
    assert state["executor"]["long_waiting"] == state["in_flight"] == 0


@pytest.mark.ci
def test_a_long_one_that_waited_starts_again() -> None:
    limits = CompileLimits(time_s=5, fast_s=0.2, fast_running=1, long_running=1, nice=0)
    with GrammarCompiler(FaultyBackend(VOCABULARY), limits=limits) as compiler:
        futures = [compiler.submit(job(f"slow 1.2 {i}")) for i in range(3)]
        assert [future.result(20).memory_bytes for future in futures] == [10] * 3
        assert compiler.snapshot()["executor"]["workers_killed"] == 2


def test_the_fast_queue_is_bounded() -> None:
    limits = CompileLimits(fast_running=1, fast_waiting=1, nice=0)
    with GrammarCompiler(FaultyBackend(VOCABULARY), limits=limits) as compiler:
        first = compiler.submit(job("slow 0.5"))
        wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 1)
        second = compiler.submit(job("second"))
        wait_for(lambda: compiler.snapshot()["executor"]["fast_waiting"] == 1)
        with pytest.raises(CompileFailure, match="try again later") as caught:
            compiler.compile(job("third"))
        assert caught.value.kind == "busy"
        wait([first, second])
        assert compiler.compile(job("third")).memory_bytes == 5


def test_one_flight_for_all_who_ask(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit(job("slow 0.3")) for _ in range(8)]
    assert futures[0].cancel()
    results = [future.result(20) for future in futures[1:]]
    assert len({id(result) for result in results}) == 1
    state = compiler.snapshot()
    assert (state["compiles"], state["joined"], state["cancelled"]) == (1, 7, 0)


def test_a_compile_that_all_have_left_is_stopped(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit(job("hang")) for _ in range(2)]
    wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 1)
    assert all(future.cancel() for future in futures)
    wait_for(lambda: compiler.snapshot()["executor"]["workers_killed"] == 1)
    with pytest.raises(CancelledError):
        futures[0].result()
    state = compiler.snapshot()
    assert (state["cancelled"], state["in_flight"], state["failures"]) == (1, 0, {})
    assert compiler.compile(job("after")).memory_bytes == 5


def test_one_that_waits_can_be_left(compiler: GrammarCompiler) -> None:
    slow = [compiler.submit(job(f"slow 0.4 {i}")) for i in range(2)]
    wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 2)
    waiting = compiler.submit(job("never"))
    assert waiting.cancel()
    wait(slow)
    wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 0)
    assert compiler.snapshot()["executor"]["workers_killed"] == 0


def test_a_worker_killed_from_outside(compiler: GrammarCompiler) -> None:
    compiler.compile(job("warm"))
    future = compiler.submit(job("slow 1"))
    wait_for(lambda: compiler.snapshot()["executor"]["long_running"] == 1)
    # The one that has the job was forked first. It goes last: else another one has it, and goes.
    for pid in pids(compiler)[:0:-1]:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: not is_running(pid))
    assert future.result(20).memory_bytes == 6
    assert compiler.compile(job("after")).memory_bytes == 5


@pytest.mark.ci
def test_a_worker_stopped_from_outside_blames_no_grammar(compiler: GrammarCompiler) -> None:
    compiler.compile(job("warm"))
    future = compiler.submit(job("slow 1"))
    wait_for(lambda: compiler.snapshot()["executor"]["long_running"] == 1)
    # The one that was forked first has the job, and another one is at hand.
    os.kill(pids(compiler)[1], signal.SIGSTOP)
    assert future.result(20).memory_bytes == 6


@pytest.mark.ci
def test_the_fork_server_killed_from_outside(compiler: GrammarCompiler) -> None:
    compiler.compile(job("warm"))
    before = pids(compiler)
    future = compiler.submit(job("slow 1"))
    wait_for(lambda: compiler.snapshot()["executor"]["long_running"] == 1)
    os.kill(before[0], signal.SIGKILL)
    assert future.result(20).memory_bytes == 6
    assert compiler.compile(job("after")).memory_bytes == 5
    wait_for(lambda: not any(map(is_running, before)))


@pytest.mark.ci
def test_a_worker_killed_again_and_again_blames_no_grammar(compiler: GrammarCompiler) -> None:
    compiler.compile(job("warm"))
    future = compiler.submit(job("slow 1"))
    end = time.monotonic() + 20
    while not future.done() and time.monotonic() < end:
        for pid in pids(compiler)[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    with pytest.raises(CompileFailure, match="SIGKILL, for the second time") as caught:
        future.result(0)
    assert caught.value.kind == "unavailable"
    # It is not remembered.
    assert compiler.submit(job("slow 1")).result(20).memory_bytes == 6


def test_a_stopped_fork_server_costs_a_retry(compiler: GrammarCompiler) -> None:
    compiler.compile(job("warm"))
    left = pids(compiler)
    for pid in left:
        os.kill(pid, signal.SIGSTOP)
    assert compiler.compile(job("text")).memory_bytes == 4
    wait_for(lambda: not any(map(is_running, left)))


@pytest.mark.parametrize("backend", ["Homebound", "Threaded"])
def test_workers_that_cannot_start(backend: str) -> None:
    Homebound.home = os.getpid()
    says = {"Homebound": "far from home", "Threaded": "started 1 threads"}[backend]
    kind = getattr(faulty_backend, backend)
    with GrammarCompiler(kind(VOCABULARY), limits=LIMITS) as compiler:
        for source in ("one", "two"):
            with pytest.raises(CompileFailure, match=f"cannot be started .*{says}"):
                compiler.submit(job(source)).result(20)


def test_nothing_starts_before_the_first_grammar_nor_stays_after_the_end() -> None:
    before = set(threading.enumerate())
    compiler = GrammarCompiler(FaultyBackend(VOCABULARY), limits=LIMITS)
    assert set(threading.enumerate()) <= before
    compiler.warm()
    compiler.compile(job("text"))
    running = compiler.submit(job("hang"))
    wait_for(lambda: compiler.snapshot()["executor"]["fast_running"] == 1)
    left = pids(compiler)
    assert len(left) >= 2
    compiler.close()
    compiler.close()
    for future in (running, compiler.submit(job("late"))):
        with pytest.raises(CompileFailure, match="closed") as caught:
            future.result(0)
        assert caught.value.kind == "closed"
    assert set(threading.enumerate()) <= before
    wait_for(lambda: not any(map(is_running, left)))


def test_a_compiler_that_nobody_holds_ends() -> None:
    before = set(threading.enumerate())
    compiler = GrammarCompiler(FaultyBackend(VOCABULARY), limits=LIMITS)
    compiler.compile(job("text"))
    left = pids(compiler)
    del compiler
    gc.collect()
    wait_for(lambda: set(threading.enumerate()) <= before)
    wait_for(lambda: not any(map(is_running, left)))


SCRIPT = """
import time
from tests.support.faulty_backend import VOCABULARY, FaultyBackend
from overlap_spec.grammar import Grammar, GrammarCompiler
compiler = GrammarCompiler(FaultyBackend(VOCABULARY))
compiler.compile(Grammar.ebnf("text"))
future = compiler.submit(Grammar.ebnf("hang"))
while not compiler.snapshot()["executor"]["fast_running"]:
    time.sleep(0.01)
fork_server = compiler.snapshot()["executor"]["fork_server_pid"]
print(fork_server, open(f"/proc/{{fork_server}}/task/{{fork_server}}/children").read(), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "time.sleep(60)"], ids=["exit", "killed"])
def test_no_process_outlives_the_engine(end: str) -> None:
    script = SCRIPT.format(end=end)
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        left = [int(pid) for pid in process.stdout.readline().split()]
        assert len(left) >= 2
        if end:
            assert all(map(is_running, left))
            process.kill()
        process.wait(20)
        assert process.returncode == (-signal.SIGKILL if end else 0)
    wait_for(lambda: not any(map(is_running, left)))


def test_a_fork_of_the_engine_leaves_its_workers_alone(compiler: GrammarCompiler) -> None:
    compiler.compile(job("text"))
    left = pids(compiler)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            late = compiler.submit(job("late")).exception(0)
            compiler.close()
            status = 0 if isinstance(late, CompileFailure) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert compiler.compile(job("after")).memory_bytes == 5
    assert all(map(is_running, left[:1]))


def test_many_threads_at_once(compiler: GrammarCompiler) -> None:
    found: list[int] = []

    def ask(thread: int) -> None:
        for i in range(25):
            future = compiler.submit(job(f"text {i}"))
            if (thread + i) % 5 == 0:
                future.cancel()
            else:
                found.append(future.result(20).memory_bytes)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    wait_for(lambda: compiler.snapshot()["in_flight"] == 0)
    assert compiler.snapshot()["failures"] == {}


def test_a_class_that_workers_cannot_import() -> None:
    class Local(FaultyBackend):
        pass

    with pytest.raises(ConfigError, match=r"<locals>.Local cannot be imported"):
        GrammarCompiler(Local(VOCABULARY))


@pytest.mark.parametrize("name", ["time_s", "memory_bytes", "fast_running", "long_waiting"])
def test_limits_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CompileLimits(**{name: -1})


def test_xgrammar_in_a_worker_is_xgrammar_here_without_torch() -> None:
    tokens = [bytes([byte]) for byte in range(32, 127)]
    vocabulary = Vocabulary((*tokens, b""), len(tokens) + 1, (len(tokens),))
    backend = load("xgrammar")(vocabulary)
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": [1, "two", None]}})
    with GrammarCompiler(backend) as compiler:
        elsewhere = compiler.compile(grammar).matcher()
        maps = Path(f"/proc/{pids(compiler)[0]}/maps").read_text()
    assert "libxgrammar" in maps
    assert "libtorch" not in maps
    here = backend.compile(grammar).matcher()
    rows = np.zeros((2, vocabulary.words), np.int32)
    for char in b'["two",1,null]':
        for matcher, row in zip((elsewhere, here), rows, strict=True):
            matcher.fill(row)
            assert matcher.accept(char - 32)
        assert np.array_equal(*rows)
    assert elsewhere.is_complete
    assert here.is_complete


@pytest.mark.ci
def test_holders_of_grammars_that_wait_take_turns(compiler: GrammarCompiler) -> None:
    many = [compiler.submit(job(f"slow 0.3 {i}"), "one") for i in range(10)]
    few = compiler.submit(job("slow 0.3 other"), "other")
    few.result(20)
    assert sum(future.done() for future in many) < 8
    for future in many:
        future.result(20)
