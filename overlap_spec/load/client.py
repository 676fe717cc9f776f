"""A streaming client of one server, and its two kinds of load: closed and open loop.

Times are the client's own. Tokens are those of the server's ``usage``, since chunks are no tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import jsonschema

from overlap_spec.load.asks import Ask


@dataclass
class Answer:
    """One request as its client saw it; times in seconds of ``time.perf_counter``.

    Attributes:
        due: When it should have been sent.
        first, last: When its first and its last text came; 0 where none did.
        gaps_ms: Between chunks that carry text.
        error: Why there is no whole answer.
        invalid: What is wrong with a whole answer under a schema, once it was checked.
    """

    ask: Ask
    due: float
    first: float = 0.0
    last: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    invalid: str | None = None

    @property
    def fault(self) -> str | None:
        """What is wrong with it, if anything is."""
        return self.error or self.invalid

    @property
    def constrained(self) -> bool:
        """Whether it came to its end under a schema, so that it is valid or not."""
        return self.error is None and self.ask.grammar is not None and self.finish_reason == "stop"

    def check(self) -> None:
        """Note what is wrong with a whole answer under a schema. Takes milliseconds: not while
        others are timed."""
        grammar = self.ask.grammar
        if not self.constrained or grammar is None:
            return
        try:
            jsonschema.validate(json.loads(self.text), json.loads(grammar.source))
        except (ValueError, jsonschema.ValidationError) as error:
            self.invalid = f"wrong JSON: {str(error).splitlines()[0]}"

    def sample(self) -> dict[str, Any]:
        """As plain data."""
        rest = self.tokens - 1
        tpot = 1e3 * (self.last - self.first) / rest if rest > 0 else None
        return {
            "ttft_ms": 1e3 * (self.first - self.due) if self.first else None,
            "e2e_ms": 1e3 * (self.last - self.due) if self.last else None,
            "tpot_ms": tpot,
            "itl_ms": self.gaps_ms,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "error": self.fault,
        }


class Client:
    """Requests to one server.

    Args:
        http: With the server's key in its headers, if it asks for one.
        url: Without ``/v1``.
        model: Its name there.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, model: str, temperature: float) -> None:
        self.http, self.url, self.model, self.temperature = http, url, model, temperature

    def body(self, ask: Ask) -> dict[str, Any]:
        """A request in OpenAI's shape, with nothing that only one server knows."""
        prompt: Any = ask.prompt
        if not ask.raw and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt" if ask.raw else "messages": prompt,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.grammar is not None:
            schema = {"name": "answer", "schema": json.loads(ask.grammar.source), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    async def send(self, ask: Ask, due: float) -> Answer:
        """One request; its time counts from when it was due."""
        answer = Answer(ask, due)
        try:
            await self._read(answer)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _read(self, answer: Answer) -> None:
        route = "completions" if answer.ask.raw else "chat/completions"
        url, body = f"{self.url}/v1/{route}", self.body(answer.ask)
        async with self.http.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                answer.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
                return
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data != line and data != "[DONE]":
                    self._take(answer, json.loads(data))
        if answer.error is None and (answer.finish_reason is None or not answer.tokens):
            answer.error = "the stream ended without usage or without a finish reason"

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        now = time.perf_counter()
        if "error" in event:
            answer.error = str(event["error"])
            return
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if not text:
                continue
            if answer.first:
                answer.gaps_ms.append(1e3 * (now - answer.last))
            answer.first = answer.first or now
            answer.last = now
            answer.text += text


async def closed_loop(
    client: Client, asks: Sequence[Ask], clients: int, done: Callable[[], None]
) -> list[Answer]:
    """So many clients, each of which sends its next request when it has its answer."""
    queue, answers = iter(asks), list[Answer]()

    async def one() -> None:
        for ask in queue:
            answers.append(await client.send(ask, time.perf_counter()))
            done()

    await asyncio.gather(*[one() for _ in range(clients)])
    return answers


async def open_loop(
    client: Client, asks: Sequence[Ask], rate: float, seed: int, done: Callable[[], None]
) -> list[Answer]:
    """Requests that come at random times, so many a second, whether or not others are answered."""
    rng, due, tasks = Random(f"arrivals {seed}"), time.perf_counter(), []

    async def one(ask: Ask, due: float) -> Answer:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        answer = await client.send(ask, due)
        done()
        return answer

    for ask in asks:
        due += rng.expovariate(rate)
        tasks.append(asyncio.create_task(one(ask, due)))
    return list(await asyncio.gather(*tasks))
