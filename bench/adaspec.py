"""The figures of AdaSpec's paper (SoCC 2025) that say why lengths must adapt, simulated.

``python -m bench.adaspec [--figure N …] [--quick] [--json PATH] [--seed S]`` makes the data of
figures 3, 4, 5, 8, 9 and 13, or of those that are named, on the machines, drafters and traces of
:mod:`bench.traces`: formulas; no model runs. Figures 10 and 11 and table 2 are ``bench.traces``,
figure 7 is the calibration of ``bench.adaptive``.

Fields of the last line, beside those of every record (``bench.common``), of the figures that were
asked for:
    figure_3: Batch → kind of request → speedup of a chain of 1, 2 … drafts over none (7B, A100).
    figure_4: Machine → the same at batch 16.
    figure_5: Trace → for chains of 1, 2 … drafts ``speedup`` of mean end-to-end latency and
        ``attainment`` (share of requests that keep the P90 TPOT of plain decoding).
    figure_8: For chains of 1, 2 … drafts the tokens of a verify: ``actual``, ``by_drafts`` (by what
        the drafter said of each draft: Eq. 7) and ``by_request`` (by the request's mean confidence,
        before it drafts).
    figure_9: ``prompt`` and ``output``: deciles of lengths in tokens.
    figure_13: Trace → policy → a row for each five seconds: seconds, mean batch, mean drafts of a
        verify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common import Run, flags, mean, percentile
from bench.simulated import rates_of, tokens_of
from bench.traces import (
    ACCEPTANCE,
    ACCEPTANCE_SPREAD,
    MACHINES,
    POLICIES,
    SURE,
    Served,
    play,
    requests_of,
    serve,
)
from overlap_spec.speculation.adaspec import Confidences
from overlap_spec.speculation.cost import shape_of
from overlap_spec.speculation.policy import (
    RequestOutcome,
    RequestView,
    StepOutcome,
    StepView,
    static_tier,
)
from overlap_spec.speculation.presets import load_policy
from overlap_spec.tiers import Budget

A100 = "7B, 68M, A100"
LENGTHS = range(1, 9)
BATCHES = (1, 64, 128)
# Kinds of requests by how well they are drafted, as the paper's figure 3 orders them.
KINDS = {"retrieval": 0.75, "mathematics": 0.6, "questions": 0.45}
TRACES = ("bursty", "periodic")
SHOWN = ("static 3", "threshold", "adaspec")
CONTEXT, WINDOW_MS = 512, 5000.0


def speedups(machine: str, batch: int, acceptance: float) -> list[float]:
    """Tokens a second of chains over those of plain decoding."""

    def rate(steps: int) -> float:
        tier = static_tier(steps, 1, None)
        shape = shape_of(Budget(tier), batch, batch * CONTEXT)
        return tokens_of(acceptance, tier) / MACHINES[machine].step_ms(shape)

    return [rate(steps) / rate(0) for steps in LENGTHS]


def figure_3(count: int, seed: int) -> dict[str, Any]:  # noqa: ARG001
    """The best length by load and kind of request."""
    return {
        str(batch): {kind: speedups(A100, batch, rate) for kind, rate in KINDS.items()}
        for batch in BATCHES
    }


def figure_4(count: int, seed: int) -> dict[str, Any]:  # noqa: ARG001
    """The best length by machine."""
    return {machine: speedups(machine, 16, ACCEPTANCE) for machine in MACHINES}


def figure_5(count: int, seed: int) -> dict[str, Any]:
    """What longer drafts gain, and the targets that they break."""
    found = {}
    for kind in TRACES:
        off = play("off", MACHINES[A100], kind, count, seed)
        slo_ms = percentile(off.tpot_ms, 90)
        rows = []
        for steps in LENGTHS:
            asked = requests_of(kind, MACHINES[A100], count, seed, None)
            policy = load_policy("static", steps, 1, None)
            run = serve(policy, MACHINES[A100], asked, seed, None)
            kept = mean(ms <= slo_ms for ms in run.tpot_ms)
            rows.append({"speedup": off.latency_ms / run.latency_ms, "attainment": kept})
        found[kind] = rows
    return found


def figure_8(count: int, seed: int) -> list[dict[str, float]]:
    """Tokens of a verify, and what two estimates made of them before."""
    found = []
    for steps in LENGTHS:
        rng = np.random.default_rng(seed)
        acceptances = np.clip(rng.normal(ACCEPTANCE, ACCEPTANCE_SPREAD, count), 0.1, 0.95)
        tier, known = static_tier(steps, 1, None), Confidences()
        tokens: dict[str, list[float]] = {"actual": [], "by_drafts": [], "by_request": []}
        for number, rate in enumerate(acceptances.tolist()):
            view = StepView((RequestView(number, CONTEXT),))
            for _ in range(20):
                rates = np.array(rates_of(rate, tier))
                said = rng.beta(SURE * rates + 1e-3, SURE * (1 - rates) + 1e-3)
                accepted = int((rng.random(steps) < said).cumprod().sum())
                (mean_said,) = known.of(view)
                tokens["actual"].append(1 + accepted)
                tokens["by_drafts"].append(1 + float(said.cumprod().sum()))
                tokens["by_request"].append(1 + sum(mean_said ** (d + 1) for d in range(steps)))
                seen = tuple(said[: accepted + 1].tolist())
                outcome = RequestOutcome(number, accepted, steps, False, seen)
                known.observe(StepOutcome(view, Budget(tier), [outcome]))
        found.append({"steps": float(steps)} | {name: mean(each) for name, each in tokens.items()})
    return found


def figure_9(count: int, seed: int) -> dict[str, list[float]]:
    """How long prompts and outputs are."""
    asked = requests_of("bursty", MACHINES[A100], max(count, 480), seed, None)
    return {
        name: [
            percentile([float(getattr(r, name)) for r in asked], share)
            for share in range(0, 101, 10)
        ]
        for name in ("prompt", "output")
    }


def windows(run: Served) -> list[list[float]]:
    """Rows of figure 13."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for start_ms, trees, drafts in run.steps:
        rows.setdefault(int(start_ms // WINDOW_MS), []).append((trees, drafts))
    return [
        [at * WINDOW_MS / 1e3, mean(trees for trees, _ in row),
         sum(drafts for _, drafts in row) / sum(trees for trees, _ in row)]
        for at, row in sorted(rows.items())
    ]  # fmt: skip


def figure_13(count: int, seed: int) -> dict[str, Any]:
    """Batches and lengths over a trace's time."""
    return {
        kind: {name: windows(play(name, MACHINES[A100], kind, count, seed)) for name in SHOWN}
        for kind in TRACES
    }


FIGURES: dict[int, Callable[[int, int], Any]] = {
    3: figure_3, 4: figure_4, 5: figure_5, 8: figure_8, 9: figure_9, 13: figure_13,
}  # fmt: skip
assert set(SHOWN) <= set(POLICIES)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("adaspec", "Figures of AdaSpec's paper, simulated.")
    parser.add_argument("--figure", type=int, action="append", choices=FIGURES, help="this alone")
    options = parser.parse_args(arguments)
    run = Run("adaspec", options, arguments)
    count = 40 if options.quick else 300
    for number in options.figure or FIGURES:
        run.sample(figure=number, data=FIGURES[number](count, options.seed))
    run.finish(1, **{f"figure_{s['figure']}": s["data"] for s in run.samples})


if __name__ == "__main__":
    main()
