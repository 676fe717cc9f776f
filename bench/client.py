"""OpenAI-compatible servers as systems to be measured, by the client of ``overlap-spec bench``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from bench.backends.base import Batch, Reply, Task
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.load.asks import Ask
from overlap_spec.load.client import Answer, Client
from overlap_spec.load.servers import served_model

TIMEOUT_S = 600.0


class ServerSystem:
    """A server at ``base_url``; see :class:`bench.backends.base.System`.

    Raw tasks go to ``/v1/completions``, others to ``/v1/chat/completions``.

    Args:
        base_url: With or without ``/v1``.
        model: Its name there; None takes the first of ``/v1/models``.
        api_key: Bearer token, if it wants one.
        encode: Prompt tokens of a task, which go to ``/v1/completions``; None sends texts.

    Raises:
        ConfigError: nothing usable answers there.
    """

    client = Client

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        encode: Callable[[Task], list[int]] | None = None,
    ) -> None:
        self.encode = encode
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or self._first_model()
        self.how = f"OpenAI-compatible server, model {self.model}, over HTTP"

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """See :class:`bench.backends.base.System`."""
        return asyncio.run(self._run(tasks, parallel))

    def close(self) -> None:
        """The server is not ours to end."""

    def _first_model(self) -> str:
        try:
            with httpx.Client(headers=self.headers, timeout=30) as client:
                return served_model(client, self.url)
        except httpx.HTTPError as error:
            raise ConfigError(f"{self.url}/v1/models lists no model: {error}") from None

    def _ask(self, task: Task) -> Ask:
        grammar = None if task.schema is None else Grammar.json_schema(task.schema)
        if self.encode is None:
            return Ask(task.prompt, grammar, task.max_tokens, task.raw, task.stop)
        return Ask(self.encode(task), grammar, task.max_tokens, True, task.stop)

    async def _run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        gate = asyncio.Semaphore(parallel)
        limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        async with httpx.AsyncClient(
            headers=self.headers, timeout=TIMEOUT_S, limits=limits
        ) as http:
            client = self.client(http, self.url, self.model, 0.0)

            async def one(task: Task) -> Reply:
                async with gate:
                    start = time.perf_counter()
                    answer = await client.send(self._ask(task), start)
                    return _reply(answer, time.perf_counter())

            start = time.perf_counter()
            replies = await asyncio.gather(*map(one, tasks))
            return Batch(time.perf_counter() - start, list(replies))


def _reply(answer: Answer, end: float) -> Reply:
    return Reply(
        text=answer.text,
        tokens=answer.tokens,
        finish_reason="error" if answer.error else answer.finish_reason or "error",
        ttft_ms=1e3 * (answer.first - answer.due) if answer.first else None,
        end_to_end_ms=1e3 * (end - answer.due),
        error=answer.error,
    )
