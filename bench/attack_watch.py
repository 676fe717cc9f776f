"""The good client beside an attack, in a process of its own; part of :mod:`bench.attack`.

Were it in the attacker's process, it would wait for the attacker's interpreter and count that
against the server.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

import httpx

from bench.served import rss_mib

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Is fire hot?"}]
GOOD = {"messages": HI, "structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
ENDED_S = 120.0


@dataclass
class Seen:
    """What the good client saw.

    Attributes:
        answers: When each answer came, by ``time.monotonic``, and after how many ms.
        wrong: Answers and probes that were not as they must be.
        health_worst_ms, front_peak_mib: The slowest /health, and the front's most memory.
    """

    answers: list[tuple[float, float]] = field(default_factory=list)
    wrong: int = 0
    health_worst_ms: float = 0.0
    front_peak_mib: float = 0.0

    def times_ms(self, start: float, end: float) -> list[float]:
        """Of the answers that came between two times."""
        return [took for at, took in self.answers if start <= at < end]


class Watch:
    """Good requests, probes of /health, and the front's memory, while its context is open.

    Args:
        url, pid: Of the server.
    """

    def __init__(self, url: str, pid: int) -> None:
        context = get_context("spawn")
        self._end, child = context.Pipe()
        self._process = context.Process(target=_watch, args=(url, pid, child), daemon=True)
        self.seen = Seen()

    def __enter__(self) -> Watch:
        self._process.start()
        # The first request compiles its grammar: the calm time begins behind it.
        self._end.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            self._end.send(None)
            if self._end.poll(ENDED_S):
                self.seen = self._end.recv()
        self._process.join(ENDED_S)
        self._process.kill()
        if kind is None and not self.seen.answers:
            raise RuntimeError("the good client answered nothing: see its error above")


def _watch(url: str, pid: int, end: Connection) -> None:
    end.send(asyncio.run(_all(url, pid, end)))


async def _all(url: str, pid: int, end: Connection) -> Seen:
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=90) as client:
        await client.post(CHAT, json=GOOD)
        end.send(None)
        tasks = [asyncio.create_task(w) for w in (_ask(client, seen), _probe(client, pid, seen))]
        while not end.poll():
            await asyncio.sleep(0.05)
            if any(task.done() for task in tasks):
                break
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    return seen


async def _ask(client: httpx.AsyncClient, seen: Seen) -> None:
    """Ask a good question again and again."""
    while True:
        start = time.monotonic()
        reply = await client.post(CHAT, json=GOOD)
        now = time.monotonic()
        seen.answers.append((now, 1e3 * (now - start)))
        good = reply.status_code == 200
        answer = reply.json()["choices"][0]["message"]["content"] if good else None
        seen.wrong += answer not in ("yes", "no")


async def _probe(client: httpx.AsyncClient, pid: int, seen: Seen) -> None:
    """Ask for /health ten times a second."""
    while True:
        start = time.monotonic()
        reply = await client.get("/health")
        seen.health_worst_ms = max(seen.health_worst_ms, 1e3 * (time.monotonic() - start))
        seen.front_peak_mib = max(seen.front_peak_mib, rss_mib(pid))
        seen.wrong += reply.status_code != 200
        await asyncio.sleep(0.1)
