"""One request as its front sees it: pieces, and an output at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable

from overlap_spec.engine.input_processor import parse_output
from overlap_spec.errors import OverlapSpecError
from overlap_spec.types import Delta, Output, Request


class Reply:
    """One request on its way. Iterate for its pieces; then `output` is there.

    Attributes:
        request: As it was checked and tokenised, under the front's id.
        output: The whole output, once it has ended.
        fault: Class name of what ended it, where `output.finish_reason` is ``error``.
        queued_ns: When the engine had compiled its grammar and queued it
            (``time.perf_counter_ns()``).
    """

    def __init__(self, request: Request, abort: Callable[[Reply], None]) -> None:
        self.request = request
        self.output: Output | None = None
        self.fault: str | None = None
        self.queued_ns = 0
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._error: OverlapSpecError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> Delta:
        """The next piece.

        Raises:
            EngineUnavailable: the engine died before the end.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.output is not None:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.popleft()

    async def accepted(self) -> None:
        """Wait until the engine has compiled the grammar and queued the request.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
        """
        while not self.queued_ns and self.output is None:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def finish(self) -> Output:
        """The whole output; pieces that nobody has read are dropped."""
        async for _ in self:
            pass
        assert self.output is not None
        return self.output

    def abort(self) -> None:
        """End the request within one step; it then has an output with ``abort``."""
        self._abort(self)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def queue(self) -> None:
        """The engine has taken it."""
        self.queued_ns = time.perf_counter_ns()
        self._news.set()

    def push(self, delta: Delta) -> None:
        """The next piece has come."""
        self._deltas.append(delta)
        self._news.set()

    def end(self, output: Output, fault: str | None) -> None:
        """Its output has come."""
        grammar = self.request.grammar
        if output.finish_reason == "stop" and grammar is not None:
            output = dataclasses.replace(output, parsed=parse_output(grammar, output.text))
        self.output, self.fault = output, fault
        self._news.set()

    def fail(self, error: OverlapSpecError) -> None:
        """There will be no output."""
        self._error = error
        self._news.set()
