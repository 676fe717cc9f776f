"""Reads long constraints in processes of their own, so that a slow one holds up nobody else.

A schema of some hundred kilobytes can take a minute to check against its metaschema, in pure
Python, which a thread could neither stop nor do beside the loop.

A process is sent pickled calls and answers with data: it reads what anybody sends, and may be in
other hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from overlap_spec.children import (
    OUTSIDE,
    can_take,
    end_with,
    is_stopped,
    limit_self,
)
from overlap_spec.errors import EngineUnavailable, GrammarError, QueueFull
from overlap_spec.grammar.spec import Grammar
from overlap_spec.shares import HOLDER, Places, Shares

# A source that takes longer than the first leaves its place to the next one, and may take up to
# the second if one of the few slow places is free.
QUICK_S, SLOW_S = 1.0, 10.0
QUICK_PLACES, SLOW_PLACES = 2, 2
MOST_WAITING = 64
MOST_IDLE = 2
MEMORY_BYTES = 2**30
# Longest answer.
ANSWER_BYTES = 2**26
# A process that has not begun after so long is given up; one that ends has this time to be gone.
START_S, GONE_S = 30.0, 1.0
# How often a process that reads is looked at.
LOOK_S = 1.0
LENGTH = struct.Struct("<Q")
# Behind the engine and the loop from the first import on, which takes most of a second.
MAIN = f"import os, sys; os.nice(5); from {__name__} import main; main(int(sys.argv[1]))"
READY = b"!"


class Reading(msgspec.Struct):
    """What a process answers: a grammar, or why there is none.

    Attributes:
        fault: ``refused``: the grammar is wrong. ``memory``: the machine has less than a process
            may take. ``crash``: a fault of ours.
    """

    grammar: Grammar | None = None
    fault: Literal["refused", "memory", "crash"] | None = None
    message: str = ""
    param: str | None = None


class _Lost(Exception):
    """A process was killed or stopped by others; its call is not to blame."""


class GrammarReader:
    """Runs calls that make grammars in a few processes, which are kept for the next call."""

    def __init__(self) -> None:
        self._quick, self._slow = Places(QUICK_PLACES), Shares(SLOW_PLACES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._waiting = Shares(MOST_WAITING)

    async def warm(self) -> None:
        """Start a process for the first call, which would wait for it."""
        # One that is lost already is the first call's affair.
        with contextlib.suppress(_Lost):
            if not self._idle:
                self._idle.append(await _start())

    async def read(self, call: bytes) -> Grammar:
        """The grammar that a call makes; cancelling it ends the process.

        Args:
            call: Pickled; takes no arguments and returns a grammar.

        Raises:
            GrammarError: as the call, or it took too long or too much memory.
            QueueFull: too many are being read.
            EngineUnavailable: two processes in turn were killed or stopped by others, or the
                machine has no memory.
        """
        holder = HOLDER.get()
        if not self._waiting.has_room(holder):
            raise QueueFull("too many long grammars are being read: try again later")
        self._waiting.add(holder)
        try:
            with contextlib.suppress(_Lost):
                return await self._read(call, holder)
            # What befell the one may have befallen those that wait.
            await self.close()
            return await self._read(call, holder)
        except _Lost as lost:
            text = f"the process that reads long grammars {lost}, for the second time"
            raise EngineUnavailable(f"{text}: try again later") from None
        finally:
            self._waiting.add(holder, -1)

    async def _read(self, call: bytes, holder: str) -> Grammar:
        process: asyncio.subprocess.Process | None = None
        answer: asyncio.Task[Reading] | None = None
        try:
            await self._quick.take(holder)
            try:
                process = self._take_idle() or await _start()
                answer = asyncio.create_task(_call(process, call))
                await _wait(answer, process, QUICK_S)
            finally:
                self._quick.give()
            if not answer.done():
                await self._wait_longer(answer, process, holder)
            if not answer.done():
                raise GrammarError(f"the grammar takes over {SLOW_S:g} s to read")
            reading = answer.result()
            if len(self._idle) < MOST_IDLE:
                self._idle.append(process)
                process = None
        finally:
            if answer is not None:
                answer.cancel()
            if process is not None:
                await _end(process)
        return _made(reading)

    async def _wait_longer(
        self, answer: asyncio.Task[Reading], process: asyncio.subprocess.Process, holder: str
    ) -> None:
        """Give a slow one more time, if its holder may have one of the few slow places."""
        if not self._slow.has_room(holder):
            raise QueueFull("too many slow grammars are being read: try again later")
        self._slow.add(holder)
        try:
            await _wait(answer, process, SLOW_S - QUICK_S)
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


def _made(reading: Reading) -> Grammar:
    """The grammar that was read, or the error that was met instead."""
    if reading.fault == "refused":
        raise GrammarError(reading.message, reading.param)
    if reading.fault == "memory":
        raise EngineUnavailable(reading.message)
    if reading.grammar is None:
        raise RuntimeError(reading.message)
    return reading.grammar


async def _start() -> asyncio.subprocess.Process:
    # No more than it needs: the environment may hold secrets.
    needed = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
    environment = {name: os.environ[name] for name in needed if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", MAIN, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # Ctrl-C reaches only the server, which drains before it ends.
            start_new_session=True,
        )
    except OSError as error:
        raise EngineUnavailable(f"no process can be started to read it: {error}") from None
    try:
        # What it imports is no grammar's time.
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            await process.stdout.readexactly(len(READY))
    except (EOFError, TimeoutError):
        await _end(process)
        raise _Lost("did not start") from None
    except BaseException:
        await _end(process)
        raise
    return process


async def _wait(
    answer: asyncio.Task[Reading], process: asyncio.subprocess.Process, most_s: float
) -> None:
    """Wait for an answer; _Lost if its process is stopped."""
    while most_s > 0 and not answer.done():
        await asyncio.wait({answer}, timeout=min(most_s, LOOK_S))
        most_s -= LOOK_S
        if not answer.done() and is_stopped(process.pid):
            raise _Lost("was stopped")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _call(process: asyncio.subprocess.Process, call: bytes) -> Reading:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(LENGTH.pack(len(call)) + call)
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if size > ANSWER_BYTES:
            raise GrammarError(f"the grammar takes over {ANSWER_BYTES} bytes when it is read")
        return DECODER.decode(await process.stdout.readexactly(size))
    except (EOFError, OSError):
        raise await _cause(process) from None
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"a grammar's reader sent no answer: {error}") from None


async def _cause(process: asyncio.subprocess.Process) -> Exception:
    """Why a process has ended."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GONE_S)
    code = process.returncode
    if code is None or -code in OUTSIDE:
        return _Lost("was killed")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return GrammarError(f"the grammar cannot be read: its reader ended with {how}")


def _answer(call: bytes) -> bytes:
    try:
        return ENCODER.encode(Reading(pickle.loads(call)()))
    except GrammarError as error:
        return _refusal(str(error), error.param)
    except RecursionError:
        return _refusal("the grammar is nested too deeply")
    except UnicodeError as error:
        return _refusal(f"the grammar is not valid Unicode: {error}")
    except MemoryError:
        pass
    except Exception as error:
        return ENCODER.encode(Reading(None, "crash", _text(f"{type(error).__name__}: {error}")))
    if can_take(MEMORY_BYTES - _address_space()):
        return _refusal("the grammar takes too much memory to read")
    lack = "the machine has no memory to read the grammar: try again later"
    return ENCODER.encode(Reading(None, "memory", lack))


def _refusal(message: str, param: str | None = None) -> bytes:
    return ENCODER.encode(Reading(None, "refused", _text(message), param and _text(param)))


def _text(said: str) -> str:
    """What can be sent of a text that quotes what came."""
    return said.encode(errors="replace").decode()


def _address_space() -> int:
    """Of this process, in bytes; 0 on systems that do not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _frames(stream: BinaryIO, out: BinaryIO) -> None:
    while head := stream.read(LENGTH.size):
        result = _answer(stream.read(*LENGTH.unpack(head)))
        out.write(LENGTH.pack(len(result)) + result)
        out.flush()


def main(parent: int) -> None:
    """Answer calls from standard input until it closes; ends with the process ``parent``."""
    end_with(parent)
    limit_self(resource.RLIMIT_AS, MEMORY_BYTES)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    _frames(sys.stdin.buffer, sys.stdout.buffer)


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Reading)
