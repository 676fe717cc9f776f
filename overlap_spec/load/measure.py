"""One workload on one server or several, which take turns, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from overlap_spec.load.asks import Ask, free_asks, json_asks, mixed_asks, read_samples
from overlap_spec.load.client import Answer, Client, closed_loop, open_loop
from overlap_spec.load.figures import mean, paired, percentile
from overlap_spec.load.servers import read_metrics, served_model, verifies_of
from overlap_spec.load.settings import Load

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Target:
    """A server: what it is called here, where it is (without ``/v1``), and its key.

    ``model``: its name there; None is the first that it lists.
    """

    name: str
    url: str
    api_key: str | None = None
    model: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Round:
    """One pass of all requests over one server.

    ``verifies``: tokens that its verifies gave meanwhile, and their number; None of a server that
    does not say.
    """

    server: str
    mode: str
    seconds: float
    answers: Sequence[Answer]
    verifies: tuple[float, float] | None

    @property
    def tokens_per_second(self) -> float:
        """Of the answers without a fault."""
        return sum(a.tokens for a in self.answers if a.fault is None) / self.seconds


def draw_asks(workload: str, data: Path, count: int, max_tokens: int, seed: int) -> list[Ask]:
    """The requests of a workload, in an order drawn by the seed.

    Args:
        data: File of schemas: see :func:`overlap_spec.load.asks.read_samples`.

    Raises:
        ConfigError: the file has no schemas.
    """
    samples = read_samples(data)
    if workload == "json":
        asks = json_asks(samples, count, max_tokens)
    elif workload == "free":
        asks = free_asks(count, max_tokens)
    else:
        asks = mixed_asks(samples, count, max_tokens)
    Random(seed).shuffle(asks)
    return asks


async def measure(
    targets: Sequence[Target], asks: Sequence[Ask], load: Load, advance: Callable[[str, str], None]
) -> list[Round]:
    """Ask each server everything in each mode; they take turns, and who begins changes.

    Grammars are compiled and prompts cached before: a first pass of the closed loop, as many
    requests as it has clients, is not counted.

    Args:
        advance: Called with server and mode for each request that was answered.

    Raises:
        httpx.HTTPError, ConfigError: a server does not answer at all, or lists no model.
    """
    rounds = []
    async with AsyncExitStack() as stack:
        plains = {t.name: stack.enter_context(_plain(t)) for t in targets}
        clients = {}
        for target in targets:
            model = target.model or served_model(plains[target.name], target.url)
            limits = httpx.Limits(max_connections=None)
            http = httpx.AsyncClient(headers=target.headers, timeout=TIMEOUT_S, limits=limits)
            await stack.enter_async_context(http)
            clients[target.name] = Client(http, target.url, model, load.temperature)
            some = asks[: load.clients]
            await closed_loop(clients[target.name], some, load.clients, lambda: None)
        for repetition in range(load.repetitions):
            turn = repetition % len(targets)
            for mode in load.modes:
                for target in [*targets[turn:], *targets[:turn]]:
                    client, plain = clients[target.name], plains[target.name]
                    rounds.append(await _round(target, client, plain, mode, asks, load, advance))
    return rounds


def _plain(target: Target) -> httpx.Client:
    return httpx.Client(headers=target.headers, timeout=60)


async def _round(
    target: Target,
    client: Client,
    plain: httpx.Client,
    mode: str,
    asks: Sequence[Ask],
    load: Load,
    advance: Callable[[str, str], None],
) -> Round:
    def done() -> None:
        advance(target.name, mode)

    before, start = verifies_of(read_metrics(plain, target.url)), time.perf_counter()
    if mode == "closed":
        answers = await closed_loop(client, asks, load.clients, done)
    else:
        answers = await open_loop(client, asks, load.rate, load.seed, done)
    seconds, verifies = time.perf_counter() - start, None
    after = verifies_of(read_metrics(plain, target.url))
    if before is not None and after is not None:
        verifies = after[0] - before[0], after[1] - before[1]
    for answer in answers:
        answer.check()
    return Round(target.name, mode, seconds, answers, verifies)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of one server in one mode."""
    answers = [answer for each in rounds for answer in each.answers]
    good = [answer for answer in answers if answer.fault is None]
    ended = [answer for answer in answers if answer.constrained]
    samples, seconds = [answer.sample() for answer in good], sum(r.seconds for r in rounds)
    told = [r.verifies for r in rounds if r.verifies is not None]
    verifies = sum(count for _, count in told)
    return {
        "requests": len(answers),
        "failed": sum(answer.error is not None for answer in answers),
        "invalid": sum(answer.invalid is not None for answer in answers),
        "valid_share": sum(a.invalid is None for a in ended) / len(ended) if ended else None,
        "cut": sum(answer.finish_reason == "length" for answer in good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(answer.tokens for answer in good) / seconds,
        "ttft_ms": _figures(s["ttft_ms"] for s in samples),
        "tpot_ms": _figures(s["tpot_ms"] for s in samples),
        "itl_ms": _figures(gap for s in samples for gap in s["itl_ms"]),
        "e2e_ms": _figures(s["e2e_ms"] for s in samples),
        "accept_length": sum(tokens for tokens, _ in told) / verifies if verifies else None,
    }


def results(targets: Sequence[Target], rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Server → mode → figures; where there are several servers, with ``ratio``: the first one's
    tokens per second over this one's, repetition by repetition."""
    found: dict[str, dict[str, Any]] = {target.name: {} for target in targets}
    for mode in dict.fromkeys(each.mode for each in rounds):
        first: list[float] | None = None
        for target in targets:
            mine = [r for r in rounds if (r.server, r.mode) == (target.name, mode)]
            rates = [each.tokens_per_second for each in mine]
            found[target.name][mode] = summary(mine)
            if first is None:
                first = rates
            else:
                ratio = paired(first, rates) if all(rates) else None
                found[target.name][mode]["ratio"] = ratio
    return found


def _figures(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": mean(known)} | {f"p{p}": percentile(known, p) for p in (50, 90, 99)}
