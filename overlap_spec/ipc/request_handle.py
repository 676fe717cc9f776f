"""One request to the engine's process, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import OverlapSpecError, RequestFailed
from overlap_spec.types import Delta, Output, PromptLogprobs, Request, TokenLogprobs


class AsyncRequestHandle(RequestHandle):
    """A request to the engine's process: iterate for its pieces; then ``output`` is there.

    A class of its own because its caller waits on an event loop for messages, and because the
    request is lost if the process dies; the caller of :meth:`Engine.submit` runs the steps itself.

    Args:
        request: Under the client's number.
        abort: Called with the number to end the request.
    """

    def __init__(self, request: Request, abort: Callable[[int], None]) -> None:
        super().__init__(request)
        self._abort = abort
        self._queued = False
        self._lost: OverlapSpecError | None = None
        self._changed = asyncio.Event()
        self._unread_bytes = 0
        self._most_unread_bytes: int | None = None
        # Of all pieces, as the output comes without them.
        self._logprobs: list[TokenLogprobs] | None = []
        self._prompt_logprobs: list[PromptLogprobs | None] = []

    def __aiter__(self) -> AsyncRequestHandle:
        return self

    async def __anext__(self) -> Delta:
        """The next piece; EngineUnavailable: the engine died before the end."""
        while not self.deltas:
            if self._lost is None and self.output is not None:
                raise StopAsyncIteration
            await self._wait()
        delta = self.deltas.popleft()
        self._unread_bytes -= _size(delta)
        return delta

    async def queued(self) -> None:
        """Wait until the engine has compiled the grammar and queued the request.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            EngineUnavailable: the engine died before that.
        """
        while not self._queued and self.output is None:
            await self._wait()

    async def finish(self) -> Output:
        """The whole output; unread pieces are dropped. EngineUnavailable: the engine died before
        its end."""
        async for _ in self:
            pass
        assert self.output is not None
        return self.output

    def limit_unread(self, most_bytes: int) -> None:
        """Abort the request, and fail it, once its unread pieces hold more than about so much.

        For streams: the log-probabilities are then in the pieces alone, not in the output. Those of
        the prompt do not count, since they are bounded by themselves.
        """
        self._most_unread_bytes, self._logprobs = most_bytes, None

    def abort(self) -> None:
        """End the request within one step; its output then has ``finish_reason`` ``abort``."""
        self._abort(self.request.id)

    async def _wait(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._changed.clear()
        await self._changed.wait()

    def set_queued(self) -> None:
        """The engine has queued the request."""
        self._queued = True
        self._changed.set()

    def push(self, delta: Delta) -> None:
        """See :meth:`RequestHandle.push`."""
        if self._lost is not None:
            return
        super().push(delta)
        if self._logprobs is not None:
            self._logprobs += delta.logprobs
            self._prompt_logprobs += delta.prompt_logprobs
        self._unread_bytes += _size(delta)
        most = self._most_unread_bytes
        if most is not None and self._unread_bytes > most:
            self.deltas.clear()
            self.abort()
            self.fail(RequestFailed(f"over {most} bytes of output were not read: read faster"))
        self._changed.set()

    def end(self, output: Output, error_type: str | None) -> None:
        """See :meth:`RequestHandle.end`."""
        logprobs, of_prompt = tuple(self._logprobs or ()), tuple(self._prompt_logprobs)
        super().end(replace(output, logprobs=logprobs, prompt_logprobs=of_prompt), error_type)
        self._changed.set()

    def fail(self, error: OverlapSpecError) -> None:
        """There will be no output: waiting raises ``error``."""
        self._lost = error
        self._changed.set()


def _size(delta: Delta) -> int:
    """About the bytes that a piece takes in memory."""
    tops = sum(len(entry.top) for entry in delta.logprobs)
    drafts = 0 if delta.tree is None else len(delta.tree.tokens)
    return 200 + 2 * len(delta.text) + 100 * (len(delta.token_ids) + drafts) + 120 * tops
