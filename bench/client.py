"""A streaming client of OpenAI-compatible servers, so that all of them are measured alike.

Times are the client's own: the first token is there when the first chunk with text is. Tokens are
those of the server's ``usage``; a server that tells none fails, since chunks are no tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from bench.backends.base import Batch, Reply, Task
from overlap_spec.errors import ConfigError

TIMEOUT_S = 600.0
INFO_ROUTES = ("/server_info", "/get_server_info")


class ServerSystem:
    """A server at ``base_url``; see :class:`bench.backends.base.System`.

    Raw tasks go to ``/v1/completions``, others to ``/v1/chat/completions``.

    Args:
        base_url: With or without ``/v1``.
        model: Its name there; None takes the first of ``/v1/models``.
        api_key: Bearer token, if it wants one.

    Raises:
        ConfigError: nothing usable answers there.
    """

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or self._first_model()
        self.how = f"OpenAI-compatible server, model {self.model}, over HTTP"

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """See :class:`bench.backends.base.System`."""
        return asyncio.run(self._run(tasks, parallel))

    def close(self) -> None:
        """The server is not ours to end."""

    def accept_length(self) -> float | None:
        """The server's own average since it started, where it tells one."""
        for route in INFO_ROUTES:
            try:
                answer = httpx.get(self.url + route, headers=self.headers, timeout=10)
                if answer.status_code == 200:
                    return _find_number(answer.json(), "avg_spec_accept_length")
            except (httpx.HTTPError, ValueError):
                continue
        return None

    def _first_model(self) -> str:
        try:
            answer = httpx.get(self.url + "/v1/models", headers=self.headers, timeout=30)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ConfigError(f"{self.url}/v1/models lists no model: {error}") from None

    async def _run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        gate = asyncio.Semaphore(parallel)
        limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        async with httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=TIMEOUT_S, limits=limits
        ) as client:

            async def one(task: Task) -> Reply:
                async with gate:
                    return await self._ask(client, task)

            start = time.perf_counter()
            replies = await asyncio.gather(*map(one, tasks))
            return Batch(time.perf_counter() - start, list(replies))

    async def _ask(self, client: httpx.AsyncClient, task: Task) -> Reply:
        reply, start = Reply(), time.perf_counter()
        route = "/v1/completions" if task.raw else "/v1/chat/completions"
        try:
            async with client.stream("POST", route, json=self.body(task)) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ValueError(f"status {answer.status_code}: {text[:500]}")
                await _read(answer.aiter_lines(), reply, start)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            reply.error, reply.finish_reason = f"{type(error).__name__}: {error}", "error"
        reply.end_to_end_ms = (time.perf_counter() - start) * 1e3
        return reply

    def body(self, task: Task) -> dict[str, Any]:
        """What is posted for a task."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "max_tokens": task.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if task.raw:
            body["prompt"] = task.prompt
        else:
            body["messages"] = [{"role": "user", "content": task.prompt}]
        if task.stop:
            body["stop"] = list(task.stop)
        if task.schema is not None:
            named = {"name": "answer", "schema": task.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body


async def _read(lines: AsyncIterator[str], reply: Reply, start: float) -> None:
    """Fill a reply from server-sent events.

    Raises:
        ValueError: an error event, no JSON, or no usage or finish reason up to the end.
    """
    pieces, tokens, reason = [], None, None
    async for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if event.get("error"):
            raise ValueError(str(event["error"]))
        usage = event.get("usage")
        if usage:
            tokens = int(usage["completion_tokens"])
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text and reply.ttft_ms is None:
                reply.ttft_ms = (time.perf_counter() - start) * 1e3
            pieces.append(text)
            reason = choice.get("finish_reason") or reason
    if tokens is None or reason is None:
        raise ValueError("the stream ended without usage or without a finish reason")
    reply.text, reply.tokens, reply.finish_reason = "".join(pieces), tokens, reason


def _find_number(data: Any, name: str) -> float | None:
    """The first number called ``name`` anywhere in plain data."""
    if isinstance(data, dict):
        if isinstance(data.get(name), int | float):
            return float(data[name])
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            found = _find_number(item, name)
            if found is not None:
                return found
    return None
