"""The processes that read long grammars: what befalls them is told as it is."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.errors import EngineUnavailable, GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.isolation.limits import CompileFailure, FailureKind
from overlap_spec.server.errors import as_api_error
from overlap_spec.server.grammar_reader import GrammarReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

GOOD = partial(Grammar.json_schema, {"type": "object", "title": "é\N{SKULL}"})


def children() -> set[int]:
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in found for pid in file.read_text().split()}


def reading(work: Callable[[GrammarReader, set[int]], Awaitable[Any]]) -> Any:
    """What ``work`` returns, which gets a reader and the process that it has started."""

    async def run() -> Any:
        before, reader = children(), GrammarReader()
        await reader.warm()
        try:
            return await work(reader, children() - before)
        finally:
            await reader.close()

    return asyncio.run(run())


def test_a_grammar_comes_back_as_it_is_made_here() -> None:
    assert reading(lambda reader, _: reader.read(pickle.dumps(GOOD))) == GOOD()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_reader_lost_once_costs_a_retry(how: signal.Signals) -> None:
    async def work(reader: GrammarReader, pids: set[int]) -> Grammar:
        for pid in pids:
            os.kill(pid, how)
        return await reader.read(pickle.dumps(GOOD))

    assert reading(work) == GOOD()


@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "was killed"), (signal.SIGSTOP, "was stopped")]
)
def test_a_reader_lost_twice_blames_no_grammar(how: signal.Signals, words: str) -> None:
    lose = pickle.dumps(partial(signal.raise_signal, how))
    with pytest.raises(EngineUnavailable, match=f"{words}, for the second time") as caught:
        reading(lambda reader, _: reader.read(lose))
    assert as_api_error(caught.value).status == 503


def test_a_readers_own_end_blames_its_grammar() -> None:
    with pytest.raises(GrammarError, match="SIGABRT"):
        reading(lambda reader, _: reader.read(pickle.dumps(os.abort)))


def test_its_own_limit_and_the_machines_are_told_apart() -> None:
    greedy = pickle.dumps(partial(bytes, 2**32))
    with pytest.raises(GrammarError, match="takes too much memory"):
        reading(lambda reader, _: reader.read(greedy))

    async def work(reader: GrammarReader, pids: set[int]) -> Grammar:
        for pid in pids:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + 2**25
            resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
        return await reader.read(greedy)

    with pytest.raises(EngineUnavailable, match="the machine has no memory") as caught:
        reading(work)
    assert as_api_error(caught.value).status == 503


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_a_reader_sends_is_data(tmp_path: Path) -> None:
    """A reader in other hands sends what would run in the front if it were unpickled."""
    folder = tmp_path / "run"
    forged = pickle.dumps(Evil(folder))
    call = partial(os.write, 1, struct.pack("<Q", len(forged)) + forged)
    with pytest.raises(RuntimeError, match="no answer"):
        reading(lambda reader, _: reader.read(pickle.dumps(call)))
    assert not folder.exists()
    huge = partial(os.write, 1, struct.pack("<Q", 2**50))
    with pytest.raises(GrammarError, match="bytes when it is read"):
        reading(lambda reader, _: reader.read(pickle.dumps(huge)))


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("no_memory", 503, "out_of_memory"),
        ("unavailable", 503, "engine_unavailable"),
        ("out_of_memory", 400, "grammar_out_of_memory"),
    ],
)
def test_whose_lack_of_memory_it_is_has_its_status(
    kind: FailureKind, status: int, code: str
) -> None:
    found = as_api_error(CompileFailure("no", kind))
    assert (found.status, found.code) == (status, code)
