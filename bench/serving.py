"""Load on a server: closed loop (so many clients) and open loop (Poisson arrivals), streaming.

``python -m bench.serving [--base-url URL] [--mode closed|open|both] [--clients N] [--rate R]
[--requests N] [--workload json|free|mixed] [--quick] [--json PATH] [--seed S]`` asks any server
with OpenAI's ``/v1/chat/completions``; without ``--base-url`` it starts its own, of the embedded
model, with the flags after ``--``. Times are the client's. Answers under a schema are
parsed and validated; it fails (exit status 1) where one is wrong, or a request got no answer.

Fields of the last line, beside those of every record (``bench.common``): ``workload``, ``server``
(``own`` or ``other``), and for each mode: ``requests``, ``failed``, ``cut`` (ended by length),
``seconds``, ``requests_per_second``, ``output_tokens_per_second``, ``accept_length`` (null where
the server does not say), and ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, each with ``mean``,
``p50``, ``p90``, ``p99``. An inter-token time is that between two chunks that carry text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import jsonschema

from bench.common import Run, fail, flags, mean, percentile, rounded
from bench.served import Served, accept_length, read_metrics, served_model
from bench.workloads import OWN_SCHEMAS, Ask, free_asks, json_asks, mixed_asks, read_samples
from overlap_spec.errors import ConfigError

TIMEOUT_S = 300.0


@dataclass
class Answer:
    """One request as its client saw it; times in seconds of ``time.perf_counter``."""

    ask: Ask
    due: float
    first: float = 0.0
    last: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def sample(self, mode: str) -> dict[str, Any]:
        """As a raw sample of the record."""
        rest = self.tokens - 1
        tpot = 1e3 * (self.last - self.first) / rest if rest > 0 else None
        return {
            "mode": mode,
            "ttft_ms": 1e3 * (self.first - self.due) if self.first else None,
            "e2e_ms": 1e3 * (self.last - self.due) if self.last else None,
            "tpot_ms": tpot,
            "itl_ms": self.gaps_ms,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }

    def check(self) -> None:
        """Note an error where a whole answer is not what its schema allows."""
        grammar = self.ask.grammar
        if self.error is not None or grammar is None or self.finish_reason != "stop":
            return
        try:
            jsonschema.validate(json.loads(self.text), json.loads(grammar.source))
        except (ValueError, jsonschema.ValidationError) as error:
            self.error = f"wrong JSON: {error}"


class Load:
    """Requests to one server."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, temperature: float) -> None:
        self.client, self.url, self.model = client, url, model
        self.temperature = temperature

    def body(self, ask: Ask) -> dict[str, Any]:
        """A request in OpenAI's shape, with nothing that only one server knows."""
        messages = ask.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.grammar is not None:
            schema = {"name": "answer", "schema": json.loads(ask.grammar.source), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    async def send(self, ask: Ask, due: float) -> Answer:
        """One request; its time counts from when it was due."""
        answer = Answer(ask, due)
        try:
            await self._read(answer)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.check()
        return answer

    async def _read(self, answer: Answer) -> None:
        url, body = f"{self.url}/v1/chat/completions", self.body(answer.ask)
        async with self.client.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                answer.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._take(answer, json.loads(line[6:]))

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        now = time.perf_counter()
        if "error" in event:
            answer.error = str(event["error"])
            return
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            text = choice["delta"].get("content")
            if not text:
                continue
            if answer.first:
                answer.gaps_ms.append(1e3 * (now - answer.last))
            answer.first = answer.first or now
            answer.last = now
            answer.text += text


async def closed_loop(load: Load, asks: Sequence[Ask], clients: int, done: Any) -> list[Answer]:
    """So many clients, each of which sends its next request when it has its answer."""
    queue, answers = iter(asks), list[Answer]()

    async def client() -> None:
        for ask in queue:
            answers.append(await load.send(ask, time.perf_counter()))
            done()

    await asyncio.gather(*[client() for _ in range(clients)])
    return answers


async def open_loop(
    load: Load, asks: Sequence[Ask], rate: float, seed: int, done: Any
) -> list[Answer]:
    """Requests that come at random times, so many a second, whether or not others are answered."""
    rng, due, tasks = Random(f"arrivals {seed}"), time.perf_counter(), []

    async def one(ask: Ask, due: float) -> Answer:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        answer = await load.send(ask, due)
        done()
        return answer

    for ask in asks:
        due += rng.expovariate(rate)
        tasks.append(asyncio.create_task(one(ask, due)))
    return list(await asyncio.gather(*tasks))


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The figures of one mode."""
    good = [answer for answer in answers if answer.error is None]
    samples = [answer.sample("") for answer in good]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "cut": sum(answer.finish_reason == "length" for answer in good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(answer.tokens for answer in good) / seconds,
        "ttft_ms": figures(s["ttft_ms"] for s in samples),
        "tpot_ms": figures(s["tpot_ms"] for s in samples),
        "itl_ms": figures(gap for s in samples for gap in s["itl_ms"]),
        "e2e_ms": figures(s["e2e_ms"] for s in samples),
    }


def figures(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": mean(known)} | {f"p{p}": percentile(known, p) for p in (50, 90, 99)}


def asks_of(options: argparse.Namespace) -> list[Ask]:
    """The workload's requests, in an order drawn by the seed."""
    count, longest = options.requests, options.max_tokens
    samples = read_samples(options.data)
    asks = {
        "json": lambda: json_asks(samples, count, longest),
        "free": lambda: free_asks(count, longest),
        "mixed": lambda: mixed_asks(samples, count, longest),
    }[options.workload]()
    Random(options.seed).shuffle(asks)
    return asks


async def measure(run: Run, options: argparse.Namespace, url: str, model: str) -> dict[str, Any]:
    """All modes asked for, one after the other; the figures of each."""
    results: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None)
    modes = ("closed", "open") if options.mode == "both" else (options.mode,)
    with httpx.Client(headers=headers, timeout=60) as plain:
        async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
            load = Load(client, url, model, options.temperature)
            asks = asks_of(options)
            # Grammars and prefixes of a cold server are not what is measured.
            await closed_loop(load, asks[: options.clients], options.clients, lambda: None)
            for mode in modes:
                before, start = read_metrics(plain, url), time.perf_counter()
                with run.progress() as progress:
                    task = progress.add_task(mode, total=len(asks))
                    done = lambda: progress.advance(task)  # noqa: B023, E731
                    if mode == "closed":
                        answers = await closed_loop(load, asks, options.clients, done)
                    else:
                        answers = await open_loop(load, asks, options.rate, options.seed, done)
                found = summary(answers, time.perf_counter() - start)
                found["accept_length"] = accept_length(before, read_metrics(plain, url))
                results[mode] = found
                for answer in answers:
                    run.sample(**answer.sample(mode))
    return results


def show(run: Run, results: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.table import Table

    table = Table("mode", "req/s", "tok/s", "TTFT p50/p99", "TPOT p50/p99", "ITL p50/p99", "accept")
    for mode, found in results.items():
        pairs = [
            f"{found[name]['p50']:.1f} / {found[name]['p99']:.1f} ms" if found[name] else "-"
            for name in ("ttft_ms", "tpot_ms", "itl_ms")
        ]
        accept = found["accept_length"]
        table.add_row(
            mode,
            f"{found['requests_per_second']:.2f}",
            f"{found['output_tokens_per_second']:.1f}",
            *pairs,
            f"{accept:.2f}" if accept is not None else "-",
        )
    run.console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("serving", "Load on a server: closed and open loop.")
    parser.add_argument("--base-url", help="a running server, without /v1; our own if absent")
    parser.add_argument("--api-key", help="its key, if it asks for one")
    parser.add_argument("--model", help="its model's name; the first that it lists if absent")
    parser.add_argument("--mode", choices=("closed", "open", "both"), default="both")
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop")
    parser.add_argument("--rate", type=float, help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, help="of each loop; 200, or 24 with --quick")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--workload", choices=("json", "free", "mixed"), default="json")
    parser.add_argument("--data", type=Path, default=OWN_SCHEMAS, help="schemas, as JSON lines")
    parser.add_argument("flags", nargs="*", help="after --: flags of our own server")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (24 if options.quick else 200)
    options.rate = options.rate or (4.0 if options.quick else 8.0)
    if options.requests < 1 or options.clients < 1 or options.rate <= 0:
        parser.error("--requests, --clients and --rate must be over 0")
    if options.base_url and options.flags:
        parser.error("flags after -- are for our own server, not for one at --base-url")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("serving", options, arguments)
    try:
        with contextlib.ExitStack() as stack:
            url = options.base_url
            if url is None:
                url = stack.enter_context(Served(options.flags)).url
            url = url.rstrip("/").removesuffix("/v1")
            key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
            with httpx.Client(headers=key, timeout=60) as client:
                model = options.model or served_model(client, url)
            results = asyncio.run(measure(run, options, url, model))
    except (ConfigError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    show(run, results)
    run.finish(
        1,
        **rounded(results),
        workload=options.workload,
        clients=options.clients,
        rate=options.rate,
        server="other" if options.base_url else "own",
    )
    wrong = [s["error"] for s in run.samples if s["error"]]
    if wrong:
        fail(f"{len(wrong)} requests failed, the first with {wrong[0]}")


if __name__ == "__main__":
    main()
