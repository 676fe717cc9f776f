"""Many short requests through one engine: what it holds must not grow.

``python -m bench.soak [--requests N] [--quick] [--json PATH] [--seed S]`` keeps 32 requests on
their way: JSON under a few schemas, free text, stop strings, and every twentieth one aborted. At
regular intervals it notes resident memory, pages in use, and what else an engine keeps by request.
It fails (exit status 1) where pages or matchers are left over at the end, a request ends with an
error, or memory keeps on growing: the median of the last fifth may exceed that of the second fifth
by a twentieth and 32 MiB.

Fields of the last line, beside those of every record (``bench.common``): ``requests``,
``requests_per_second``, ``tokens``, ``finish_reasons``, ``rss_mib`` (``early``, ``late``, ``peak``;
medians of the second and last fifth), ``pages`` (``total``, ``most_in_use``),
``left_over`` (what is still kept by request) and ``flat``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from bench.common import Run, command, fail, flags, median, positive
from bench.served import rss_mib
from bench.targets import add_model_flags, model_settings
from bench.workloads import OWN_SCHEMAS, Ask, free_asks, json_asks, read_samples
from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.worker.worker import Worker

IN_FLIGHT = 32
SAMPLES = 200
ABORT_EVERY = 20
GROWTH_SHARE = 1.05
GROWTH_MIB = 32.0


class Traffic:
    """Requests by number, drawn by a seed; the same number gives the same request."""

    def __init__(self, seed: int) -> None:
        samples = read_samples(OWN_SCHEMAS)
        asks = json_asks(samples, 4 * len(samples), 1) + free_asks(8, 1)
        self.asks: list[Ask] = asks
        self.seed = seed

    def submit(self, engine: Engine, number: int) -> RequestHandle:
        """Queue request ``number``: 1 to 12 tokens long, some with a stop string."""
        rng = Random(f"{self.seed} {number}")
        ask = rng.choice(self.asks)
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(1, 12)}
        sampling["complete"] = False
        if rng.random() < 0.1:
            sampling["stop"] = [","]
        return engine.submit(ask.prompt, ask.grammar, sampling)


def soak(engine: Engine, run: Run, requests: int, seed: int) -> Counter[str]:
    """Run all requests, a sample every so many; how many ended for which reason."""
    traffic, reasons, tokens = Traffic(seed), Counter[str](), 0
    open_tickets: dict[int, RequestHandle] = {}
    submitted = ended = 0
    every = max(1, requests // SAMPLES)
    start = time.perf_counter()
    with run.progress() as progress:
        task = progress.add_task("requests", total=requests)
        while ended < requests:
            while submitted < requests and len(open_tickets) < IN_FLIGHT:
                open_tickets[submitted] = traffic.submit(engine, submitted)
                submitted += 1
            engine.step()
            for number, ticket in list(open_tickets.items()):
                if number % ABORT_EVERY == 0 and ticket.deltas and ticket.output is None:
                    engine.abort(ticket)
                if ticket.output is None:
                    continue
                engine.release([open_tickets.pop(number)])
                reasons[ticket.output.finish_reason] += 1
                tokens += ticket.output.stats.output_tokens
                ended += 1
                progress.advance(task)
                if ended % every == 0:
                    run.sample(requests=ended, tokens=tokens, **held(engine, start))
    return reasons


def touch(worker: Worker, pages: int) -> None:
    """Write to every page of the caches."""
    for cache in worker.runner.caches:
        cache.clear(tuple(range(pages + 1)))


def held(engine: Engine, start: float) -> dict[str, Any]:
    """What the engine and its process hold now."""
    state = engine.snapshot()
    return {
        "seconds": time.perf_counter() - start,
        "rss_mib": rss_mib(os.getpid()),
        **{name: state[name] for name in ("pages_in_use", "pages", "running", "waiting")},
        "matchers": state["matchers"],
    }


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's figures, made of the samples."""
    fifth = max(1, len(samples) // 5)
    early = median(s["rss_mib"] for s in samples[fifth : 2 * fifth] or samples)
    late = median(s["rss_mib"] for s in samples[-fifth:])
    last = samples[-1]
    return {
        "requests": last["requests"],
        "requests_per_second": last["requests"] / last["seconds"],
        "tokens": last["tokens"],
        "rss_mib": {"early": early, "late": late, "peak": max(s["rss_mib"] for s in samples)},
        "pages": {
            "total": last["pages"],
            "most_in_use": max(s["pages_in_use"] for s in samples),
        },
        "flat": late <= early * GROWTH_SHARE + GROWTH_MIB,
    }


def faults(record: dict[str, Any]) -> list[str]:
    """What a record says that must not be, in words."""
    found = [
        f"{what} is {count} after the last request"
        for what, count in record["left_over"].items()
        if count
    ]
    if record["finish_reasons"].get("error"):
        found.append(f"{record['finish_reasons']['error']} requests ended with an error")
    if not record["flat"]:
        found.append(f"memory grew: {record['rss_mib']}")
    return found


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("soak", "Many short requests through one engine.")
    parser.add_argument("--requests", type=positive, help="how many; 10000, or 500 with --quick")
    add_model_flags(parser)
    parser.add_argument("--overlap", default="once-sync", help="overlap mode")
    options = parser.parse_args(arguments)
    requests = options.requests or (500 if options.quick else 10_000)
    run = Run("soak", options, arguments)
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "overlap": options.overlap,
        "context_length": 1024,
        "mask_deadline_ms": None,
        **model_settings(options, run.console),
    }
    with Engine(**settings) as engine:
        # The system gives memory to a page of the caches when it is first written.
        engine.core.worker.do(touch, engine.snapshot()["pages"])
        reasons = soak(engine, run, requests, options.seed)
        last = held(engine, 0.0)
    left_over = {name: last[name] for name in ("pages_in_use", "matchers", "running", "waiting")}
    record = run.finish(
        1,
        **summary(run.samples),
        finish_reasons=dict(sorted(reasons.items())),
        left_over=left_over,
    )
    if wrong := faults(record):
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
