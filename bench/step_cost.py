"""What a decode step costs, by batch size and with prompts that arrive.

``python -m bench.step_cost [--batch 1,4,16,32] [--arrivals] [--overlap MODE] [--model DIR
--draft DIR] [--threads N] [--turns N]`` asks the embedded model, or another, for JSON under a
schema, greedily, and drives the engine's steps by hand. Each batch size gets the same requests
round after round, after one round that is not counted; each round begins when a line comes in, as
``bench.side_by_side`` sends them, and ends in a JSON line. With ``--arrivals``, four requests
decode while a new prompt is submitted before every fifth step; only the four are measured.

It uses nothing but ``Engine``, ``Grammar`` and the outputs' statistics, so that it runs in a work
tree of another age.

A line has ``batch_N`` or ``arrivals`` with ``tpot_ms`` (mean over requests of (end-to-end - TTFT) /
(tokens - 1)), ``cpu_ms`` (the process's CPU time a token), ``tokens_per_second``,
``accept_length``, ``steps``, ``output_tokens`` and ``output_sha256`` (of all token ids). All but
the times are the same in every round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from overlap_spec import Engine, Grammar

SETTINGS: dict[str, Any] = {
    # Nothing may depend on the clock, and a prompt must cost the same in every round.
    "adaptive": "static",
    "mask_deadline_ms": None,
    "prefix_cache": False,
    "max_running_requests": 40,
    "context_length": 1024,
    # All prompts of a batch in its first step.
    "chunked_prefill_size": 8192,
}
DECODING = 4
ARRIVES_EVERY = 5
ARRIVING_TOKENS = 8
MOST_TOKENS = 96

NAMES = ("Umar Rogers", "Karen Weber", "Eli Richardson", "Linda Hansen", "Tom Baker", "Ada Brandt")
CITIES = ("Marseille", "Zurich", "Melbourne", "Delhi", "Perth", "Cologne", "Amsterdam")
GOODS = ("notebook", "lamp", "kettle", "drum", "basket")
TYPES = {"order id": "string", "product": "string", "quantity": "integer", "customer": "string",
         "city": "string", "total": "number"}  # fmt: skip
ORDER = Grammar.json_schema(
    {
        "type": "object",
        "properties": {name.replace(" ", "_"): {"type": kind} for name, kind in TYPES.items()},
        "required": [name.replace(" ", "_") for name in TYPES],
        "additionalProperties": False,
    }
)


def prompt(number: int) -> str:
    """The prompt of this number; the first 210 differ."""
    name, city = NAMES[number % len(NAMES)], CITIES[number % len(CITIES)]
    goods, n = GOODS[number % len(GOODS)], 10 + number % 89
    said = f"Order AB-{n}: {n} x {goods}, buyer {name}, {city}, total ${n}.50, status pending."
    return f"Extract {', '.join(TYPES)}. {said}"


def answer(engine: Engine, batch: int, arrivals: bool = False) -> dict[str, Any]:
    """Decode ``batch`` requests side by side, step by step; their figures.

    Args:
        arrivals: Submit another request before every fifth step; it decodes a few tokens.

    Raises:
        RuntimeError: a request ended with an error.
    """

    def submit(number: int, max_tokens: int) -> Any:
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "complete": False}
        return engine.submit(prompt(number), ORDER, sampling)

    fresh, steps, arrived = count(batch), 0, []
    start, cpu_start = time.perf_counter(), time.process_time()
    handles = [submit(n, MOST_TOKENS) for n in range(batch)]
    try:
        while any(handle.output is None for handle in handles):
            steps += 1
            if arrivals and steps % ARRIVES_EVERY == 0:
                arrived.append(submit(next(fresh), ARRIVING_TOKENS))
            engine.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        outputs = [handle.output for handle in handles]
    finally:
        engine.release([*handles, *arrived])
        while engine.step():
            pass
    if errors := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(f"a request ended with an error: {errors[0]}")
    stats = [output.stats for output in outputs]
    tokens = sum(s.output_tokens for s in stats)
    ids = json.dumps([list(output.token_ids) for output in outputs])
    return {
        "tpot_ms": round(statistics.fmean(s.tpot_ms for s in stats if s.output_tokens > 1), 4),
        "cpu_ms": round(cpu_seconds * 1e3 / tokens, 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "accept_length": round(
            sum(s.verified_tokens for s in stats) / max(sum(s.verifies for s in stats), 1), 4
        ),
        "steps": steps,
        "output_tokens": tokens,
        "output_sha256": hashlib.sha256(ids.encode()).hexdigest(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a decode step costs, by batch size.")
    parser.add_argument("--batch", default="1,4,16,32", help="batch sizes, with commas between")
    parser.add_argument("--arrivals", action="store_true", help="measure arriving prompts too")
    parser.add_argument("--overlap", default="once-sync", help="overlap mode (once-sync)")
    parser.add_argument("--model", help="target's folder; the embedded one if absent")
    parser.add_argument("--draft", help="its EAGLE-3 head's")
    parser.add_argument("--threads", type=int, help="of a pass (default: the engine's choice)")
    parser.add_argument("--turns", type=int, default=5, help="rounds of each (default 5)")
    options = parser.parse_args(arguments)
    batches = [int(size) for size in options.batch.split(",") if size]
    if any(not 1 <= size <= SETTINGS["max_running_requests"] for size in batches):
        parser.error(f"--batch: 1 to {SETTINGS['max_running_requests']} requests")
    torch.set_num_threads(options.threads or 1)
    work = {f"batch_{size}": (size, False) for size in batches}
    if options.arrivals:
        work["arrivals"] = (DECODING, True)
    given = {name: getattr(options, name) for name in ("model", "draft", "threads")}
    given = {name: value for name, value in given.items() if value is not None}
    with Engine(overlap=options.overlap, **SETTINGS, **given) as engine:
        for name, (batch, arrivals) in work.items():
            for number in range(options.turns + 1):
                if not sys.stdin.readline():
                    return
                found = answer(engine, batch, arrivals)
                print(json.dumps({name: found} if number else {}), flush=True)


if __name__ == "__main__":
    main()
