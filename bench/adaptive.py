"""Adaptive draft lengths against every fixed one, over text and batches that change.

``python -m bench.adaptive [--quick] [--json PATH] [--seed S] [--batch N] [--busy N] [--groups N]
[--policies NAME,...] [--model DIR --draft DIR]`` gives each policy the same work: no drafts, static
chains of 1, 3, 5 and 7 steps, a static tree, the published ``default``, ``adaspec`` and ``auto``.
All of them live through all phases in one engine, which has recorded all their lengths before, as a
server has: two engines of the same settings differ by more than policies do.
Text is easy, hard, and easy; then the batch grows from N (1) to ``--busy`` (16) and falls back;
then the same prompts are answered under their schemas and without. Every group of requests goes
through all policies, in an order drawn anew, before the next group starts: what the machine does to
one policy it does to all. Easy prompts ask for text that stands in the prompt; hard ones hold the
output to a form that no draft foresees. Outputs must be the same under every policy: else the exit
status is 1.

Two clocks. The wall's holds all that the machine did meanwhile. *Equal steps* count each step of a
shape (draft steps, branches, verified rows, trees, prefill beside them) at the median time that
steps of its shape took in that phase, whichever policy drafted them, and what is no step at the
median of the group's: that tells lengths from load.

Fields of the last line, beside those of every record (``bench.common``):
    phases: In their order: ``name``, ``best`` (the fixed tier of most tokens per second),
        ``best_at_equal_steps``, ``policies`` (name → ``tokens_per_second``,
        ``tokens_per_second_at_equal_steps``, ``accept_length``, ``draft_length`` (drafted tokens a
        verify), ``seconds``, ``switches`` so far, ``of_best`` and ``of_best_at_equal_steps`` (the
        rate over the best fixed tier's in that phase, by either clock)).
    worst_of_best, worst_of_best_at_equal_steps: Adaptive policy → least ratio of all phases. The
        published promise of adaptive drafting is 0.97.
    whole, whole_at_equal_steps: Policy → tokens per second of all phases, as many tokens of each.
    whole_over: Adaptive policy → ``over`` (the best of all fixed tiers over the whole), ``ratio``
        of the rates of the whole, at equal steps, and ``interval``, which holds 95% of the ratios
        of the groups drawn again (bootstrap).
    calibration: Policy → ``free`` and ``constrained`` → bins of ``confidence``, ``accepted``
        (share) and ``trials``; of the policies that weigh the drafter's confidence.
    equal: Outputs are the same under all policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

from bench.common import Run, command, fail, flags, positive
from bench.measure import measure
from bench.targets import add_model_flags, model_settings
from bench.turns import Turns, install
from bench.workloads import Ask
from examples.embedded_model.data import held_out_cases
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.speculation.presets import load_policy

# Name → what :func:`load_policy` takes: policy, draft steps, branches, verified rows.
FIXED: dict[str, tuple[str, int, int, int | None]] = {
    "off": ("off", 5, 1, None),
    **{f"static {n}": ("static", n, 1, None) for n in (1, 3, 5, 7)},
    "static tree": ("static", 5, 4, 16),
}
ADAPTIVE = ("default", "adaspec", "auto")
POLICIES = FIXED | {name: (name, 5, 1, None) for name in ADAPTIVE}
# Times that the groups are drawn again.
DRAWS = 1000
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
    engine: Engine, turns: Turns, names: Sequence[str], work: dict[str, list[list[Ask]]], run: Run
) -> Iterator[str]:
    """Run everything and keep the samples; what differs between policies, in words."""
    order = Random(run.options.seed)
    total = sum(len(groups) for groups in work.values())
    with run.progress() as progress:
        task = progress.add_task("groups", total=total)
        for phase, groups in work.items():
            for number, asks in enumerate(groups):
                # Once for all, lest the first policy wait for it.
                for ask in asks:
                    if ask.grammar is not None:
                        engine.compile(ask.grammar)
                said = {}
                for name in order.sample(names, len(names)):
                    turns.take(name)
                    result = measure(engine, asks)
                    said[name] = [output.token_ids for output in result.outputs]
                    switches = turns.snapshot()["switches"]
                    place = {"phase": phase, "policy": name, "group": number}
                    run.sample(**place, **result.raw, switches=switches, ran=turns.steps)
                first = names[0]
                for name in names:
                    if said[name] != said[first]:
                        yield f"{phase}, group {number}: {name} says otherwise than {first}"
                progress.advance(task)


def equal_seconds(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each sample of a phase, had every step of a shape taken the same time."""
    times: dict[tuple[Any, ...], list[float]] = {}
    others: dict[int, list[float]] = {}
    for sample in samples:
        other_ms = sample["seconds"] * 1e3
        for *shape, _, ms in sample["ran"]:
            if ms is not None:
                times.setdefault(tuple(shape), []).append(ms)
                other_ms -= ms
        others.setdefault(sample["group"], []).append(other_ms)
    usual = {shape: median(ms) for shape, ms in times.items()}
    return [
        1e-3
        * (
            median(others[sample["group"]])
            + sum(usual[tuple(shape)] for *shape, _, ms in sample["ran"] if ms is not None)
        )
        for sample in samples
    ]


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    found, draws = [], []
    for phase in dict.fromkeys(sample["phase"] for sample in samples):
        mine = [sample for sample in samples if sample["phase"] == phase]
        rows: dict[str, list[dict[str, Any]]] = {}
        for sample, seconds in zip(mine, equal_seconds(mine), strict=True):
            rows.setdefault(sample["policy"], []).append(sample | {"equal_seconds": seconds})
        rows = {name: rows[name] for name in POLICIES if name in rows}
        for row in rows.values():
            row.sort(key=lambda sample: sample["group"])
        groups = len(next(iter(rows.values())))
        rng = Random(phase)
        drawn = [rng.choices(range(groups), k=groups) for _ in range(DRAWS)]
        rates = {name: _rate(row) for name, row in rows.items()}
        equal = {name: _rate(row, "equal_seconds") for name, row in rows.items()}
        fixed = [name for name in rows if name in FIXED]
        best, equal_best = (max(fixed, key=r.__getitem__) for r in (rates, equal))
        policies = {}
        for name, row in rows.items():
            policies[name] = {
                "tokens_per_second": rates[name],
                "tokens_per_second_at_equal_steps": equal[name],
                "accept_length": _per_verify(row, "verified_tokens"),
                "draft_length": _per_verify(row, "drafted_tokens"),
                "seconds": sum(s["seconds"] for s in row),
                "switches": row[-1]["switches"],
                "of_best": rates[name] / rates[best],
                "of_best_at_equal_steps": equal[name] / equal[equal_best],
            }
        found.append(
            {"name": phase, "best": best, "best_at_equal_steps": equal_best, "policies": policies}
        )
        draws.append(
            {
                name: [_rate([row[g] for g in each], "equal_seconds") for each in drawn]
                for name, row in rows.items()
            }
        )
    names = list(found[0]["policies"])
    adaptive = [name for name in names if name not in FIXED]
    equal = _whole(found, "tokens_per_second_at_equal_steps")
    top = max((name for name in names if name in FIXED), key=equal.__getitem__)
    over = {}
    for name in adaptive:
        ratios = [
            sum(1 / phase[top][n] for phase in draws) / sum(1 / phase[name][n] for phase in draws)
            for n in range(DRAWS)
        ]
        over[name] = {"over": top, "ratio": equal[name] / equal[top], "interval": _middle(ratios)}
    return {
        "phases": found,
        "worst_of_best": _worst(found, adaptive, "of_best"),
        "worst_of_best_at_equal_steps": _worst(found, adaptive, "of_best_at_equal_steps"),
        "whole": _whole(found, "tokens_per_second"),
        "whole_at_equal_steps": equal,
        "whole_over": over,
    }


def _whole(phases: Sequence[dict[str, Any]], field: str) -> dict[str, float]:
    return {
        name: len(phases) / sum(1 / phase["policies"][name][field] for phase in phases)
        for name in phases[0]["policies"]
    }


def _worst(phases: Sequence[dict[str, Any]], names: Sequence[str], field: str) -> dict[str, float]:
    return {name: min(phase["policies"][name][field] for phase in phases) for name in names}


def _middle(ratios: Sequence[float]) -> list[float]:
    """What 95% of them lie between."""
    ordered = sorted(ratios)
    outside = round(0.025 * len(ordered))
    return [ordered[outside], ordered[-1 - outside]]


def _rate(samples: Sequence[dict[str, Any]], clock: str = "seconds") -> float:
    """Output tokens per second of several groups together."""
    seconds = sum(sample[clock] for sample in samples)
    return float(sum(sample["output_tokens"] for sample in samples) / seconds)


def _per_verify(samples: Sequence[dict[str, Any]], name: str) -> float:
    """A count over several groups, over their verifies."""
    verifies = sum(sample["verifies"] for sample in samples)
    return float(sum(sample[name] for sample in samples) / verifies) if verifies else 0.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("adaptive", "Adaptive draft lengths against static ones.")
    add_model_flags(parser)
    parser.add_argument("--batch", type=positive, default=1, help="requests at once (default 1)")
    parser.add_argument("--busy", type=positive, default=16, help="of the busy phase (default 16)")
    parser.add_argument("--groups", type=positive, help="of requests a phase (40; 8 with --quick)")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="which, by name, with commas between"
    )
    options = parser.parse_args(arguments)
    options.policies = [name.strip() for name in options.policies.split(",")]
    unknown = [name for name in options.policies if name not in POLICIES]
    if unknown or not FIXED.keys() & set(options.policies):
        parser.error(f"--policies: of {', '.join(POLICIES)}, and one of the first six at least")
    return options


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    size = replace(size, groups=options.groups or size.groups)
    run = Run("adaptive", options, arguments)
    settings: dict[str, Any] = {
        "adaptive": "auto",
        "num_steps": 5,
        "max_running_requests": max(options.batch, options.busy),
        "mask_deadline_ms": None,
        "prefix_cache": False,
        "context_length": 1024,
    }
    with Engine(**settings, **model_settings(options)) as engine:
        # As a server does before it is ready.
        engine.compiler.warm()
        turns = install(engine, {n: load_policy(*POLICIES[n]) for n in options.policies})
        measure(engine, [Ask("Warm up.", None, 8)])
        work = phases(options.seed, size, options.batch, options.busy)
        wrong = list(run_phases(engine, turns, options.policies, work, run))
        states = turns.states()
    run.finish(
        size.groups,
        **summary(run.samples),
        calibration={n: s["calibration"] for n, s in states.items() if "calibration" in s},
        batch=options.batch,
        busy=options.busy,
        equal=not wrong,
    )
    if wrong:
        fail("outputs are not the same under all policies:\n" + "\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
