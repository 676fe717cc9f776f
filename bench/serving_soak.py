"""A server under all that clients do: ``make soak``.

``python -m bench.serving_soak [--seconds N] [--clients N] [--quick] [--json PATH] [--seed S]``
starts a server of the embedded model and keeps 64 clients at it for two minutes: JSON under mixed
schemas, patterns, choices, tools and free text, streamed or not; a third of them leave in the
middle. Every second a hostile schema comes: a deep recursion, a huge ``maxLength``, a pattern with
nested counts, an enum of a megabyte, a grammar of 10,000 rules. Half-way the engine's process is
killed with SIGKILL.

It fails (exit status 1) where a finished output is not what its constraint allows, a request gets
neither an answer nor a refusal, the engine is not serving again within a minute or dies by itself,
pages or matchers are left over at the end, or memory grows: the median of the last third of the
time after the kill may exceed that of its second third by a tenth and 64 MiB, in either process.

Fields of the last line, beside those of every record (``bench.common``): ``seconds``, ``clients``,
``requests``, ``outcomes`` (how many ended in which way), ``hostile`` (answers by kind of schema),
``wrong``, ``lost`` (texts of what must not be), ``recovery_s``, ``left_over``, ``rss_mib`` (of
``engine`` and ``front``: ``early``, ``late``, ``peak``), ``flat`` (null: too short to tell).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import jsonschema

from bench.common import Run, fail, flags, median, rounded
from bench.served import Served, rss_mib
from bench.serving_traffic import Traffic, Wish, hostile
from overlap_spec.errors import ConfigError

LEAVE_SHARE = 1 / 3
LONGEST_STAY_S = 1.0
TIMEOUT_S = 120.0
GROWTH_SHARE = 1.1
GROWTH_MIB = 64.0
SHORTEST_LOOK_S = 30.0
RECOVERY_S = 60.0
REQUEST_S = 60.0
CHAT = "/v1/chat/completions"


@dataclass
class Tally:
    """What became of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    hostile: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def judge(self, wish: Wish, message: dict[str, Any], reason: str | None) -> None:
        """Enter an answer of 200."""
        if reason not in ("stop", "tool_calls"):
            self.outcomes[reason or "no reason"] += 1
            return
        try:
            good = wish.check(message)
        except (ValueError, KeyError, TypeError, jsonschema.ValidationError):
            good = False
        self.outcomes["right" if good else "wrong"] += 1
        if not good:
            self.wrong.append(json.dumps([wish.body, message])[:1000])

    def refuse(self, status: int, text: str) -> None:
        """Enter any other answer."""
        self.outcomes[str(status)] += 1
        if status not in (429, 503):
            self.lost.append(f"{status}: {text[:300]}")


class Soak:
    """All clients of one server."""

    def __init__(self, client: httpx.AsyncClient, options: argparse.Namespace, run: Run) -> None:
        self.client, self.options, self.run = client, options, run
        self.tally, self.traffic = Tally(), Traffic(options.seed)
        self.end = time.perf_counter() + options.seconds
        self.recovery_s: float | None = None
        # Whether the engine is away: clients then wait a little between their attempts.
        self.refused = False

    async def all(self, front_pid: int) -> None:
        """Everything at once, until the time is over and the last request has its answer."""
        clients = [self.ordinary(number) for number in range(self.options.clients)]
        with self.run.progress() as progress:
            task = progress.add_task("seconds", total=self.options.seconds)

            def tick(seconds: float) -> None:
                progress.update(task, completed=min(seconds, self.options.seconds))

            watch = asyncio.create_task(self.watch(front_pid, tick))
            await asyncio.gather(*clients, self.nasty(), self.kill())
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def ordinary(self, number: int) -> None:
        """One client after another of the same kind."""
        rng = Random(f"{self.options.seed} {number}")
        while time.perf_counter() < self.end:
            wish = self.traffic.wish(rng)
            stay_s = rng.random() * LONGEST_STAY_S if rng.random() < LEAVE_SHARE else None
            ask = self.streamed if rng.random() < 0.5 else self.whole
            try:
                async with asyncio.timeout(stay_s):
                    await ask(wish)
            except TimeoutError:
                self.tally.outcomes["left"] += 1
            except httpx.HTTPError as error:
                self.tally.lost.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
            if self.refused:
                await asyncio.sleep(0.5 * rng.random())

    async def whole(self, wish: Wish) -> None:
        """A request whose answer comes in one piece."""
        reply = await self.client.post(CHAT, json=wish.body)
        if reply.status_code != 200:
            self.tally.refuse(reply.status_code, reply.text)
            return
        (choice,) = reply.json()["choices"]
        self.tally.judge(wish, choice["message"], choice["finish_reason"])

    async def streamed(self, wish: Wish) -> None:
        """A request whose answer comes as a stream."""
        body = wish.body | {"stream": True}
        message: dict[str, Any] = {"content": "", "tool_calls": []}
        reason, last = None, ""
        async with self.client.stream("POST", CHAT, json=body) as reply:
            if reply.status_code != 200:
                self.tally.refuse(reply.status_code, (await reply.aread()).decode())
                return
            async for line in reply.aiter_lines():
                last = line or last
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    code = event["error"]["code"]
                    status = 503 if code == "engine_unavailable" else 500
                    self.tally.refuse(status, str(event))
                    return
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    _extend(message, choice["delta"])
        if last != "data: [DONE]":
            self.tally.lost.append(f"a stream broke off after {last[:100]}")
            return
        self.tally.judge(wish, message, reason)

    async def nasty(self) -> None:
        """One hostile request a second, each in its own time."""
        tasks, number = [], 0
        while time.perf_counter() < self.end:
            tasks.append(asyncio.create_task(self.one_hostile(number)))
            number += 1
            await asyncio.sleep(1.0)
        await asyncio.gather(*tasks)

    async def one_hostile(self, number: int) -> None:
        """Any answer will do, but for a fault of the server's own."""
        kind, body = hostile(number)
        start = time.perf_counter()
        try:
            reply = await self.client.post(CHAT, json=body)
            outcome = str(reply.status_code)
            if reply.status_code >= 400:
                outcome += f" {reply.json()['error']['code'] or 'refused'}"
            if reply.status_code == 500:
                self.tally.lost.append(f"{kind}: {reply.text[:300]}")
        except httpx.HTTPError as error:
            outcome = type(error).__name__
            self.tally.lost.append(f"{kind}: {outcome}: {error}")
        self.tally.hostile.setdefault(kind, Counter())[outcome] += 1
        self.run.sample(hostile=kind, outcome=outcome, seconds=time.perf_counter() - start)

    async def kill(self) -> None:
        """Half-way: kill the engine's process, and wait until it serves again."""
        await asyncio.sleep(self.options.seconds / 2)
        state = await self.state()
        assert state is not None
        os.kill(state["pid"], signal.SIGKILL)
        self.refused, start = True, time.perf_counter()
        while time.perf_counter() - start < RECOVERY_S:
            await asyncio.sleep(0.1)
            if (await self.client.get("/health")).status_code == 200:
                after = await self.state()
                if after is not None and after["pid"] != state["pid"]:
                    self.recovery_s = time.perf_counter() - start
                    break
        self.refused = False

    async def watch(self, front_pid: int, tick: Callable[[float], None]) -> None:
        """Note memory and pages once a second."""
        start = time.perf_counter()
        while True:
            seconds = time.perf_counter() - start
            tick(seconds)
            state = await self.state()
            if state is not None:
                self.run.sample(
                    seconds=seconds,
                    engine_mib=state["rss_bytes"] / 2**20,
                    front_mib=rss_mib(front_pid),
                    recovered=self.recovery_s is not None,
                    **{name: state[name] for name in ("pages_in_use", "open", "compiling")},
                )
            await asyncio.sleep(1.0)

    async def state(self) -> dict[str, Any] | None:
        """The engine's state; None where it is not there."""
        state: dict[str, Any] | None = (await self.client.get("/server_info")).json()["state"]
        return state

    async def left_over(self) -> dict[str, int]:
        """What is kept once no request is left."""
        names = ("open", "compiling", "running", "waiting", "pages_in_use", "matchers")
        for _ in range(300):
            state = await self.state()
            if state is not None and not any(state[name] for name in names):
                break
            await asyncio.sleep(0.1)
        return {name: state[name] if state else -1 for name in names}


def _extend(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or []:
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        function = message["tool_calls"][call["index"]]["function"]
        for name, text in call["function"].items():
            function[name] += text


def memory(samples: Sequence[dict[str, Any]], seconds: float) -> tuple[dict[str, Any], bool | None]:
    """Memory early and late under load after the kill, by process, and whether it is flat; None
    where too little time was left to tell."""
    noted = [s for s in samples if "open" in s]
    after = [s for s in noted if s["recovered"] and s["seconds"] <= seconds] or noted
    third = max(1, len(after) // 3)
    found, flat = dict[str, Any](), True
    for process in ("engine", "front"):
        values = [s[f"{process}_mib"] for s in after]
        # A new process takes its memory in its first seconds, whatever is asked of it.
        early, late = median(values[third : 2 * third] or values), median(values[-third:])
        flat = flat and late <= early * GROWTH_SHARE + GROWTH_MIB
        peak = max(s[f"{process}_mib"] for s in noted)
        found[process] = {"early": early, "late": late, "peak": peak}
    return found, flat if after[-1]["seconds"] - after[0]["seconds"] >= SHORTEST_LOOK_S else None


def faults(record: dict[str, Any]) -> list[str]:
    """What a record says that must not be, in words."""
    found = [f"{len(record[name])} {name}: {record[name][0]}" for name in ("wrong", "lost")
             if record[name]]  # fmt: skip
    found += [f"{what} is {n} at the end" for what, n in record["left_over"].items() if n]
    if record["recovery_s"] is None:
        found.append(f"the engine did not serve again within {RECOVERY_S} s")
    if record["restarts"] != 1:
        found.append(f"the engine was started again {record['restarts']} times, not once")
    if record["flat"] is False:
        found.append(f"memory grew: {record['rss_mib']}")
    return found


async def soak(run: Run, options: argparse.Namespace, served: Served) -> dict[str, Any]:
    """The whole run; its figures."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=served.url, timeout=TIMEOUT_S, limits=limits) as client:
        work = Soak(client, options, run)
        await work.all(served.process.pid)
        left_over = await work.left_over()
        health = (await client.get("/health")).json()
    rss, flat = memory(run.samples, options.seconds)
    tally = work.tally
    return {
        "seconds": options.seconds,
        "clients": options.clients,
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "hostile": {kind: dict(found) for kind, found in sorted(tally.hostile.items())},
        "wrong": tally.wrong[:5],
        "lost": tally.lost[:5],
        "recovery_s": work.recovery_s,
        "restarts": health["restarts"],
        "left_over": left_over,
        "rss_mib": rss,
        "flat": flat,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("serving_soak", "A server under all that clients do.")
    parser.add_argument("--seconds", type=float, help="how long; 120, or 30 with --quick")
    parser.add_argument("--clients", type=int, help="at once; 64, or 16 with --quick")
    parser.add_argument("flags", nargs="*", help="after --: flags of the server")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (30.0 if options.quick else 120.0)
    options.clients = options.clients or (16 if options.quick else 64)
    if options.seconds < 10 or options.clients < 1:
        parser.error("--seconds must be at least 10, and --clients at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("serving_soak", options, arguments)
    given = ["--context-length", "1024", "--mask-deadline-ms", "0"]
    # Long compiles queue: a request that waits for a minute is refused with that reason.
    given += ["--request-timeout-s", str(REQUEST_S), *options.flags]
    try:
        with Served(given) as served:
            found = asyncio.run(soak(run, options, served))
    except (ConfigError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    record = run.finish(1, **rounded(found))
    wrong = faults(record)
    if wrong:
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
