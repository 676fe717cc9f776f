"""The engine for asyncio: in a process of its own, which is started again when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack, overload

from overlap_spec.config import EngineConfig
from overlap_spec.engine.input_processor import (
    InputProcessor,
    Prompt,
    PromptOptions,
    Sampling,
    as_prompts,
    each,
)
from overlap_spec.errors import EngineUnavailable, RequestFailed
from overlap_spec.grammar.spec import Grammar
from overlap_spec.ipc import messages as m
from overlap_spec.ipc.client import EngineClient, Health
from overlap_spec.ipc.request_handle import AsyncRequestHandle
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request

__all__ = ["AsyncEngine", "AsyncRequestHandle"]

# Prompts longer than this are tokenised beside the loop, characters.
LONG_PROMPT = 16384


class AsyncEngine:
    """An engine for asyncio.

    The model runs in a process of its own: a step is never late because of the caller's loop.
    If that process dies, the requests under way fail with :class:`EngineUnavailable`, and it is
    started again.

    Args:
        model: Folder of a checkpoint; None is the embedded model and its draft head.
        chat_template: Jinja text to use instead of the checkpoint's.
        max_queued_requests: Requests that may wait beside those that run.
        stall_timeout_s: An engine that owes an answer and says nothing for so long is killed.
        settings: Fields of :class:`overlap_spec.config.EngineConfig`.

    Raises:
        ConfigError: a setting that cannot be.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | None = None,
        max_queued_requests: int = 1024,
        stall_timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.build(model=model, **settings)
        self._chat_template = chat_template
        self._max_queued_requests = max_queued_requests
        self._input_processor: InputProcessor | None = None
        settings = {"model": model, **settings}
        self.client = EngineClient(settings, stall_timeout_s, self._set_ready)

    @property
    def health(self) -> Health:
        """``ready`` is the only state in which requests are taken."""
        return self.client.health

    @property
    def restarts(self) -> int:
        """How often the engine's process has died and was started again."""
        return self.client.restarts

    @property
    def input_processor(self) -> InputProcessor:
        """What checks and tokenises requests; there once the engine has started."""
        if self._input_processor is None:
            raise EngineUnavailable("the engine has not started: `async with engine:` starts it")
        return self._input_processor

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there once the engine has started."""
        return self.input_processor.tokenizer

    @property
    def context_length(self) -> int:
        """The model's longest prompt + output, in tokens; there once the engine has started."""
        return self.input_processor.limits.context_tokens

    @property
    def open_requests(self) -> int:
        """Requests that wait, compile or run."""
        return len(self.client.open)

    async def start(self) -> None:
        """Start the engine's process, and wait until it is loaded.

        Raises:
            ConfigError, CheckpointError: as :class:`overlap_spec.engine.Engine`.
            EngineUnavailable: the process died while it loaded.
        """
        await self.client.start()

    async def close(self) -> None:
        """End the process; requests under way fail."""
        await self.client.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> Output: ...

    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        **options: Unpack[PromptOptions],
    ) -> list[Output]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        **options: Unpack[PromptOptions],
    ) -> Output | list[Output]:
        """As :meth:`overlap_spec.engine.Engine.generate`; cancelling it aborts the requests.

        Raises:
            InvalidRequest: a field that cannot be served; no prompt of the call is generated for.
            QueueFull, EngineUnavailable: nothing is wrong with the request.
        """
        prompts, single = as_prompts(prompt)
        grammars = each("grammar", grammar, len(prompts))
        samplings = each("sampling", sampling, len(prompts))
        handles: list[AsyncRequestHandle] = []
        try:
            for p, g, s in zip(prompts, grammars, samplings, strict=True):
                handles.append(self.send(await self.prepare(p, g, s, **options)))
            for handle in handles:
                await handle.queued()
            outputs = [await handle.finish() for handle in handles]
        finally:
            for handle in handles:
                handle.abort()
        return outputs[0] if single else outputs

    async def stream(
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> AsyncIterator[Delta]:
        """Generate for one prompt, piece by piece; leaving the loop aborts the request.

        Raises:
            InvalidRequest, QueueFull, EngineUnavailable: as :meth:`generate`.
            RequestFailed: the request ended with an error, after its last piece.
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
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> Request:
        """Check and tokenise, as :meth:`InputProcessor.process`; a long prompt in a thread, so that
        the loop goes on."""
        process = self.input_processor.process
        size = len(prompt) if isinstance(prompt, str) else _characters(prompt)
        if size <= LONG_PROMPT:
            return process(prompt, grammar, sampling, **options)
        return await asyncio.to_thread(process, prompt, grammar, sampling, **options)

    async def submit(self, request: Request) -> AsyncRequestHandle:
        """Send a request, and wait until its grammar is compiled and it is queued.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            QueueFull, EngineUnavailable: nothing is wrong with the request.
        """
        handle = self.send(request)
        try:
            await handle.queued()
        except BaseException:
            handle.abort()
            raise
        return handle

    def send(self, request: Request) -> AsyncRequestHandle:
        """Send a request; :meth:`AsyncRequestHandle.queued` waits until it is accepted.

        Raises:
            QueueFull, EngineUnavailable: nothing is wrong with the request.
        """
        return self.client.send(request)

    async def snapshot(self) -> dict[str, Any]:
        """The engine's state as plain data, as of now."""
        return await self.client.query("snapshot")

    async def timeline(self, steps: int) -> list[dict[str, Any]]:
        """Spans of the last steps: ``lane``, ``name``, ``start_ns``, ``end_ns``, ``step``,
        ``args``."""
        spans: list[dict[str, Any]] = (await self.client.query("timeline", steps))["spans"]
        return spans

    def _set_ready(self, ready: m.EngineReady) -> None:
        self.config = EngineConfig(**ready.config)
        self.client.max_open_requests = self.config.max_running_requests + self._max_queued_requests
        if self._input_processor is None:
            tokenizer = Tokenizer(self.config.target_path, ready.vocab_size, self._chat_template)
            self._input_processor = InputProcessor(tokenizer, ready.limits)


def _characters(prompt: Any) -> int:
    """Rough size of a chat or of token ids."""
    if not isinstance(prompt, Sequence):
        return 0
    return sum(len(str(p.get("content", ""))) if isinstance(p, dict) else 1 for p in prompt)
