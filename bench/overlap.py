"""What hiding the grammar's work is worth: the three overlap modes, in one run on one machine.

``python -m bench.overlap [--quick] [--json PATH] [--seed S] [--model DIR --draft DIR] [--data
FILE]`` runs the same requests in the modes ``none``, ``double-sync`` and ``once-sync`` in turn,
first four kinds of traffic, then batches of 1 to 32, and prints a table of each. By default the
target is the embedded model padded to 131,072 tokens (``bench.targets``) and the schemas are drawn
from JSONSchemaBench where it is available (``bench.workloads``). ``--batches 1,4 [--max-tokens N]``
runs these batches alone, ``--modes`` these modes, ``--repetitions`` as often.

The modes differ in nothing else: one static tier, no deadline for masks, all requests submitted
before the first step, ``--threads`` (default 1) for torch's own operations, greedy, the same
compiled grammars. A round of everything goes first and is not counted. Modes are compared pair by
pair, each with the ``none`` of its repetition; which of them begins changes with every repetition.
Outputs and accept lengths must be the same in all modes: else it is told, and in float32 the exit
status is 1 (elsewhere two tokens may be as close as sums in another order are).

Fields of the last line, beside those of every record (``bench.common``):
    modes: Mode → figures at batch 4 (else at the first batch), as in ``overlap_spec.types`` and
        ``bench.measure``: medians over the repetitions. ``grammar_ms``, ``exposed_ms`` and
        ``step_ms`` are means over steps; ``hidden_fraction`` is over all steps of all repetitions.
    rows: Kind of traffic → ``modes`` as above, and spreads of ``ratio_seconds`` and ``ratio_tpot``
        (mode → pair by pair). *JSON union* has costly masks.
    batches: Batch size → the same.
    schemas: Which schemas were drawn.
    equal: Outputs and accept lengths are the same in all modes.
    threads: Of a pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.common import Run, command, fail, flags, median, paired, positive, sizes, spread
from bench.measure import measure
from bench.targets import add_model_flags, model_settings, padded_target, work_folder
from bench.workloads import (
    Ask,
    Sample,
    choose_samples,
    json_asks,
    mixed_asks,
    read_samples,
    union_asks,
)
from overlap_spec.config import OVERLAP_MODES
from overlap_spec.engine import Engine
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.spec import Grammar

MODES = tuple(reversed(OVERLAP_MODES))
JUDGED = "batch 4"
SETTINGS: dict[str, Any] = {
    "adaptive": "static",
    # Whose masks cost enough to be worth hiding.
    "grammar_backend": "xgrammar",
    "mask_deadline_ms": None,
    # A prompt must cost the same each time that it comes.
    "prefix_cache": False,
    "max_running_requests": 32,
    "context_length": 1024,
    # All prompts in the first step: requests then run, and end, side by side.
    "chunked_prefill_size": 8192,
}


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        schemas: Schemas that are drawn.
        long, short: Most tokens of an output.
        batches: Batch size → most tokens of an output.
        repeats: Name of a workload, or ``else`` → repetitions in each mode.
        kinds: Whether the kinds of traffic are run, too.
    """

    schemas: int
    long: int
    short: int
    batches: dict[int, int]
    repeats: dict[str, int]
    kinds: bool = True

    def repetitions(self, workload: str) -> int:
        """How often a workload is run in each mode."""
        return self.repeats.get(workload, self.repeats["else"])

    @property
    def most_requests(self) -> int:
        """At once, in any workload."""
        return max([8 * self.kinds, *self.batches])


FULL = Size(16, 160, 32, {1: 96, 4: 96, 16: 96, 32: 96}, {JUDGED: 9, "JSON union": 9, "else": 5})
QUICK = Size(
    8, 20, 10, {1: 20, 4: 20, 16: 12, 32: 10}, {JUDGED: 3, "JSON union": 3, "else": 1}
)  # fmt: skip

Samples = Sequence[dict[str, Any]]
ByMode = dict[str, list[dict[str, Any]]]


def workloads(samples: Sequence[Sample], size: Size) -> dict[str, list[Ask]]:
    """Name → requests: the kinds of traffic, then the batches."""
    kinds = {
        "JSON generate": json_asks(samples, 4, size.long),
        "JSON OpenAI": json_asks(samples, 4, size.short, chat=True),
        "mixed concurrent": mixed_asks(samples, 8, size.short),
        "JSON union": union_asks(4, size.long),
    }
    batches = {f"batch {n}": json_asks(samples, n, most) for n, most in size.batches.items()}
    return kinds | batches if size.kinds else batches


def open_engines(
    stack: ExitStack, weights: dict[str, str], modes: Sequence[str] = MODES, **settings: Any
) -> dict[str, Engine]:
    """An engine for each mode, with one cache of compiled grammars for all."""
    engines: dict[str, Engine] = {}
    for mode in modes:
        engine = stack.enter_context(Engine(**weights, overlap=mode, **SETTINGS | settings))
        engines[mode] = engine
        engine.compiler = next(iter(engines.values())).compiler
    return engines


def accepts(engine: Engine, grammar: Grammar) -> bool:
    """Whether the engine's grammar room takes ``grammar``."""
    try:
        engine.compiler.compile(grammar)
    except GrammarError:
        return False
    return True


def measure_all(
    engines: dict[str, Engine], work: dict[str, list[Ask]], size: Size, run: Run
) -> None:
    """Every workload in every mode, in turn, after a round that is not counted.

    The mode that begins changes with every repetition.
    """
    modes = tuple(engines)
    total = (1 + sum(size.repetitions(name) for name in work)) * len(engines)
    with run.progress() as progress:
        task = progress.add_task("warm-up", total=total)
        largest = max(work.values(), key=len)
        for engine in engines.values():
            measure(engine, [Ask(a.prompt, a.grammar, 2) for a in largest])
            progress.advance(task)
        for name, asks in work.items():
            for repetition in range(size.repetitions(name)):
                turn = repetition % len(engines)
                for mode in (*modes[turn:], *modes[:turn]):
                    engine = engines[mode]
                    progress.update(task, description=f"{name}, {mode}")
                    progress.advance(task)
                    raw = measure(engine, asks).raw
                    run.sample(workload=name, mode=mode, repetition=repetition, **raw)


def differences(samples: Samples) -> list[str]:
    """Workloads whose outputs or accept lengths are not the same in all modes and repetitions."""
    said: dict[str, dict[tuple[str, float], list[str]]] = {}
    for sample in samples:
        figures = sample["output_sha256"], sample["accept_length"]
        found = said.setdefault(sample["workload"], {}).setdefault(figures, [])
        found.append(f"{sample['mode']} {sample['repetition']}")
    return [
        f"{name}: one output in {', the other in '.join(map(str, by.values()))}"
        for name, by in said.items()
        if len(by) > 1
    ]


def summary(samples: Samples) -> dict[str, Any]:
    """The record's own fields, made of the samples alone."""
    rows: dict[str, Any] = {}
    batches: dict[str, Any] = {}
    for name, by_mode in group(samples).items():
        entry = {
            "modes": {mode: figures(of_mode) for mode, of_mode in by_mode.items()},
            "ratio_seconds": ratios(by_mode, "seconds"),
            "ratio_tpot": ratios(by_mode, "tpot_ms"),
        }
        (batches if name.startswith("batch ") else rows)[name] = entry
    judged = batches.get(JUDGED) or next(iter(batches.values()))
    return {
        "modes": judged["modes"],
        "rows": rows,
        "batches": {name.removeprefix("batch "): entry for name, entry in batches.items()},
    }


def group(samples: Samples) -> dict[str, ByMode]:
    """Workload → mode → its samples in the order of their repetitions."""
    modes = [mode for mode in MODES if any(sample["mode"] == mode for sample in samples)]
    grouped: dict[str, ByMode] = {}
    for sample in samples:
        by_mode = grouped.setdefault(sample["workload"], {mode: [] for mode in modes})
        by_mode[sample["mode"]].append(sample)
    return grouped


def figures(samples: Samples) -> dict[str, Any]:
    """One mode's figures at one workload: medians over the repetitions."""
    names = ("tpot_ms", "step_ms", "grammar_ms", "exposed_ms", "grammar_share", "seconds")
    grammar_ms = sum(s["grammar_ms"] * s["steps"] for s in samples)
    exposed_ms = sum(s["exposed_ms"] * s["steps"] for s in samples)
    return {
        **{name: median(s[name] for s in samples) for name in names},
        "hidden_fraction": max(0.0, 1 - exposed_ms / grammar_ms) if grammar_ms else None,
        "ttft_ms": median(ms for s in samples for ms in s["ttft_ms"]),
        "accept_length": samples[0]["accept_length"],
        "output_tokens": samples[0]["output_tokens"],
        "output_sha256": samples[0]["output_sha256"],
        "tpot_ms_spread": spread(s["tpot_ms"] for s in samples),
    }


def ratios(by_mode: ByMode, name: str) -> dict[str, dict[str, float]]:
    """Mode → spread of a figure's ratio to ``none``, pair by pair."""
    values = {mode: [s[name] for s in of_mode] for mode, of_mode in by_mode.items()}
    return {mode: paired(values[mode], values["none"]) for mode in values if mode != "none"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("overlap", "The three overlap modes side by side.")
    add_model_flags(parser, "the padded embedded one")
    parser.add_argument("--data", type=Path, help="schemas, as rows of JSONSchemaBench")
    parser.add_argument("--threads", type=positive, default=1, help="of a pass (default 1)")
    parser.add_argument("--batches", type=sizes, help="these alone, with commas between")
    parser.add_argument("--max-tokens", type=positive, help="of an output, with --batches")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="these beside none")
    parser.add_argument("--repetitions", type=positive, help="of everything")
    options = parser.parse_args(arguments)
    if options.max_tokens is not None and not options.batches:
        parser.error("--max-tokens needs --batches")
    return options


def chosen_size(options: argparse.Namespace) -> Size:
    """How much the command line asks for."""
    size = QUICK if options.quick else FULL
    if options.batches:
        most = options.max_tokens or size.long
        size = replace(size, batches=dict.fromkeys(options.batches, most), kinds=False)
    if options.repetitions is not None:
        size = replace(size, repeats={"else": options.repetitions})
    return size


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    size = chosen_size(options)
    run = Run("overlap", options, arguments)
    torch.set_num_threads(options.threads)
    weights = model_settings(options)
    if not weights:
        target, head = padded_target(work_folder(options.work))
        weights = {"model": str(target), "draft": str(head)}
    with ExitStack() as stack:
        modes = [m for m in MODES if m == "none" or m in (options.modes or MODES)]
        settings = {"threads": options.threads, "max_running_requests": size.most_requests}
        engines = open_engines(stack, weights, modes, **settings)
        first = engines["none"]
        samples = choose_samples(
            read_samples(options.data),
            size.schemas,
            options.seed,
            lambda grammar: accepts(first, grammar),
        )
        measure_all(engines, workloads(samples, size), size, run)
        vocabulary = first.tokenizer.vocab_size
        exact = first.core.worker.runner.pool.k.dtype is torch.float32
    wrong = differences(run.samples)
    run.finish(
        size.repetitions(JUDGED),
        **summary(run.samples),
        schemas=[sample.id for sample in samples],
        vocabulary=vocabulary,
        equal=not wrong,
        threads=options.threads,
    )
    if wrong:
        told = "outputs are not the same in all modes:\n" + "\n".join(wrong[:10])
        if exact:
            fail(told)
        print(told, file=sys.stderr)


if __name__ == "__main__":
    main()
