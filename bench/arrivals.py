"""Decoding while new prompts arrive: what a prompt costs the requests that are under way.

``python -m bench.arrivals [--quick] [--json PATH] [--seed S]`` decodes four requests for JSON under
schemas. In every other round, a new prompt is submitted before every fifth step and decodes a few
tokens. Steps are driven by hand, and the rounds ask the same, so that only times vary. A round of
each kind goes first and is not counted. It fails (exit status 1) where a round's outputs differ.

Fields of the last line, beside those of every record (``bench.common``):
    tpot_ms: Of ``alone`` and ``arrivals``: spread over rounds of the mean over the four requests of
        (end-to-end - TTFT) / (tokens - 1).
    ratio: Spread of ``arrivals`` over ``alone``, of rounds that follow one another.
    accept_length: Tokens that a verify emitted, of the four requests.
    steps, arrived: Of a round with arrivals.
    equal: The four outputs are the same in all rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.common import Run, fail, flags, paired, rounded, spread
from bench.step_cost import ARRIVES_EVERY, DECODING, SETTINGS, answer
from overlap_spec import Engine

KINDS = {"alone": False, "arrivals": True}
FULL_ROUNDS, QUICK_ROUNDS = 40, 5


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    tpot = {kind: [s["tpot_ms"] for s in samples if s["kind"] == kind] for kind in KINDS}
    last = next(s for s in samples if s["kind"] == "arrivals")
    return {
        "tpot_ms": {kind: spread(values) for kind, values in tpot.items()},
        "ratio": paired(tpot["arrivals"], tpot["alone"]),
        "accept_length": last["accept_length"],
        "steps": last["steps"],
        "arrived": last["steps"] // ARRIVES_EVERY,
        "equal": len({s["output_sha256"] for s in samples}) == 1,
    }


def print_table(record: dict[str, Any]) -> None:
    """The figures of both kinds of rounds."""
    table = Table("rounds", "TPOT (ms)", "least to most")
    for kind, figures in record["tpot_ms"].items():
        between = f"{figures['min']:.3f} to {figures['max']:.3f}"
        table.add_row(kind, f"{figures['median']:.3f}", between)
    Console(width=100).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("arrivals", "Decoding while new prompts arrive.")
    options = parser.parse_args(arguments)
    run = Run("arrivals", options, arguments)
    torch.set_num_threads(1)
    repetitions = QUICK_ROUNDS if options.quick else FULL_ROUNDS
    with Engine(**SETTINGS) as engine, run.progress() as progress:
        task = progress.add_task("rounds", total=repetitions * len(KINDS))
        for arrivals in KINDS.values():
            answer(engine, DECODING, arrivals)
        for repetition in range(repetitions):
            for kind, arrivals in KINDS.items():
                one = answer(engine, DECODING, arrivals)
                run.sample(
                    kind=kind,
                    repetition=repetition,
                    tpot_ms=one.tpot_ms,
                    accept_length=one.accept_length,
                    steps=one.steps,
                    output_sha256=one.output_sha256,
                )
                progress.advance(task)
    record = rounded(summary(run.samples))
    print_table(record)
    run.finish(repetitions, **record)
    if not record["equal"]:
        fail("outputs are not the same in all rounds")


if __name__ == "__main__":
    main()
