"""Adaptive draft lengths against every fixed one, over text and batches that change.

``python -m bench.adaptive [--quick] [--json PATH] [--seed S] [--batch N] [--busy N] [--policies
NAME,...] [--model DIR --draft DIR]`` gives each policy an engine of its own, which lives through
all phases, and has recorded all its lengths before, as a server has: no drafts, static chains of 1,
3, 5 and 7 steps, a static tree, the published ``default``, ``guarded``, ``adaspec`` and ``auto``.
Text is easy, hard, and easy; then the batch grows from N (1) to ``--busy`` (16) and falls back;
then the same prompts are answered under their schemas and without. Every group of requests goes
through all engines, each time beginning with another one, before the next group starts: what the
machine does to one policy it does to all. Easy prompts ask for text that stands in the prompt; hard
ones hold the output to a form that no draft foresees. Outputs must be the same under every policy:
else the exit status is 1.

Fields of the last line, beside those of every record (``bench.common``):
    phases: In their order: ``name``, ``best`` (the fixed tier of most tokens per second),
        ``policies`` (name → ``tokens_per_second``, ``tokens_per_cpu_second`` (the process's, on
        all cores: steadier where other work has the processor), ``accept_length``,
        ``draft_length``, ``seconds``, ``switches`` so far, ``of_best``, ``of_best_spread``):
        ``draft_length`` is drafted tokens a verify, ``of_best`` the rate over the best fixed
        tier's in that phase, and ``of_best_spread`` that of the groups one by one.
    worst_of_best: Adaptive policy → least ``of_best`` of all phases. The published promise of
        adaptive drafting is 0.97.
    whole: Policy → tokens per second of all phases, as many tokens of each.
    calibration: Policy → ``free`` and ``constrained`` → bins of ``confidence``, ``accepted``
        (share) and ``trials``; of the policies that weigh the drafter's confidence.
    equal: Outputs are the same under all policies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import Run, fail, flags, rounded, spread
from bench.measure import measure
from bench.targets import add_model_flags, check_model_flags, model_settings
from bench.workloads import Ask
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.training.data import held_out_cases

STATIC = (1, 3, 5, 7)
TREE = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16}
FIXED: dict[str, dict[str, Any]] = {
    "off": {"adaptive": "off"},
    **{f"static {n}": {"adaptive": "static", "num_steps": n} for n in STATIC},
    "static tree": {"adaptive": "static", **TREE},
}
ADAPTIVE = ("default", "guarded", "adaspec", "auto")
POLICIES = FIXED | {name: {"adaptive": name, "num_steps": 5} for name in ADAPTIVE}
LETTERS = "bcdfghjklmnpqrstvwxz"


@dataclass(frozen=True)
class Size:
    """Groups of requests a phase, and the most tokens of an output."""

    groups: int
    tokens: int


FULL = Size(groups=40, tokens=96)
QUICK = Size(groups=8, tokens=48)


def easy(rng: Random, tokens: int) -> Ask:
    """Text to be said again."""
    case = held_out_cases(rng.randrange(2**31), 1)[0]
    return Ask(f"Repeat: {case.prompt}", None, tokens)


def hard(rng: Random, tokens: int) -> Ask:
    """Codes of a form drawn at random: which letters may follow, no draft head can know."""
    classes = ("".join(sorted(rng.sample(LETTERS, 6))) for _ in range(tokens))
    pattern = "".join(f"[{letters}]{{1,2}}[0-9]" for letters in classes)
    return Ask("Write a code.", Grammar.regex(pattern), tokens)


def constrained(rng: Random, tokens: int) -> Ask:
    """JSON under a schema that the prompt says nothing of."""
    case = held_out_cases(rng.randrange(2**31), 1)[0]
    return Ask(case.prompt, Grammar.json_schema(case.schema), tokens)


def free(rng: Random, tokens: int) -> Ask:
    """The same prompts as those of :func:`constrained`, answered as the model likes."""
    return replace(constrained(rng, tokens), grammar=None)


# Name → its text, whether the batch is large, and what its prompts are drawn by.
PHASES = {
    "easy": (easy, False, "easy"),
    "hard": (hard, False, "hard"),
    "easy again": (easy, False, "easy again"),
    "busy": (easy, True, "busy"),
    "alone again": (easy, False, "alone again"),
    "constrained": (constrained, False, "json"),
    "free": (free, False, "json"),
}


def phases(seed: int, size: Size, batch: int, busy: int) -> dict[str, list[list[Ask]]]:
    """Name → groups of ``batch`` requests, or of ``busy``."""
    made = {}
    for name, (make, is_busy, prompts) in PHASES.items():
        rng = Random(f"{seed} {prompts}")
        count = busy if is_busy else batch
        # As many tokens in all, as far as whole groups go.
        groups = max(2, size.groups * batch // count)
        made[name] = [[make(rng, size.tokens) for _ in range(count)] for _ in range(groups)]
    return made


def run_phases(
    engines: dict[str, Engine], work: dict[str, list[list[Ask]]], run: Run
) -> Iterator[str]:
    """Run everything and keep the samples; what differs between policies, in words."""
    names = list(engines)
    total = sum(len(groups) for groups in work.values())
    with run.progress() as progress:
        task = progress.add_task("groups", total=total)
        for phase, groups in work.items():
            for number, asks in enumerate(groups):
                # Once for all, lest the first policy wait for it.
                for ask in asks:
                    if ask.grammar is not None:
                        engines[names[0]].compile(ask.grammar)
                turn = number % len(names)
                said = {}
                for name in names[turn:] + names[:turn]:
                    cpu_start = time.process_time()
                    result = measure(engines[name], asks)
                    cpu_seconds = time.process_time() - cpu_start
                    said[name] = [output.token_ids for output in result.outputs]
                    state = engines[name].snapshot()["speculation"]
                    raw = result.raw() | {"switches": state["switches"], "cpu_seconds": cpu_seconds}
                    run.sample(phase=phase, policy=name, group=number, **raw)
                first = names[0]
                for name in names:
                    if said[name] != said[first]:
                        yield f"{phase}, group {number}: {name} says otherwise than {first}"
                progress.advance(task)


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    found = []
    for phase in dict.fromkeys(sample["phase"] for sample in samples):
        rows: dict[str, list[dict[str, Any]]] = {}
        for sample in samples:
            if sample["phase"] == phase:
                rows.setdefault(sample["policy"], []).append(sample)
        rates = {name: _rate(row) for name, row in rows.items()}
        best = max((name for name in rows if name in FIXED), key=rates.__getitem__)
        policies = {
            name: {
                "tokens_per_second": rates[name],
                "tokens_per_cpu_second": _rate(row, "cpu_seconds")
                if "cpu_seconds" in row[0]
                else None,
                "accept_length": _per_verify(row, "verified_tokens"),
                "draft_length": _per_verify(row, "drafted_tokens"),
                "seconds": sum(s["seconds"] for s in row),
                "switches": row[-1]["switches"],
                "of_best": rates[name] / rates[best],
                "of_best_spread": spread(
                    _rate([mine]) / _rate([other])
                    for mine, other in zip(row, rows[best], strict=True)
                ),
            }
            for name, row in rows.items()
        }
        found.append({"name": phase, "best": best, "policies": policies})
    names = list(found[0]["policies"])
    worst = {
        name: min(p["policies"][name]["of_best"] for p in found)
        for name in names
        if name not in FIXED
    }
    whole = {
        name: len(found) / sum(1 / p["policies"][name]["tokens_per_second"] for p in found)
        for name in names
    }
    return {"phases": found, "worst_of_best": worst, "whole": whole}


def _rate(samples: Sequence[dict[str, Any]], clock: str = "seconds") -> float:
    """Output tokens per second of several groups together."""
    seconds = sum(sample[clock] for sample in samples)
    return float(sum(sample["output_tokens"] for sample in samples) / seconds)


def _per_verify(samples: Sequence[dict[str, Any]], name: str) -> float:
    """A count over several groups, over their verifies."""
    verifies = sum(sample["verifies"] for sample in samples)
    return float(sum(sample[name] for sample in samples) / verifies) if verifies else 0.0


def print_table(record: dict[str, Any], console: Console) -> None:
    """What a reader sees: rate, share of the best static tier and accept length by phase."""
    title = "Tokens per second (share of the best fixed tier), accept / draft length"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for phase in record["phases"]:
        table.add_column(phase["name"], justify="right")
    table.add_column("whole", justify="right")
    for name in record["phases"][0]["policies"]:
        cells = []
        for phase in record["phases"]:
            figures, mark = phase["policies"][name], "*" if phase["best"] == name else ""
            rate, share = figures["tokens_per_second"], figures["of_best"]
            lengths = f"{figures['accept_length']:.2f} / {figures['draft_length']:.2f}"
            cells.append(f"{rate:.1f} ({share:.3f}){mark} {lengths}")
        table.add_row(name, *cells, f"{record['whole'][name]:.1f}")
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("adaptive", "Adaptive draft lengths against static ones.")
    add_model_flags(parser)
    parser.add_argument("--batch", type=int, default=1, help="requests at once (default 1)")
    parser.add_argument("--busy", type=int, default=16, help="of the busy phase (default 16)")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="which, by name, with commas between"
    )
    options = parser.parse_args(arguments)
    options.policies = [name.strip() for name in options.policies.split(",")]
    unknown = [name for name in options.policies if name not in POLICIES]
    if unknown or not FIXED.keys() & set(options.policies):
        parser.error(f"--policies: of {', '.join(POLICIES)}, and one of the first six at least")
    check_model_flags(parser, options)
    if min(options.batch, options.busy) < 1:
        parser.error("--batch and --busy must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    run = Run("adaptive", options, arguments)
    settings: dict[str, Any] = {
        "mask_deadline_ms": None,
        "prefix_cache": False,
        "context_length": 1024,
    }
    try:
        settings |= model_settings(options, run.console)
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    Engine(
                        max_running_requests=max(options.batch, options.busy),
                        **settings,
                        **POLICIES[name],
                    )
                )
                for name in options.policies
            }
            for engine in engines.values():
                engine.compiler = engines[options.policies[0]].compiler
                # As a server does before it is ready.
                engine.compiler.warm()
                while engine.prepare_next():
                    pass
                measure(engine, [Ask("Warm up.", None, 8)])
            work = phases(options.seed, size, options.batch, options.busy)
            wrong = list(run_phases(engines, work, run))
            states = {name: e.snapshot()["speculation"] for name, e in engines.items()}
            calibration = {n: s["calibration"] for n, s in states.items() if "calibration" in s}
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    record = summary(run.samples)
    print_table(record, Console(width=150))
    run.finish(
        size.groups,
        **rounded(record | {"calibration": calibration}),
        batch=options.batch,
        busy=options.busy,
        equal=not wrong,
    )
    if wrong:
        fail("outputs are not the same under all policies:\n" + "\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
