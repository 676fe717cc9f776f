"""Tensor parallelism: whether rank 1 ever waits for what rank 0 tells it.

``python -m bench.cluster_ranks [--quick] [--ranks T] [--json PATH] [--seed S] [-- FLAG...]`` runs
JSON extraction under schemas on the embedded model with T ranks, takes rank 1's timeline, and tells
of each step's decision (its mask rows) how long its broadcast took, from when rank 0 began to send
it to when rank 1 had it, and how much of that was *exposed*: after rank 1's verify had ended, so
that it had nothing to do. Clocks are one: all ranks are on this machine.

Fields of the last line, beside those of every record (``bench.common``): ``ranks``, ``steps``,
``decision_ms``, ``exposed_ms``, ``verify_ms`` (of rank 1) and ``step_ms`` (each ``median``,
``least``, ``most``), ``hidden`` (1 - Σ exposed / Σ decision), ``late_steps`` (share of steps with
any exposed time) and ``exposed_share`` (of the time of all steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from bench.common import Run, flags, rounded, spread
from bench.workloads import Ask, json_asks, read_samples
from overlap_spec import Engine, SamplingParams
from overlap_spec.timeline import Span

BATCH, MAX_TOKENS = 4, 96
CHAIN: dict[str, Any] = {"num_steps": 5, "adaptive": "static", "mask_deadline_ms": None}


def waits(spans: Iterable[Span]) -> list[dict[str, float]]:
    """What the decision of each step cost rank 1, in milliseconds, in the order of steps."""
    by_name = {(span.lane, span.name, span.step): span for span in spans}
    steps = sorted(step for lane, name, step in by_name if (lane, name) == ("tell", "decision"))
    found = []
    for before, step in pairwise(steps):
        sent = by_name["tell", "decision", step]
        taken = by_name["rank 1 told", "decision", step]
        verify = by_name.get(("rank 1 compute", "verify", step))
        if verify is None:
            # Dropped before it ran, or prompts alone.
            continue
        idle_ns = max(verify.end_ns, sent.start_ns)
        found.append(
            {
                "decision_ms": (taken.end_ns - sent.start_ns) / 1e6,
                "exposed_ms": max(0, taken.end_ns - idle_ns) / 1e6,
                "verify_ms": (verify.end_ns - verify.start_ns) / 1e6,
                "step_ms": (sent.end_ns - by_name["tell", "decision", before].end_ns) / 1e6,
            }
        )
    return found


def run_asks(engine: Engine, asks: Sequence[Ask]) -> None:
    """Greedy answers, a batch at a time."""
    for start in range(0, len(asks), BATCH):
        some = asks[start : start + BATCH]
        sampling = [SamplingParams(max_tokens=ask.max_tokens, temperature=0.0) for ask in some]
        engine.generate([ask.prompt for ask in some], [ask.grammar for ask in some], sampling)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("cluster_ranks", "Whether rank 1 waits for mask rows.")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    run = Run("cluster_ranks", options, arguments)
    asks = json_asks(read_samples(None), BATCH * (3 if options.quick else 11), MAX_TOKENS)
    Random(options.seed).shuffle(asks)
    with Engine(**CHAIN, tensor_parallel_size=options.ranks, max_running_requests=BATCH) as engine:
        # A cold engine records its passes.
        run_asks(engine, asks[:BATCH])
        engine.gather_spans()
        warm = max(span.step for span in engine.timeline.spans())
        run_asks(engine, asks[BATCH:])
        engine.gather_spans()
        spans = [span for span in engine.timeline.spans() if span.step > warm]
    found = [run.sample(**each) for each in waits(spans)]
    exposed = sum(each["exposed_ms"] for each in found)
    figures = {name: spread(each[name] for each in found) for name in found[0]}
    run.finish(
        len(found),
        ranks=options.ranks,
        steps=len(found),
        **rounded(figures),
        hidden=round(1 - exposed / sum(each["decision_ms"] for each in found), 4),
        late_steps=round(sum(each["exposed_ms"] > 0 for each in found) / len(found), 4),
        exposed_share=round(exposed / sum(each["step_ms"] for each in found), 5),
    )


if __name__ == "__main__":
    main()
