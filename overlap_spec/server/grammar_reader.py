"""Reads long constraints in processes of their own, so that a slow one holds up nobody else.

A schema of some hundred kilobytes can take a minute to check against its metaschema, in pure
Python, which a thread could neither stop nor do beside the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import struct
import sys
from typing import BinaryIO

from overlap_spec.errors import EngineUnavailable, GrammarError, QueueFull
from overlap_spec.grammar.isolation.environment import limit_self
from overlap_spec.grammar.isolation.work_items import is_stopped
from overlap_spec.grammar.spec import Grammar
from overlap_spec.shares import HOLDER, Places, Shares

# A source that takes longer than the first leaves its place to the next one, and may take up to
# the second if one of the few slow places is free.
QUICK_S, SLOW_S = 1.0, 10.0
# A process that is not there after so long was stopped.
START_S = 10.0
QUICK_PLACES, SLOW_PLACES = 2, 2
MOST_WAITING = 64
MOST_IDLE = 2
MEMORY_BYTES = 2**30
LENGTH = struct.Struct("<Q")
# Behind the engine and the loop from the first import on, which takes most of a second.
MAIN = f"import os; os.nice(5); from {__name__} import main; main()"
READY = b"!"


class GrammarReader:
    """Runs calls that make grammars in a few processes, which are kept for the next call."""

    def __init__(self) -> None:
        self._quick, self._slow = Places(QUICK_PLACES), Shares(SLOW_PLACES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._waiting = Shares(MOST_WAITING)

    async def warm(self) -> None:
        """Start a process for the first call, which would wait for it."""
        if not self._idle:
            self._idle.append(await _start())

    async def read(self, call: bytes) -> Grammar:
        """The grammar that a call makes; cancelling it ends the process.

        Args:
            call: Pickled; takes no arguments and returns a grammar.

        Raises:
            GrammarError: as the call, or it took too long or too much memory.
            QueueFull: too many are being read.
            EngineUnavailable: the process that read it was stopped or killed, or cannot be started.
        """
        holder = HOLDER.get()
        if not self._waiting.has_room(holder):
            raise QueueFull("too many long grammars are being read: try again later")
        self._waiting.add(holder)
        try:
            return await self._read(call, holder)
        finally:
            self._waiting.add(holder, -1)

    async def _read(self, call: bytes, holder: str) -> Grammar:
        process: asyncio.subprocess.Process | None = None
        answer: asyncio.Task[Grammar | Exception] | None = None
        try:
            await self._quick.take(holder)
            try:
                process = self._take_idle() or await _start()
                answer = asyncio.create_task(_call(process, call))
                await asyncio.wait({answer}, timeout=QUICK_S)
            finally:
                self._quick.give()
            if not answer.done() and not is_stopped(process.pid):
                await self._wait_longer(answer, holder)
            if not answer.done():
                if is_stopped(process.pid):
                    raise EngineUnavailable("the grammar's reader was stopped: try again")
                raise GrammarError(f"the grammar takes over {SLOW_S:g} s to read")
            result = answer.result()
            if len(self._idle) < MOST_IDLE:
                self._idle.append(process)
                process = None
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise EngineUnavailable(
                f"the grammar's reader was killed, or cannot be started ({type(error).__name__}): "
                "try again"
            ) from None
        finally:
            if answer is not None:
                answer.cancel()
            if process is not None:
                await _end(process)
        if isinstance(result, Exception):
            raise result
        return result

    async def _wait_longer(self, answer: asyncio.Task[Grammar | Exception], holder: str) -> None:
        """Give a slow one more time, if its holder may have one of the few slow places."""
        if not self._slow.has_room(holder):
            raise QueueFull("too many slow grammars are being read: try again later")
        self._slow.add(holder)
        try:
            await asyncio.wait({answer}, timeout=SLOW_S - QUICK_S)
        finally:
            self._slow.add(holder, -1)

    def _take_idle(self) -> asyncio.subprocess.Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def close(self) -> None:
        """End all processes that are idle."""
        idle, self._idle = self._idle, []
        for process in idle:
            await _end(process)


async def _start() -> asyncio.subprocess.Process:
    # No more than it needs: the environment may hold secrets.
    needed = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
    environment = {name: os.environ[name] for name in needed if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", MAIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # Ctrl-C reaches only the server, which drains before it ends.
        start_new_session=True,
    )
    try:
        # What it imports is no grammar's time.
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            await process.stdout.readexactly(len(READY))
    except BaseException:
        await _end(process)
        raise
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _call(process: asyncio.subprocess.Process, call: bytes) -> Grammar | Exception:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(call)) + call)
    await process.stdin.drain()
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    result: Grammar | Exception = pickle.loads(await process.stdout.readexactly(size))
    return result


def _make(call: bytes) -> Grammar | Exception:
    try:
        grammar: Grammar = pickle.loads(call)()
        return grammar
    except GrammarError as error:
        return GrammarError(str(error), error.param)
    except RecursionError:
        return GrammarError("the grammar is nested too deeply")
    except UnicodeError as error:
        return GrammarError(f"the grammar is not valid Unicode: {error}")
    except MemoryError:
        return GrammarError("the grammar takes too much memory to read")
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _frames(stream: BinaryIO, out: BinaryIO) -> None:
    while head := stream.read(LENGTH.size):
        result = pickle.dumps(_make(stream.read(*LENGTH.unpack(head))))
        out.write(LENGTH.pack(len(result)) + result)
        out.flush()


def main() -> None:
    """Answer calls from standard input until it closes."""
    limit_self(resource.RLIMIT_AS, MEMORY_BYTES)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    _frames(sys.stdin.buffer, sys.stdout.buffer)
