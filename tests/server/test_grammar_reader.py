"""The processes that read long grammars: what befalls them is told as it is."""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.errors import EngineUnavailable, GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.isolation.limits import CompileFailure, FailureKind
from overlap_spec.server.constraints import GrammarReader
from overlap_spec.server.errors import as_api_error
from tests.support.faulty_backend import eat_where_little_is_left, forge
from tests.support.serving import children
from tests.support.tiers import few

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

GOOD = partial(Grammar.json_schema, {"type": "object", "title": "é\N{SKULL}"})


def below(of: int) -> set[int]:
    """Children of a process, and theirs."""
    own = children(of)
    return {*own, *(pid for child in own for pid in below(child))}


def reading(work: Callable[[GrammarReader, set[int]], Awaitable[Any]]) -> Any:
    """What ``work`` returns, which gets a reader and the processes that it has started."""

    async def run() -> Any:
        before, reader = below(os.getpid()), GrammarReader()
        reader.warm()
        try:
            await reader.read(pickle.dumps(GOOD))
            pids = set[int]()
            # A further worker may be on its way.
            while pids != (pids := below(os.getpid()) - before):
                await asyncio.sleep(0.5)
            return await work(reader, pids)
        finally:
            await reader.close()

    return asyncio.run(run())


def test_a_grammar_comes_back_as_it_is_made_here() -> None:
    assert reading(lambda reader, _: reader.read(pickle.dumps(GOOD))) == GOOD()


@pytest.mark.ci
@pytest.mark.parametrize(
    "how", few((signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP), signal.SIGKILL)
)
def test_a_reader_lost_once_costs_a_retry(how: signal.Signals) -> None:
    async def work(reader: GrammarReader, pids: set[int]) -> Grammar:
        for pid in pids:
            os.kill(pid, how)
        return await reader.read(pickle.dumps(GOOD))

    assert reading(work) == GOOD()


def test_a_reader_lost_twice_blames_no_grammar() -> None:
    lose = pickle.dumps(partial(signal.raise_signal, signal.SIGKILL))
    with pytest.raises(EngineUnavailable, match="SIGKILL, for the second time") as caught:
        reading(lambda reader, _: reader.read(lose))
    assert as_api_error(caught.value).status == 503


def test_a_readers_own_end_blames_its_grammar() -> None:
    with pytest.raises(GrammarError, match="SIGABRT"):
        reading(lambda reader, _: reader.read(pickle.dumps(os.abort)))


@pytest.mark.ci
def test_its_own_limit_and_the_machines_are_told_apart() -> None:
    greedy = pickle.dumps(partial(bytes, 2**32))
    with pytest.raises(GrammarError, match="took more than 1024 MiB of memory"):
        reading(lambda reader, _: reader.read(greedy))

    scarce = pickle.dumps(partial(eat_where_little_is_left, 2**25))
    with pytest.raises(EngineUnavailable, match="the machine has less") as caught:
        reading(lambda reader, _: reader.read(scarce))
    assert as_api_error(caught.value).status == 503


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.ci
def test_what_a_reader_sends_is_data(tmp_path: Path) -> None:
    """A reader in other hands sends what would run in the front if it were unpickled."""
    folder = tmp_path / "run"
    forged = pickle.dumps(Evil(folder))
    for call, words in (
        (partial(forge, forged), "sent what none sends"),
        (partial(forge, b"", forged), "its result cannot be read"),
        (partial(bytes, 2**26), "takes more than 64 MiB"),
    ):
        with pytest.raises(GrammarError, match=words):
            reading(lambda reader, _, call=call: reader.read(pickle.dumps(call)))
    assert not folder.exists()


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
