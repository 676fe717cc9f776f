"""The client of a running engine: its process, the open requests, and restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import replace
from typing import Any, Literal

from overlap_spec.children import OwnProcess
from overlap_spec.errors import CheckpointError, ConfigError, EngineUnavailable
from overlap_spec.ipc import messages as m
from overlap_spec.ipc.open_requests import OpenRequests
from overlap_spec.ipc.preparation import Preparation
from overlap_spec.ipc.process import EngineProcess
from overlap_spec.ipc.request_handle import AsyncRequestHandle
from overlap_spec.types import Request

log = logging.getLogger("overlap_spec")

Health = Literal["starting", "ready", "restarting", "closed"]
LONGEST_BACKOFF_S = 30.0
# Uptime after which the restart back-off begins again at zero.
STABLE_AFTER_S = 60.0
QUERY_TIMEOUT_S = 30.0
# Of an idle engine, whose heartbeats come every second: a shorter stall_timeout_s is not for it.
LONGEST_SILENCE_S = 10.0
SHUTDOWN_GRACE_S = 10.0
# An engine that loads sends nothing, and a large checkpoint takes minutes.
LOAD_S = 600.0
# How long messages of a process that has died may still arrive.
LAST_MESSAGES_S = 0.5


class EngineClient:
    """Keeps one engine process alive, and hands its messages to those who wait for them.

    Args:
        settings: Of the engine.
        stall_timeout_s: Kills an engine that sends nothing for so long, not even a heartbeat.

    Attributes:
        health: State of the engine; it accepts requests only if it is ``ready``.
        restarts: How often the engine's process has died and was restarted.
    """

    def __init__(self, settings: dict[str, Any], stall_timeout_s: float) -> None:
        self._settings, self._stall_timeout_s = settings, stall_timeout_s
        self.open_requests = OpenRequests()
        self.preparation = Preparation(self.open_requests)
        self.health: Health = "starting"
        self.restarts = 0
        self._last_message_s = time.monotonic()
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers, self._own_process = itertools.count(1), OwnProcess()
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last message; a ready engine sends one every second, but for
        a step that takes longer."""
        return time.monotonic() - self._last_message_s

    def set_ready(self, told: m.EngineReady) -> None:
        """Take in what an engine says of itself when it is loaded."""

    async def start(self) -> None:
        """Start the engine's process, and wait until it is loaded.

        Raises:
            ConfigError, CheckpointError: as :class:`overlap_spec.engine.Engine`.
            EngineUnavailable: the process died while it loaded.
        """
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(started))
        try:
            await started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the process; open requests fail, and later ones raise :class:`EngineUnavailable`."""
        self.health = "closed"
        if not self._own_process.is_here:
            return
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
        self.preparation.close()

    def send(self, request: Request) -> AsyncRequestHandle:
        """Send a request; :meth:`AsyncRequestHandle.queued` waits until it is accepted. QueueFull,
        EngineUnavailable: the request itself is fine."""
        process = self._ready_process()
        self.open_requests.check_room(request.holder)
        handle = AsyncRequestHandle(replace(request, id=next(self._numbers)), self._abort)
        self.open_requests.add(handle)
        grammar = request.grammar
        if grammar is not None:
            # The type that parses the output stays in this process.
            grammar = replace(grammar, output=None)
        process.send(m.AddRequest(replace(handle.request, grammar=None), grammar))
        return handle

    def _abort(self, number: int) -> None:
        here = self._own_process.is_here
        if here and number in self.open_requests and self._process is not None:
            self._process.send(m.AbortRequest(number))

    def end_open(self, reason: str) -> None:
        """Abort all open requests; those who wait for them get the reason, as
        :class:`EngineUnavailable`."""
        for handle in list(self.open_requests.values()):
            handle.abort()
            handle.fail(EngineUnavailable(reason))

    async def query(self, what: m.QueryKind, steps: int = 0) -> dict[str, Any]:
        """The engine's answer to a query. EngineUnavailable: there is no engine, or it does not
        answer."""
        process, number = self._ready_process(), next(self._numbers)
        result = self._queries[number] = asyncio.get_running_loop().create_future()
        process.send(m.Query(number, what, steps))
        try:
            return await asyncio.wait_for(result, QUERY_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailable(f"the engine gave no {what} in {QUERY_TIMEOUT_S} s") from None
        finally:
            self._queries.pop(number, None)

    def _ready_process(self) -> EngineProcess:
        self._own_process.check()
        if self.health == "closed":
            raise EngineUnavailable("the engine is closed: make a new one")
        if self._process is None:
            raise EngineUnavailable(f"the engine is {self.health}: try again in some seconds")
        return self._process

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Run one process after another until cancelled, or until the first cannot load."""
        backoff_s = 0.0
        while True:
            start = time.monotonic()
            reason = await self._run_process(started)
            log.error("engine: %s", reason)
            if not started.done():
                self.health = "closed"
                started.set_exception(reason)
                return
            self.restarts += 1
            stable = time.monotonic() - start > STABLE_AFTER_S
            backoff_s = 0.0 if stable else min(2 * backoff_s + 0.25, LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _run_process(self, started: asyncio.Future[None]) -> Exception:
        """Run one process from its start to its end; the reason why it ended."""
        try:
            process = await EngineProcess.start(self._settings)
        except OSError as error:
            return EngineUnavailable(f"the engine's process cannot be started: {error}")
        death = asyncio.create_task(process.process.wait())
        receiver = asyncio.create_task(self._receive(process, started))
        grace_s = SHUTDOWN_GRACE_S
        try:
            await asyncio.wait({death, receiver}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({receiver}, timeout=LAST_MESSAGES_S)
            grace_s = 0.0
            if receiver.done():
                return receiver.result()
            return EngineUnavailable(f"the engine's process {process.exit_status}")
        finally:
            for task in (death, receiver):
                task.cancel()
            await asyncio.gather(death, receiver, return_exceptions=True)
            if self._process is None:
                # An engine that loads does not read messages yet.
                grace_s = 0.0
            self._fail_all()
            await process.end(grace_s)

    async def _receive(self, process: EngineProcess, started: asyncio.Future[None]) -> Exception:
        """Handle a process's messages; the reason why there are no more."""
        while True:
            try:
                loads = self._process is None
                timeout_s = max(self._stall_timeout_s, LOAD_S) if loads else self._stall_timeout_s
                # `wait_for` of Python 3.11 loses a cancellation that meets a message.
                async with asyncio.timeout(timeout_s):
                    message = await process.receive()
            except TimeoutError:
                owes = self._process is None or self.open_requests or self._queries
                if owes or self.silence_s > max(self._stall_timeout_s, LONGEST_SILENCE_S):
                    return EngineUnavailable(f"the engine sent nothing for {timeout_s} s")
                continue
            self._last_message_s = time.monotonic()
            match message:
                case m.EngineReady():
                    self.set_ready(message)
                    self._process, self.health = process, "ready"
                    if not started.done():
                        started.set_result(None)
                case m.LoadFailed():
                    kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
                    return kinds.get(message.error_type, EngineUnavailable)(message.message)
                case m.QueryResult():
                    query = self._queries.get(message.id)
                    if query is not None and not query.done():
                        query.set_result(message.data)
                case m.EngineOutputs():
                    self.open_requests.deliver(message)

    def _fail_all(self) -> None:
        """The process is gone: fail all open requests and queries."""
        self._process = None
        if self.health == "ready":
            self.health = "restarting"
        closed = self.health == "closed"
        what = "was closed" if closed else "stopped"
        hint = "" if closed else ": it is being restarted, send the request again"
        error = EngineUnavailable(f"the engine {what} while this request was under way{hint}")
        for number in list(self.open_requests):
            self.open_requests.fail(number, error)
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)
