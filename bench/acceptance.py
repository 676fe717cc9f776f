"""Accept lengths of sampled requests, exact and by thresholds, on the embedded model.

``python -m bench.acceptance [--quick] [--json PATH] [--seed S]`` gives each rule an engine with a
chain and one with a tree. Every group of requests, free text and JSON, goes through all of them at
temperature 1 before the next group starts, each time beginning with another one. ``alone`` is the
exact rule with drafts that do not share the target's noise: they are the likeliest tokens, and a
seed's text must be that of ``exact``, else the exit status is 1.

Field of the last line, beside those of every record (``bench.common``):
    rules: Rule → shape (``chain``, ``tree``) → ``accept_length``, ``tokens_per_second``, and
        ``of_alone``: the rate over that of ``alone``, by group (``bench.common.spread``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.table import Table

from bench.common import Run, fail, flags, paired, rounded
from bench.workloads import free_asks
from examples.embedded_model.data import held_out_cases
from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.drafters.eagle3 import Eagle3Drafter
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Tier

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 5},
    "tree": {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16},
}
RULES: dict[str, dict[str, Any]] = {
    "alone": {"algorithm": "bench.acceptance:Alone"},
    "exact": {},
    "threshold 0.5": {"threshold_acc": 0.5},
}
BATCH, TOKENS = 8, 64


class Alone(Eagle3Drafter):
    """Drafts the likeliest tokens, whatever the noise of the target's choices."""

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        return super().draft(roots._replace(temperature=None, seeds=None), tier)


def asks(seed: int, group: int) -> tuple[list[str], list[Grammar | None], list[dict[str, Any]]]:
    """Prompts, grammars and sampling of a group: half free text, half JSON."""
    cases = held_out_cases(seed * 1000 + group, BATCH // 2)
    prompts = [str(ask.prompt) for ask in free_asks(BATCH // 2, TOKENS)]
    prompts += [case.prompt for case in cases]
    grammars = [None] * (BATCH // 2) + [Grammar.json_object()] * (BATCH // 2)
    sampling = [
        {"temperature": 1.0, "seed": (seed * 1000 + group) * BATCH + n, "max_tokens": TOKENS}
        for n in range(BATCH)
    ]
    return prompts, grammars, sampling


def run_groups(engines: dict[tuple[str, str], Engine], groups: int, run: Run) -> None:
    """Run everything and keep the samples; end where ``exact`` and ``alone`` differ."""
    names = list(engines)
    with run.progress() as progress:
        task = progress.add_task("groups", total=groups)
        for group in range(groups):
            turn, said = group % len(names), {}
            for rule, shape in names[turn:] + names[:turn]:
                outputs = engines[rule, shape].generate(*asks(run.options.seed, group))
                said[rule, shape] = [output.token_ids for output in outputs]
                stats = [output.stats for output in outputs]
                run.sample(
                    rule=rule,
                    shape=shape,
                    group=group,
                    seconds=max(s.end_to_end_ms for s in stats) / 1e3,
                    output_tokens=sum(s.output_tokens for s in stats),
                    verified_tokens=sum(s.verified_tokens for s in stats),
                    verifies=sum(s.verifies for s in stats),
                )
            for shape in SHAPES:
                if said["exact", shape] != said["alone", shape]:
                    fail(f"group {group}, {shape}: texts of exact and alone differ")
            progress.advance(task)


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own field, made of the samples."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda s: int(s["group"])):
        rows.setdefault((sample["rule"], sample["shape"]), []).append(sample)
    rates = {
        key: [sample["output_tokens"] / sample["seconds"] for sample in row]
        for key, row in rows.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for (rule, shape), row in sorted(rows.items()):
        verifies = sum(sample["verifies"] for sample in row)
        seconds = sum(sample["seconds"] for sample in row)
        found.setdefault(rule, {})[shape] = {
            "accept_length": sum(sample["verified_tokens"] for sample in row) / verifies,
            "tokens_per_second": sum(sample["output_tokens"] for sample in row) / seconds,
            "of_alone": paired(rates[rule, shape], rates["alone", shape]),
        }
    return {"rules": {rule: found[rule] for rule in RULES if rule in found}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = flags("acceptance", "Accept lengths, exact and by thresholds.")
    options = parser.parse_args(arguments)
    run = Run("acceptance", options, arguments)
    groups = 6 if options.quick else 24
    with ExitStack() as stack:
        engines = {
            (rule, shape): stack.enter_context(Engine(adaptive="static", **form, **settings))
            for rule, settings in RULES.items()
            for shape, form in SHAPES.items()
        }
        run_groups(engines, groups, run)
    record = run.finish(groups, **rounded(summary(run.samples)))
    table = Table(title="Accept length (rate over alone's)", title_justify="left")
    for column in ("rule", *SHAPES):
        table.add_column(column)
    for rule, shapes in record["rules"].items():
        cells = (shapes[shape] for shape in SHAPES)
        table.add_row(
            rule, *(f"{c['accept_length']:.2f} ({c['of_alone']['median']:.2f})" for c in cells)
        )
    run.console.print(table)


if __name__ == "__main__":
    main()
