"""A server under requests made to hold up its front: ``python -m bench.attack``.

``python -m bench.attack [--rounds N] [--fuzz N] [--seconds N] [--quick] [--json PATH]`` starts a
server of the embedded model on loopback, asks it good questions for some seconds, and goes on while
each attack is made ``--rounds`` times: a million wrong items, 100,000 unknown fields, megabytes of
text, too many choices, schemas that are slow to read, bodies and streams that stall, foreign names,
small chunks, more connections than there may be, and what takes others' part
(``bench.attack_kinds``). The attackers have an address of their own. Then comes a fuzz of
``--fuzz`` valid bodies with something changed, at sizes up to the limit. ``--seconds N`` repeats
all of it until the time is over.

``--disconnects N --minutes M`` sends clients that leave instead, N a minute, at every stage of a
request: in its head or body, while its grammar compiles, before its answer or in its stream.

It fails (exit status 1) where a good answer is wrong, an attack is answered with a 5xx, /health
takes over half a second, a good new schema over two beside slow ones, a turn of the event loop over
50 ms of processor time, the good requests' p99 is over three times that without attack, the front
has over 400 MiB, something is left over, or, with clients that leave, front or engine grow by over
a tenth after the first fifth of the time.

Fields of the last line, beside those of every record (``bench.common``): ``good`` (requests,
wrong, ``calm_p99_ms``, ``attacked_p99_ms``, and ``streams_p99_ms``: beside two users' long answers
and no attack), ``health_worst_ms``, ``schema_worst_ms`` (a good new schema beside floods of slow
ones), ``turn_worst_ms`` (processor time of the event loop's longest turn;
``turn_worst_wall_ms`` by the clock), ``front_peak_mib``, ``attacks`` (statuses and time of each,
and the good requests' p99 beside it), ``left_over``. With ``--disconnects``, in place of
``attacks``: ``disconnects`` (how many left at which stage) and ``memory`` (``early_mib`` and
``late_mib`` of front and engine; of the KV cache, which is not counted to the engine, the memory of
the pages that were in use so far, and of all, ``most_mib``: computed prompts are kept as long as
there is room).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from types import TracebackType
from typing import Any

import httpx

from bench.attack_kinds import (
    CHAT,
    JSON,
    GoodSchemas,
    attacking_client,
    attacks,
    disconnects,
    mutations,
)
from bench.common import Run, command, fail, flags, percentile
from bench.served import Served, rss_mib
from overlap_spec.load.servers import read_metrics

QUESTION = [{"role": "user", "content": "Is fire hot?"}]
GOOD = {"messages": QUESTION, "structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}
ENDED_S = 120.0
CALM_S = 5.0
# Other users' long answers, beside which the good requests are timed as well.
STREAMS = 2
ATTACKER_NICE = 15
# Of the fuzz: requests at once, and how long their clients stay.
FUZZ_AT_ONCE, PATIENCE_S = 8, 10.0
LEFT_OVER = ("open", "running", "pages_in_use", "matchers")
# The good requests' p99 beside attacks, over that without; and the most of other figures.
MOST_GROWTH = 3.0
MOST = {
    "health_worst_ms": (500.0, "/health took {} ms"),
    "schema_worst_ms": (2000.0, "a good new schema took {} ms"),
    "turn_worst_ms": (50.0, "one turn of the event loop took {} ms"),
    "front_peak_mib": (400.0, "the front had {} MiB"),
}
# Of front and engine, after this part of the time in which clients leave.
MOST_MEMORY, EARLY = 1.1, 0.2


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("attack", "Requests made to hold up a server's front.")
    parser.add_argument("--rounds", type=int, default=3, help="of each attack (default 3)")
    parser.add_argument("--fuzz", type=int, default=2000, help="bodies of the fuzz (default 2000)")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on at least so long")
    parser.add_argument(
        "--disconnects", type=float, default=0.0, help="clients a minute that leave, for attacks"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of these (default 10)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.fuzz = 1, min(options.fuzz, 200)
    run = Run("attack", options, arguments)
    with Served(["--mask-deadline-ms", "0"]) as served:
        found = asyncio.run(attack(run, options, served))
    record = run.finish(options.rounds, **found)
    if wrong := faults(record):
        fail("; ".join(wrong))


# The good client has a process of its own: in the attacker's it would wait for the attacker's
# interpreter, and count that against the server.


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


async def attack(run: Run, options: argparse.Namespace, served: Served) -> dict[str, Any]:
    """Make all attacks beside good requests; the figures."""
    spans: list[tuple[str, float, float]] = []
    schemas = GoodSchemas()
    async with attacking_client(64) as client:
        with Watch(served.url, served.process.pid) as watch:
            # The server and the good client have begun: the attacker, who would be elsewhere, takes
            # no processor from them.
            os.nice(ATTACKER_NICE)
            start = time.monotonic()
            await asyncio.sleep(CALM_S)
            streamed = time.monotonic()
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(_stream(client, served.url)) for _ in range(STREAMS)]
                await asyncio.sleep(CALM_S)
                for each in streams:
                    each.cancel()
            begun = time.monotonic()
            if options.disconnects:
                made = await _clients_that_leave(run, options, served, client)
                spans.append(("disconnects", begun, time.monotonic()))
            else:
                made = await _attacks(options, served, client, spans, schemas)
        await asyncio.sleep(1)
        state = await _state(client, served)
    with httpx.Client(timeout=60) as plain:
        figures = read_metrics(plain, served.url)
    seen = watch.seen
    attacked: list[float] = []
    for name, first, last in spans:
        beside = seen.times_ms(first, last)
        attacked += beside
        run.sample(attack=name, seconds=last - first, good_ms=beside)
        if name in made.get("attacks", {}):
            entry = made["attacks"][name]
            entry["good_p99_ms"] = max(entry["good_p99_ms"], _p99(beside))
    return {
        "good": {
            "requests": len(seen.answers),
            "wrong": seen.wrong,
            "calm_p99_ms": _p99(seen.times_ms(start, streamed)),
            "streams_p99_ms": _p99(seen.times_ms(streamed, begun)),
            "attacked_p99_ms": _p99(attacked),
        },
        "health_worst_ms": seen.health_worst_ms,
        "schema_worst_ms": schemas.worst_ms,
        "turn_worst_ms": 1e3 * figures["overlap_spec:front_turn_worst_seconds"],
        "turn_worst_wall_ms": 1e3 * figures["overlap_spec:front_turn_worst_wall_seconds"],
        "front_peak_mib": seen.front_peak_mib,
        **made,
        "left_over": {name: state[name] for name in LEFT_OVER},
    }


async def _attacks(
    options: argparse.Namespace,
    served: Served,
    client: httpx.AsyncClient,
    spans: list[tuple[str, float, float]],
    schemas: GoodSchemas,
) -> dict[str, Any]:
    """Each attack's statuses and seconds; when each was made goes to ``spans``."""
    made: dict[str, Any] = {}
    fuzzed = 0
    end = time.monotonic() + options.seconds

    def add(name: str, statuses: Counter[str], start: float) -> None:
        spans.append((name, start, time.monotonic()))
        entry = made.setdefault(name, {"statuses": {}, "seconds": 0.0, "good_p99_ms": 0.0})
        entry["statuses"] = dict(Counter(entry["statuses"]) + statuses)
        entry["seconds"] += spans[-1][2] - start
        told = ", ".join(f"{count} times {status}" for status, count in statuses.items())
        print(f"{name}: {told} in {spans[-1][2] - start:.1f} s", file=sys.stderr, flush=True)

    while not made or time.monotonic() < end:
        for name, one in attacks(schemas).items():
            start = time.monotonic()
            statuses = Counter([str(await one(client, served.url)) for _ in range(options.rounds)])
            add(name, statuses, start)
        bodies = list(mutations(Random(options.seed + fuzzed), options.fuzz))
        fuzzed += 1
        start = time.monotonic()
        add("fuzz", await fuzz(client, served.url, bodies), start)
    return {"attacks": made}


async def _state(client: httpx.AsyncClient, served: Served) -> dict[str, Any]:
    state: dict[str, Any] = (await client.get(f"{served.url}/server_info")).json()["state"]
    return state


async def _clients_that_leave(
    run: Run, options: argparse.Namespace, served: Served, client: httpx.AsyncClient
) -> dict[str, Any]:
    left: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    for share in (EARLY, 1 - EARLY):
        left += await disconnects(served.url, options.disconnects, 60 * options.minutes * share)
        # The last ones have still to be seen.
        await asyncio.sleep(1)
        state = await _state(client, served)
        cache_mib = state["kv_touched_bytes"] / 2**20
        engine_mib = state["rss_bytes"] / 2**20 - cache_mib
        front_mib = rss_mib(served.process.pid)
        memory.append({"front": front_mib, "engine": engine_mib, "kv_cache": cache_mib})
        most_cache_mib = state["kv_bytes"] / 2**20
        run.sample(left=dict(left), **memory[-1])
    early, late = memory
    grown: dict[str, dict[str, float]] = {
        name: {"early_mib": early[name], "late_mib": late[name]} for name in early
    }
    grown["kv_cache"]["most_mib"] = most_cache_mib
    return {"disconnects": dict(left), "memory": grown}


async def _stream(client: httpx.AsyncClient, url: str) -> None:
    """Ask for long answers, one after another."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    while True:
        (await client.post(f"{url}/generate", json=body)).raise_for_status()


async def fuzz(
    client: httpx.AsyncClient, url: str, bodies: Sequence[tuple[str, bytes]]
) -> Counter[str]:
    """Send bodies that are almost valid, some at once; how many got which status."""
    left = list(bodies)
    statuses: Counter[str] = Counter()

    async def send() -> None:
        while left:
            path, content = left.pop()
            try:
                reply = await client.post(
                    url + path, content=content, headers=JSON, timeout=PATIENCE_S
                )
            except httpx.ReadTimeout:
                # It asked for thousands of tokens, or for a grammar that compiles long.
                statuses["left"] += 1
                continue
            statuses[str(reply.status_code)] += 1
            if reply.status_code >= 500:
                print(f"{reply.status_code} {path} {content[:500]!r}", file=sys.stderr)

    await asyncio.gather(*(send() for _ in range(FUZZ_AT_ONCE)))
    return statuses


def _p99(times_ms: Sequence[float]) -> float:
    return percentile(times_ms, 99) if times_ms else 0.0


def faults(record: dict[str, Any]) -> list[str]:
    """What a record shows that must not be."""
    good, found = record["good"], []
    if good["wrong"]:
        found.append(f"{good['wrong']} good requests were not answered right")
    if good["attacked_p99_ms"] > MOST_GROWTH * good["calm_p99_ms"]:
        found.append("the good requests' p99 grew over three times")
    found += [words.format(record[n]) for n, (most, words) in MOST.items() if record[n] > most]
    if any(record["left_over"].values()):
        found.append(f"left over: {record['left_over']}")
    for name, mib in record.get("memory", {}).items():
        if mib["late_mib"] > mib.get("most_mib", MOST_MEMORY * mib["early_mib"]):
            found.append(f"the memory of the {name} grew: {mib}")
    for name, made in record.get("attacks", {}).items():
        if any(status.startswith("5") for status in made["statuses"]):
            found.append(f"{name}: {made['statuses']}")
    return found


if __name__ == "__main__":
    main()
