"""The benchmarks' own rules: records, figures, and that their checks check."""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import adaptive, overlap, traces
from bench.common import (
    Run,
    flags,
    mean,
    median,
    paired,
    percentile,
    rounded,
    samples_path,
    spread,
    strict_json,
)
from bench.measure import measure
from bench.overlap import MODES, summary
from bench.turns import Turns
from bench.workloads import OWN_SCHEMAS, Ask
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.speculation.online_cost import OnlineCost
from overlap_spec.speculation.policy import RequestOutcome, RequestView, StepOutcome, StepView
from overlap_spec.speculation.presets import load_policy
from tests.support.checkpoints import write_head, write_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random checkpoints as Engine settings, with room for prompts of one token a byte."""
    folder = tmp_path_factory.mktemp("bench")
    write_target(folder / "target", max_position_embeddings=1024)
    write_head(folder / "eagle3", max_position_embeddings=1024)
    return {"model": str(folder / "target"), "draft": str(folder / "eagle3")}


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The record: strict JSON in the last line of standard output."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    record: dict[str, Any] = json.loads(
        capsys.readouterr().out.splitlines()[-1], parse_constant=refuse
    )
    return record


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 0, 3.0),
        ([3.0], 100, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 95, 4.8),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 100, 5.0),
    ],
)
def test_percentiles_are_linear_between_neighbours(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_figures_of_nothing_are_errors() -> None:
    for figure in (median, mean, spread):
        with pytest.raises(ValueError, match=r"of|empty|at least one"):
            figure([])
    with pytest.raises(ValueError, match="percentile 101"):
        percentile([1.0], 101)
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 2.0], [1.0])


def test_pairs_cancel_what_both_suffer() -> None:
    slow = [1.0, 10.0, 2.0]
    assert paired([0.8 * x for x in slow], slow) == pytest.approx(
        {"median": 0.8, "min": 0.8, "max": 0.8, "n": 3}
    )


def test_rounding_keeps_significant_digits() -> None:
    assert rounded({"a": [123456.789, 0.0, -1.23456789e-9], "b": (1, "x", None)}, 3) == {
        "a": [123000.0, 0.0, -1.23e-9],
        "b": [1, "x", None],
    }
    assert math.isnan(rounded(float("nan")))


def test_record_and_its_raw_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "out.json"
    arguments = ["--quick", "--json", str(path), "--seed", "7"]
    run = Run("thing", flags("thing", "A thing.").parse_args(arguments), arguments)
    for value in (1.5, 2.5):
        run.sample(milliseconds=value)
    record = run.finish(2, milliseconds=spread([1.5, 2.5]))
    assert last_line(capsys) == record == json.loads(path.read_text())
    raw = [json.loads(line) for line in samples_path(path).read_text().splitlines()]
    assert spread(row["milliseconds"] for row in raw) == record["milliseconds"]
    assert record["bench"] == "thing"
    assert (record["quick"], record["seed"]) == (True, 7)
    assert (record["repetitions"], record["samples"]) == (2, 2)
    assert record["command"] == "python -m bench.thing --quick --json out.json --seed 7"
    assert {"cpu", "cores", "memory_gib", "load_1m", "device"} <= record["machine"].keys()
    assert record["versions"]["torch"] == torch.__version__
    assert record["commit"] is None or isinstance(record["commit"], str)


def test_a_record_holds_finite_numbers_only() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        strict_json({"x": float("inf")})
    run = Run("thing", Namespace(quick=False, seed=0, json=None), [])
    with pytest.raises(ValueError, match="JSON compliant"):
        run.finish(1, figure=float("nan"))


def test_measuring_one_workload(tiny: dict[str, str]) -> None:
    asks = [Ask("hello", None, 6), Ask("world", Grammar.json_object(), 9)]
    with Engine(overlap="none", device="cpu", **tiny) as engine:
        outputs, first = measure(engine, asks)
        again = measure(engine, asks).raw
    assert all(o.stats.output_tokens <= a.max_tokens for o, a in zip(outputs, asks, strict=True))
    assert first["output_sha256"] == again["output_sha256"]
    assert first["steps"] == again["steps"] > 1
    assert first["grammar_ms"] > 0
    assert 0 < first["grammar_share"] < 1
    assert 0 <= first["hidden_fraction"] <= 1
    strict_json(first)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the overlap benchmark run a handful of requests."""
    size = overlap.Size(3, 6, 4, {1: 5, 4: 5}, {"batch 4": 2, "else": 1})
    monkeypatch.setattr(overlap, "QUICK", size)


@pytest.mark.ci
def test_overlap_ends_in_its_record(
    tiny: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small(monkeypatch)
    path = tmp_path / "overlap.json"
    overlap.main(
        ["--quick", "--model", tiny["model"], "--draft", tiny["draft"], "--data",
         str(OWN_SCHEMAS), "--json", str(path)]
    )  # fmt: skip
    record = last_line(capsys)
    assert record["modes"].keys() == set(MODES)
    assert record["equal"] is True
    assert record["batches"].keys() == {"1", "4"}
    raw = [json.loads(line) for line in samples_path(path).read_text().splitlines()]
    assert len(raw) == record["samples"] == 3 * (4 + 1 + 2)
    again = rounded(summary(raw))
    assert {name: record[name] for name in again} == again


def test_a_mode_that_says_something_else_is_told() -> None:
    samples = [
        {"workload": work, "mode": mode, "repetition": 0, "output_sha256": text, "accept_length": n}
        for work, mode, text, n in (
            ("batch 1", "none", "a", 2.0), ("batch 1", "once-sync", "a", 2.0),
            ("batch 4", "none", "a", 2.0), ("batch 4", "double-sync", "b", 2.0),
            ("batch 16", "none", "a", 2.0), ("batch 16", "once-sync", "a", 1.0),
        )
    ]  # fmt: skip
    told = overlap.differences(samples)
    assert [line.partition(":")[0] for line in told] == ["batch 4", "batch 16"]
    assert "double-sync 0" in told[0]


@pytest.mark.ci
def test_adaptive_ends_in_its_record(
    tiny: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(adaptive, "QUICK", adaptive.Size(groups=2, tokens=6))
    # By the clock, drafts might never pay here.
    monkeypatch.setattr(OnlineCost, "step_ms", lambda *_: 1.0)
    names = ["off", "static 7", "static tree", "adaspec", "auto"]
    path = tmp_path / "adaptive.json"
    adaptive.main(
        ["--quick", "--model", tiny["model"], "--draft", tiny["draft"], "--batch", "2", "--busy",
         "3", "--policies", ",".join(names), "--json", str(path)]
    )  # fmt: skip
    record = last_line(capsys)
    assert record["equal"] is True
    assert [phase["name"] for phase in record["phases"]] == list(adaptive.PHASES)
    for phase in record["phases"]:
        assert list(phase["policies"]) == names
        assert phase["policies"][phase["best"]]["of_best"] == 1
        assert phase["policies"]["static 7"]["switches"] == 0
    raw = [json.loads(line) for line in samples_path(path).read_text().splitlines()]
    groups = 2 * len(adaptive.PHASES)
    assert len(raw) == record["samples"] == groups * len(names)
    again = rounded(adaptive.summary(raw))
    assert {name: record[name] for name in again} == again


def test_equal_steps_leave_lengths_and_take_load_away() -> None:
    """Two policies of the same steps are as fast, whatever the machine did; half as many steps of
    the same time are twice as fast, beside what is no step."""
    calm, busy = [3, 1, 4, 1, False, [2], 10.0], [3, 1, 4, 1, False, [2], 30.0]
    first = [3, 1, 4, 1, True, [2], None]

    def at(policy: str, group: int, ran: list[list[Any]]) -> dict[str, Any]:
        seconds = 0.1 + sum(ms or 0.0 for *_, ms in ran) / 1e3
        return {"policy": policy, "group": group, "seconds": seconds, "ran": ran}

    rows = [at("a", 0, [first] + [calm] * 8), at("b", 0, [first] + [busy] * 8),
            at("c", 0, [first] + [calm] * 4)]  # fmt: skip
    a, b, c = adaptive.equal_seconds(rows)
    assert a == b == pytest.approx(0.1 + 8 * 0.010)
    assert c == pytest.approx(0.1 + 4 * 0.010)


def test_policies_that_take_turns() -> None:
    """Each is asked and told of its own steps alone, and the limits hold for all."""
    one, seven = (load_policy("static", n, 1, None) for n in (1, 7))
    auto, other = (load_policy("auto", 5, 1, None) for _ in range(2))
    policies = Turns({"one": one, "seven": seven, "auto": auto, "other": other})
    assert set(auto.tiers) | set(seven.tiers) == set(policies.tiers)
    view = StepView((RequestView(1, 10),))
    policies.take("seven")
    assert policies.choose(view) == seven.choose(view)
    policies.take("auto")
    budget = policies.choose(view)
    policies.observe(StepOutcome(view, budget, [RequestOutcome(1, 2, 5)], 4.0, budget.tier.nodes))
    tier = budget.tier
    assert policies.steps == [[tier.steps, tier.top_k, tier.nodes, 1, False, [2], 4.0]]
    assert {name: state["count"] for name, state in policies.states().items()} == {
        "one": 0, "seven": 0, "auto": 1, "other": 0,
    }  # fmt: skip
    assert policies.largest_batch(seven.tiers[0]) is None
    policies.take("one")
    assert not policies.steps
    own = Turns({"adaspec": load_policy("adaspec", 5, 1, None)})
    assert own.choose(view).stop is None
    own.let_stop()
    assert own.choose(view).stop is not None


@pytest.mark.ci
def test_traces_play_every_request_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of 30 requests through all policies: every one is answered in full."""
    played: list[traces.Served] = []
    real = traces.serve

    def serve(*args: Any) -> traces.Served:
        played.append(real(*args))
        return played[-1]

    monkeypatch.setattr(traces, "serve", serve)
    monkeypatch.setattr(traces, "BUSY", 4)
    seen = traces.cell("bursty", 30, 1)
    assert len(played) == 1 + len(traces.POLICIES)
    for run in played:
        assert len(run.requests) == 30
        assert all(r.done >= r.output and r.end_ms > r.first_ms > r.arrival_ms - 1
                   for r in run.requests if r.output > 1)  # fmt: skip
    policies = seen["policies"]
    assert policies["off"]["speedup"] == pytest.approx(1)
    assert policies["off"]["attainment"] == pytest.approx(0.9, abs=0.05)
    assert policies["static 5"]["draft_tokens"] == 5
    assert policies["auto"]["speedup"] > policies["off"]["speedup"]
    # The paper's order: what looks at no cost drafts most and has least of it accepted.
    drafts = {name: figures["draft_tokens"] for name, figures in policies.items()}
    assert drafts["adaspec"] < drafts["threshold"] < drafts["specinfer"] == 8
    assert policies["adaspec"]["acceptance"] > policies["threshold"]["acceptance"]
    assert policies["threshold"]["speedup"] > policies["specinfer"]["speedup"]
