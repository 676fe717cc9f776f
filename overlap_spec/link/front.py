"""The front's side of a running engine: its process, the requests under way, and its restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from overlap_spec.errors import (
    CheckpointError,
    ConfigError,
    EngineUnavailable,
    GrammarError,
    InvalidRequest,
    OverlapSpecError,
    QueueFull,
    RequestFailed,
)
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.link import messages as m
from overlap_spec.link.child import Child
from overlap_spec.link.reply import Reply
from overlap_spec.types import Request

log = logging.getLogger("overlap_spec")

Health = Literal["starting", "ready", "restarting", "closed"]
LONGEST_PAUSE_S = 30.0
# An engine that lived so long was well: the next pause is the first again.
WELL_AFTER_S = 60.0
ASK_TIMEOUT_S = 30.0
CLOSE_GRACE_S = 10.0
LAST_WORDS_S = 0.5


class Front:
    """Keeps one engine process alive, and hands its messages to those who wait for them.

    Args:
        settings: Of the engine.
        stall_timeout_s: An engine that owes an answer and says nothing for so long is killed.
        welcome: Called with what an engine says of itself when it is loaded.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        stall_timeout_s: float,
        welcome: Callable[[m.Hello], None],
    ) -> None:
        self._settings, self._stall_timeout_s = settings, stall_timeout_s
        self._welcome = welcome
        # Set once the engine has said how many run at once.
        self.most_open = 0
        self.open: dict[int, Reply] = {}
        self.health: Health = "starting"
        self.restarts = 0
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

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
        """End the process; requests under way fail."""
        self.health = "closed"
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)

    def send(self, request: Request) -> Reply:
        """Send a request; :meth:`Reply.accepted` tells whether it was taken.

        Raises:
            QueueFull, EngineUnavailable: nothing is wrong with the request.
        """
        child = self._ready_child()
        if len(self.open) >= self.most_open:
            raise QueueFull(
                f"{len(self.open)} requests are open, as many as may be "
                "(max_running_requests + max_queued_requests): try again later"
            )
        reply = Reply(replace(request, id=next(self._numbers)), self._abort)
        self.open[reply.request.id] = reply
        grammar = request.grammar
        if grammar is not None:
            # The type that parses the output stays here.
            grammar = replace(grammar, output=None)
        child.send(m.Start(replace(reply.request, grammar=None), grammar))
        return reply

    def _abort(self, reply: Reply) -> None:
        if reply.request.id in self.open and self._child is not None:
            self._child.send(m.Abort(reply.request.id))

    async def ask(self, what: Literal["snapshot", "timeline"], steps: int = 0) -> dict[str, Any]:
        """The engine's answer to a question.

        Raises:
            EngineUnavailable: it is not there, or does not answer.
        """
        child, number = self._ready_child(), next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        child.send(m.Ask(number, what, steps))
        try:
            return await asyncio.wait_for(answer, ASK_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailable(f"the engine gave no {what} in {ASK_TIMEOUT_S} s") from None
        finally:
            self._asked.pop(number, None)

    def _ready_child(self) -> Child:
        if self._child is None:
            raise EngineUnavailable(f"the engine is {self.health}: try again in some seconds")
        return self._child

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Start the process, hear it until it dies, and so on."""
        pause_s = 0.0
        while True:
            born = time.monotonic()
            reason = await self._life(started)
            log.error("engine: %s", reason)
            if not started.done():
                self.health = "closed"
                started.set_exception(reason)
                return
            self.restarts += 1
            well = time.monotonic() - born > WELL_AFTER_S
            pause_s = 0.0 if well else min(2 * pause_s + 0.25, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _life(self, started: asyncio.Future[None]) -> Exception:
        """One process from its start to its end; why it ended."""
        try:
            child = await Child.start(self._settings)
        except OSError as error:
            return EngineUnavailable(f"the engine's process cannot be started: {error}")
        death = asyncio.create_task(child.process.wait())
        hearing = asyncio.create_task(self._hear(child, started))
        grace_s = CLOSE_GRACE_S
        try:
            await asyncio.wait({death, hearing}, return_when=asyncio.FIRST_COMPLETED)
            # Its last words may still be on their way.
            await asyncio.wait({hearing}, timeout=LAST_WORDS_S)
            grace_s = 0.0
            if hearing.done():
                return hearing.result()
            return EngineUnavailable(f"the engine's process {child.how_ended}")
        finally:
            for task in (death, hearing):
                task.cancel()
            await asyncio.gather(death, hearing, return_exceptions=True)
            if self._child is None:
                # It still loads, and hears nothing.
                grace_s = 0.0
            self._bury()
            await child.end(grace_s)

    async def _hear(self, child: Child, started: asyncio.Future[None]) -> Exception:
        """Hand out a process's messages; why that ended."""
        while True:
            try:
                message = await asyncio.wait_for(child.receive(), self._stall_timeout_s)
            except TimeoutError:
                if self._child is None or self.open or self._asked:
                    return EngineUnavailable(
                        f"the engine said nothing for {self._stall_timeout_s} s"
                    )
                continue
            match message:
                case m.Hello():
                    self._welcome(message)
                    self._child, self.health = child, "ready"
                    if not started.done():
                        started.set_result(None)
                case m.Broken():
                    kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
                    return kinds.get(message.kind, EngineUnavailable)(message.message)
                case m.Answer():
                    asked = self._asked.get(message.id)
                    if asked is not None and not asked.done():
                        asked.set_result(message.data)
                case m.News():
                    self._spread(message)

    def _spread(self, news: m.News) -> None:
        for refused in news.refused:
            if (reply := self.open.pop(refused.id, None)) is not None:
                reply.fail(_refusal(refused))
        for number in news.queued:
            if number in self.open:
                self.open[number].queue()
        for piece in news.pieces:
            if piece.id in self.open:
                self.open[piece.id].push(piece.delta)
        for ended in news.ended:
            if (reply := self.open.pop(ended.id, None)) is not None:
                reply.end(ended.output, ended.kind)

    def _bury(self) -> None:
        """The process is gone: tell everyone who waits for it."""
        self._child = None
        if self.health == "ready":
            self.health = "restarting"
        error = EngineUnavailable(
            "the engine stopped while this request was under way: it is being restarted, "
            "send the request again"
        )
        replies, self.open = list(self.open.values()), {}
        for reply in replies:
            reply.fail(error)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)


def _refusal(refused: m.Refused) -> OverlapSpecError:
    """The error as the engine's process raised it."""
    if refused.failure is not None:
        return CompileFailure(refused.message, refused.failure, refused.param)
    if refused.kind == "GrammarError":
        return GrammarError(refused.message, refused.param)
    if refused.kind == "InvalidRequest":
        return InvalidRequest(refused.message, refused.param)
    return RequestFailed(refused.message)
