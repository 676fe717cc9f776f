"""Compilers in processes of their own: limits that are soon reached, and their processes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.isolation.limits import CompileLimits

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


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids(compiler: GrammarCompiler) -> list[int]:
    fork_server = cast("int", compiler.snapshot()["executor"]["fork_server_pid"])
    return [fork_server, *children(fork_server)]
