"""The engine for asyncio: in a process of its own, which is restarted if it dies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, Unpack, cast

from overlap_spec.config import EngineConfig
from overlap_spec.engine.arguments import GrammarLike, Prompt, Sampling, copies, each_call, grouped
from overlap_spec.engine.input_processor import (
    GenerateOptions,
    Generates,
    InputProcessor,
    count_characters,
)
from overlap_spec.errors import ConfigError, EngineUnavailable, RequestFailed
from overlap_spec.ipc import messages as m
from overlap_spec.ipc.client import EngineClient
from overlap_spec.ipc.request_handle import AsyncRequestHandle
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request

__all__ = ["AsyncEngine", "AsyncRequestHandle"]

# Prompts longer than this are tokenised in a thread, in characters.
LONG_PROMPT = 2048
# What a message or a token costs besides its text, in characters.
CHARACTERS_AROUND = 8
One = Coroutine[Any, Any, Output]
Many = Coroutine[Any, Any, list[Output]]
Nested = Coroutine[Any, Any, list[list[Output]]]


def _typed(generate: Any) -> Generates[One, Many, Nested]:
    """A method as type checkers are to see it."""
    return cast("Generates[One, Many, Nested]", generate)


class AsyncEngine(EngineClient):
    """An engine for asyncio.

    The model runs in a process of its own, so that the caller's event loop cannot delay a step.
    If that process dies, open requests fail with :class:`EngineUnavailable`, and it is restarted.

    Args:
        model: Folder of a checkpoint; None is the embedded model and its draft head.
        chat_template: Jinja text to use instead of the checkpoint's.
        max_queued_requests: Most requests that wait, besides those that run.
        stall_timeout_s: An engine that owes an answer and sends nothing for so long is restarted.
        settings: Fields of :class:`overlap_spec.config.EngineConfig`.

    Raises:
        ConfigError: an invalid setting.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | None = None,
        max_queued_requests: int = 1024,
        stall_timeout_s: float = 120.0,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.build(model=model, **settings)
        if self.config.own_drafter is not None:
            raise ConfigError(
                "algorithm: an object cannot go into the engine's own process; give "
                "package.module:Class, or use Engine"
            )
        self._chat_template = chat_template
        self._max_queued_requests = max_queued_requests
        self._input_processor: InputProcessor | None = None
        super().__init__({"model": model, **settings}, stall_timeout_s)

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenises requests; EngineUnavailable before the engine has started."""
        if self._input_processor is None:
            raise EngineUnavailable("the engine has not started: `async with engine:` starts it")
        return self._input_processor

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; EngineUnavailable before the engine has started."""
        return self.input_processor.tokenizer

    @property
    def context_length(self) -> int:
        """The model's longest prompt + output, in tokens; EngineUnavailable before the start."""
        return self.input_processor.limits.context_tokens

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @_typed
    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Output | list[Output] | list[list[Output]]:
        """As :meth:`overlap_spec.engine.Engine.generate`; cancelling it aborts the requests.

        Raises:
            InvalidRequest: an invalid field; nothing is generated for any prompt of the call.
            QueueFull, EngineUnavailable: the request itself is fine.
        """
        calls, single = each_call(prompt, grammar, sampling, self.config.additional_properties)
        handles: list[AsyncRequestHandle] = []
        try:
            for call in calls:
                request = await self.prepare(*call, **options)
                handles += [self.send(copy) for copy in copies(request, 1 if n is None else n)]
            for handle in handles:
                await handle.queued()
            outputs = [await handle.finish() for handle in handles]
        finally:
            for handle in handles:
                handle.abort()
        return grouped(outputs, n, single)

    async def stream(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[Delta]:
        """Generate for one prompt, piece by piece; closing the iterator aborts the request.

        Raises:
            InvalidRequest, QueueFull, EngineUnavailable: as :meth:`generate`.
            RequestFailed: after the last piece, if the request ended with an error.
        """
        handle = await self.submit(await self.prepare(prompt, grammar, sampling, **options))
        try:
            async for delta in handle:
                yield delta
            assert handle.output is not None
            if handle.output.error is not None:
                raise RequestFailed(handle.output.error)
        finally:
            handle.abort()

    async def prepare(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        **options: Unpack[GenerateOptions],
    ) -> Request:
        """Check and tokenise, as :meth:`InputProcessor.process`; a long prompt in a thread, so that
        the loop goes on.

        Raises:
            InvalidRequest: as there, or the prompt is longer than any that fits the context.
            QueueFull: too many requests are open or are being prepared.
        """
        process = partial(self.input_processor.process, prompt, grammar, sampling, **options)
        size = self.input_processor.check_length(prompt)
        # A chat template writes something around each message, and may write these too.
        if not isinstance(prompt, str):
            size += CHARACTERS_AROUND * len(prompt)
        rendering = options.get("rendering")
        size += count_characters(rendering.variables if rendering is not None else {})
        size += count_characters(options.get("tools") or ())
        return process() if size <= LONG_PROMPT else await self.preparation.run(process)

    async def submit(self, request: Request) -> AsyncRequestHandle:
        """Send a request, and wait until its grammar is compiled and it is queued.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            QueueFull, EngineUnavailable: the request itself is fine.
        """
        handle = self.send(request)
        try:
            await handle.queued()
        except BaseException:
            handle.abort()
            raise
        return handle

    async def snapshot(self) -> dict[str, Any]:
        """The engine's state as plain data."""
        return await self.query("snapshot")

    async def standings(self) -> dict[str, Any]:
        """The engine's state, and under ``requests`` where those under way stand: the fields of
        :class:`overlap_spec.stats.Standing`, by the numbers of :meth:`send`; 256 at most."""
        return await self.query("requests")

    async def flush_cache(self) -> int:
        """Forget the computed pages of earlier prompts that no request holds; how many there
        were."""
        flushed: int = (await self.query("flush_cache"))["pages"]
        return flushed

    async def timeline(self, steps: int) -> list[dict[str, Any]]:
        """Spans of the last steps: ``lane``, ``name``, ``start_ns``, ``end_ns``, ``step``,
        ``args``."""
        spans: list[dict[str, Any]] = (await self.query("timeline", steps))["spans"]
        return spans

    def set_ready(self, told: m.EngineReady) -> None:
        self.config = EngineConfig(**told.config)
        most = self.config.max_running_requests + self._max_queued_requests
        self.open_requests.held.most = most
        if self._input_processor is None:
            tokenizer = Tokenizer(self.config.target_path, told.vocab_size, self._chat_template)
            self._input_processor = InputProcessor(
                tokenizer, told.limits, self.config.additional_properties, self.config.adapters
            )
