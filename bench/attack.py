"""A server under requests made to hold up its front: ``python -m bench.attack``.

``python -m bench.attack [--rounds N] [--fuzz N] [--seconds N] [--quick] [--json PATH]`` starts a
server of the embedded model on loopback, asks it good questions for some seconds, and goes on while
each attack is made ``--rounds`` times: a million wrong items, 100,000 unknown fields, megabytes of
text, too many choices, schemas that are slow to read, bodies and streams that stall, foreign names,
small chunks, more connections than there may be, and what takes others' part
(``bench.attack_kinds``). The attackers have an address of their own. Then comes a fuzz of
``--fuzz`` bodies: half of them are what the server's own document forbids, half are valid ones with
something changed, at sizes up to the limit. ``--seconds N`` repeats all of it until the time is
over.

``--disconnects N --minutes M`` sends clients that leave instead, N a minute, at every stage of a
request: in its head or body, while its grammar compiles, before its answer or in its stream.
``--memory --minutes M`` makes those attacks in turn that take the engine's memory.

It fails (exit status 1) where a good answer is wrong, an attack is answered with a 5xx, /health
takes over half a second, a good new schema over two beside slow ones, a turn of the event loop over
50 ms of processor time, the good requests' p99 is over three times that without attack, the front
has over 400 MiB, something is left over, with clients that leave front or engine grow by over a
tenth after the first fifth of the time, or, after ``--memory``, the engine has a minute later over
200 MiB more than at first.

Fields of the last line, beside those of every record (``bench.common``): ``good`` (requests,
wrong, ``calm_p99_ms``, ``attacked_p99_ms``, and ``streams_p99_ms``: beside two users' long answers
and no attack), ``health_worst_ms``, ``schema_worst_ms`` (a good new schema beside floods of slow
ones), ``turn_worst_ms`` (processor time of the event loop's longest
turn; ``turn_worst_wall_ms`` by the clock), ``front_peak_mib``, ``attacks`` (statuses and time of
each, and the good requests' p99 beside it), ``left_over``, with ``--memory`` ``engine_mib``
(``before``, ``attacked``, and ``after`` a minute of rest, without the KV cache). With
``--disconnects``, in place of ``attacks``: ``disconnects`` (how many left at which stage) and
``memory`` (``early_mib`` and ``late_mib`` of front and engine; of the KV cache, which is not
counted to the engine, the memory of the pages that were in use so far, and of all, ``most_mib``:
computed prompts are kept as long as there is room).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from bench.attack_disconnects import disconnects
from bench.attack_fuzz import almost_valid
from bench.attack_kinds import JSON, Attack, GoodSchemas, attacking_client, attacks, memory_attacks
from bench.attack_watch import Watch
from bench.common import Run, command, fail, flags, percentile
from bench.served import Served, rss_mib
from overlap_spec.load.servers import read_metrics

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
# Of the engine: when its memory is read, how long after the last attack, and what may be left.
WHEN, REST_S, MOST_LEFT_MIB = ("before", "attacked", "after"), 60.0, 200.0


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
    parser.add_argument("--memory", action="store_true", help="take memory, for attacks")
    parser.add_argument("--minutes", type=float, default=10.0, help="of either (default 10)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.fuzz = 1, min(options.fuzz, 200)
    if options.memory:
        options.seconds, options.fuzz = 60 * options.minutes, 0
    run = Run("attack", options, arguments)
    with Served(["--mask-deadline-ms", "0"]) as served:
        found = asyncio.run(attack(run, options, served))
    record = run.finish(options.rounds, **found)
    if wrong := faults(record):
        fail("; ".join(wrong))


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
            elif options.memory:
                states = [await _state(client, served)]
                made = await _attacks(options, served, client, spans, memory_attacks())
                states.append(await _state(client, served))
                await asyncio.sleep(REST_S)
                states.append(await _state(client, served))
                made["engine_mib"] = dict(zip(WHEN, map(_engine_mib, states), strict=True))
            else:
                made = await _attacks(options, served, client, spans, attacks(schemas))
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
    kinds: dict[str, Attack],
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
        for name, one in kinds.items():
            start = time.monotonic()
            statuses = Counter([str(await one(client, served.url)) for _ in range(options.rounds)])
            add(name, statuses, start)
        if not options.fuzz:
            continue
        # Made before the clock runs: that takes a processor for itself.
        seed = options.seed + fuzzed
        bodies = await asyncio.to_thread(almost_valid, served.url, options.fuzz, seed)
        fuzzed += 1
        start = time.monotonic()
        add("fuzz", await fuzz(client, served.url, bodies), start)
    return {"attacks": made}


async def _state(client: httpx.AsyncClient, served: Served) -> dict[str, Any]:
    state: dict[str, Any] = (await client.get(f"{served.url}/server_info")).json()["state"]
    return state


def _engine_mib(state: dict[str, Any]) -> float:
    """Memory of the engine's process without the KV cache's pages."""
    return float(state["rss_bytes"] - state["kv_touched_bytes"]) / 2**20


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
        front_mib = rss_mib(served.process.pid)
        engine_mib, cache_mib = _engine_mib(state), state["kv_touched_bytes"] / 2**20
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
    engine = record.get("engine_mib", dict.fromkeys(WHEN, 0.0))
    if engine["after"] > engine["before"] + MOST_LEFT_MIB:
        found.append(f"the engine kept memory: {engine}")
    for name, made in record.get("attacks", {}).items():
        if any(status.startswith("5") for status in made["statuses"]):
            found.append(f"{name}: {made['statuses']}")
    return found


if __name__ == "__main__":
    main()
