"""Replicas on Ray Serve: throughput, tail and prefix hits of 1 and 2, with and without the router.

``python -m bench.cluster [--quick] [--clients N] [--requests N] [--json PATH] [--seed S]`` starts
``overlap-spec serve --replicas`` with the embedded model, once for each row, and asks it in a
closed loop for greedy answers to questions behind eight shared prefixes, in an order drawn by the
seed. The KV cache of a replica is set to hold four and a half of the eight beside the requests that
run, so that two have room for all, and one that is asked for all of them computes some again. Needs
Ray (extra ``cluster``).

Fields of the last line, beside those of every record (``bench.common``): ``prefixes``,
``prefix_tokens``, ``kv_tokens``, ``clients``, and ``rows``, each with ``replicas`` (0: one engine
without Ray), ``routing``, ``requests``, ``failed``, ``seconds``, ``requests_per_second``,
``output_tokens_per_second``, ``ttft_ms``, ``tpot_ms``, ``e2e_ms`` (each ``mean``, ``p50``, ``p90``,
``p99``), ``hit_rate`` (share of the prompts' tokens that were found computed), and ``cpu_ms``
(processor time for a request of the engines, fronts, proxies, Ray's other processes, and this
client). ``hit_gain`` is the hit rate with the router over that in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.common import Run, command, fail, flags
from bench.served import Served
from bench.workloads import CITIES, NAMES, QUESTIONS, Ask
from overlap_spec.cluster import require_ray
from overlap_spec.load.client import Answer, Client, closed_loop
from overlap_spec.load.measure import Round, summary
from overlap_spec.load.servers import read_metrics

PREFIXES = 8
HELD = 4.5
RUNNING = 4
# Of a question, with what the template puts around it.
OWN_TOKENS = 64
# Replicas and how requests find them; 0 is one engine without Ray.
ROWS = ((0, "prefix"), (1, "prefix"), (2, "prefix"), (2, "round-robin"))
TIMEOUT_S = 300.0
# What Ray calls the processes of a request's way.
ROLES = {
    "engines": re.compile(r"^ray::ServeReplica:\S+:engines|overlap_spec\.ipc\.server"),
    "fronts": re.compile(r"^ray::ServeReplica:\S+:front"),
    "proxies": re.compile(r"^ray::ProxyActor|^ray::HTTPProxy"),
}
TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


def prefixes(words: int) -> list[str]:
    """Texts that share no beginning, of so many words."""
    found = []
    for number in range(PREFIXES):
        rng = Random(f"prefix {number}")
        parts = [f"Rules of house {number}."]
        while sum(len(part.split()) for part in parts) < words:
            parts.append(
                f"{rng.choice(NAMES)} of {rng.choice(CITIES)} has room {rng.randint(1, 999)}."
            )
        found.append(" ".join(parts))
    return found


def asks_of(count: int, max_tokens: int, words: int, seed: int) -> list[Ask]:
    """Questions behind the prefixes, all of them alike often."""
    texts, rng = prefixes(words), Random(f"asks {seed}")
    order = [index % PREFIXES for index in range(count)]
    rng.shuffle(order)
    return [
        Ask(
            [
                {"role": "system", "content": texts[index]},
                {"role": "user", "content": f"{rng.choice(QUESTIONS)} ({rng.randint(0, 9999)})"},
            ],
            None,
            max_tokens,
        )
        for index in order
    ]


def children(pid: int) -> dict[int, str]:
    """All processes below one: id → command line."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    below, new = set[int](), {pid}
    while new:
        below |= new
        new = {child for child, parent in parents.items() if parent in new} - below
    found = {}
    for each in below:
        try:
            raw = Path(f"/proc/{each}/cmdline").read_bytes()
        except OSError:
            continue
        found[each] = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def cpu_ms(pid: int) -> dict[str, float]:
    """Processor time so far of the processes below one, by role."""
    total = dict.fromkeys([*ROLES, "others"], 0.0)
    for each, line in children(pid).items():
        role = next((role for role, pattern in ROLES.items() if pattern.search(line)), "others")
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total[role] += (int(fields[11]) + int(fields[12])) * TICK_MS
    return total


def started(replicas: int, routing: str, kv_tokens: int, more: Sequence[str]) -> Served:
    """A server of one row."""
    given = ["--max-running-requests", str(RUNNING), "--max-total-tokens", str(kv_tokens)]
    if replicas:
        given += ["--replicas", str(replicas), "--routing", routing, "--cpus-per-replica", "0.5"]
    # A matcher that a busy machine delays must not fail a request.
    return Served([*given, "--mask-deadline-ms", "5000", *more])


async def load_of(url: str, asks: Sequence[Ask], clients: int) -> list[Answer]:
    """All answers of a closed loop."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        asked = Client(client, url, "overlap-spec", 0.0)
        return await closed_loop(asked, asks, clients, lambda: None)


def measure(run: Run, options: argparse.Namespace, server: Served) -> dict[str, Any]:
    """The figures of one running server."""
    asks = asks_of(options.requests, options.max_tokens, options.words, options.seed)
    with httpx.Client(timeout=TIMEOUT_S) as client:
        # Recordings of a cold server are not what is measured.
        asyncio.run(load_of(server.url, asks[: 2 * PREFIXES], options.clients))
        before, cpu_before = read_metrics(client, server.url), cpu_ms(server.process.pid)
        start, own_start = time.perf_counter(), time.process_time()
        answers = asyncio.run(load_of(server.url, asks, options.clients))
        seconds, own_s = time.perf_counter() - start, time.process_time() - own_start
        found = summary([Round("", "closed", seconds, answers, None)])
        after, cpu_after = read_metrics(client, server.url), cpu_ms(server.process.pid)
    for answer in answers:
        run.sample(mode="closed", **answer.sample())
    grown = {
        name: after[f"overlap_spec:{name}_tokens_total"]
        - before[f"overlap_spec:{name}_tokens_total"]
        for name in ("cached", "prompt")
    }
    count = max(1, len(answers))
    spent = {role: after_ms - cpu_before[role] for role, after_ms in cpu_after.items()}
    spent["client"] = 1e3 * own_s
    for name in ("itl_ms", "cut", "invalid", "valid_share", "accept_length"):
        del found[name]
    return {
        **found,
        "hit_rate": grown["cached"] / grown["prompt"],
        "cpu_ms": {role: each / count for role, each in spent.items()},
    }


def prefix_tokens(words: int) -> int:
    """Tokens of the longest prefix, as the embedded model's tokenizer cuts it."""
    from tokenizers import Tokenizer

    from overlap_spec.config import EMBEDDED

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "target" / "tokenizer.json"))
    return max(len(tokenizer.encode(text).ids) for text in prefixes(words))


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("cluster", "Replicas on Ray Serve: throughput, tail and prefix hits.")
    parser.add_argument("--clients", type=int, default=6, help="of the closed loop")
    parser.add_argument("--requests", type=int, help="of each row; 240, or 64 with --quick")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--words", type=int, default=240, help="of a prefix")
    parser.add_argument("flags", nargs="*", help="after --: more flags of each server")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (64 if options.quick else 240)
    run = Run("cluster", options, arguments)
    require_ray()
    shared = prefix_tokens(options.words)
    # Beside the prefixes: what the running requests have of their own.
    kv_tokens = round(HELD * shared) + RUNNING * (options.max_tokens + OWN_TOKENS)
    rows = list[dict[str, Any]]()
    for replicas, routing in ROWS:
        with started(replicas, routing, kv_tokens, options.flags) as server:
            head: dict[str, Any] = {"replicas": replicas, "routing": routing}
            rows.append(head | measure(run, options, server))
    hits = {(row["replicas"], row["routing"]): row["hit_rate"] for row in rows}
    run.finish(
        1,
        rows=rows,
        hit_gain=hits[2, "prefix"] / max(hits[2, "round-robin"], 1e-9),
        prefixes=PREFIXES,
        prefix_tokens=shared,
        kv_tokens=kv_tokens,
        clients=options.clients,
    )
    if failed := sum(row["failed"] for row in rows):
        fail(f"{failed} requests failed")


if __name__ == "__main__":
    main()
