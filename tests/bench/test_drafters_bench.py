"""Drafters side by side: a small run, its record, and figures of known samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import drafters
from bench.common import ROOT, samples_path
from overlap_spec.config import drafter_names

QUESTIONS = ROOT / "bench" / "data" / "questions.jsonl"
ROWS = ("greedy, chain of 5",)
Found = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("drafters") / "drafters.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "QUICK", drafters.Size(1, 12, 2))
        patch.setattr(drafters, "ROWS", {name: drafters.ROWS[name] for name in ROWS})
        drafters.main(["--quick", "--gsm8k", str(QUESTIONS), "--json", str(path)])
    lines = samples_path(path).read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(line) for line in lines]


@pytest.mark.ci
def test_each_drafter_is_measured_or_skipped_with_its_reason(found: Found) -> None:
    record, _ = found
    entry = record["models"]["embedded"]
    assert list(entry["rows"]) == list(ROWS)
    for by_drafter in entry["rows"].values():
        assert {"eagle3", "ngram"} <= set(by_drafter)
        assert set(by_drafter) | set(entry["skipped"]) == set(drafter_names())
    assert "needs draft" in entry["skipped"]["eagle"]
    assert record["missing"] == {"Spec-Bench": "no file given: --spec-bench"}


@pytest.mark.ci
def test_another_text_is_a_fault_where_it_was_promised(found: Found) -> None:
    record, samples = found
    assert drafters.faults(record["models"]) == []
    entry = record["models"]["embedded"]
    changed = [dict(sample) for sample in samples]
    for sample in changed:
        if (sample["side"], sample["workload"], sample["row"]) == ("ngram", "JSON", ROWS[0]):
            sample["output_sha256"] = "another"
    rows = drafters.summary(changed)["embedded"]
    told = drafters.faults({"embedded": entry | {"rows": rows}})
    (line,) = told
    assert "ngram, JSON" in line
    assert drafters.faults({"embedded": {"dtype": "bfloat16", "rows": rows}}) == []


@pytest.mark.ci
def test_a_row_over_one_of_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is that member; settings by hand are rows of their own."""
    monkeypatch.setattr(drafters, "QUICK", drafters.Size(1, 12, 1))
    monkeypatch.setattr(drafters, "ROWS", {})
    path = tmp_path / "row.json"
    words = ["--only", "suffix,eagle3", "--over", "eagle3", "--by-hand", "adaptive=auto"]
    drafters.main(["--quick", *words, "--json", str(path)])
    record = json.loads(path.read_text())
    rows = record["models"]["embedded"]["rows"]
    assert (record["over"], record["models"]["embedded"]["skipped"]) == ("eagle3", {})
    assert list(rows) == [
        f"greedy, {shape}, adaptive=auto" for shape in ("chain of 5", "tree of 16")
    ]
    for by_drafter in rows.values():
        assert all(f["ratio"]["n"] == 1 for f in by_drafter["suffix,eagle3"].values())
    with pytest.raises(SystemExit):
        drafters.parse(["--only", "suffix,eagle9"])


def sample(side: str, repetition: int, **more: Any) -> dict[str, Any]:
    plain = {
        "side": side, "repetition": repetition, "seconds": 2.0, "steps": 10, "output_tokens": 20,
        "verifies": 8, "verified_tokens": 20, "histogram": [2, 3, 3], "draft_ms": 5.0,
        "extend_ms": 1.0, "verify_ms": 10.0, "output_sha256": "a",
    }  # fmt: skip
    return plain | more


def test_figures_of_known_samples() -> None:
    taken = [
        sample("x", 1, seconds=1.0),
        sample("base", 0, seconds=4.0),
        sample("x", 0, output_sha256="b", histogram=[8]),
        sample("base", 1),
    ]
    f = drafters.figures(taken, "x")
    assert f["accept_length"] == 2.5
    assert f["by_position"] == [6 / 16, 3 / 16]
    assert (f["draft_ms"], f["extend_ms"], f["verify_ms"]) == (0.5, 0.1, 1.0)
    assert f["tokens_per_second"] == 40 / 3
    assert (f["ratio"]["min"], f["ratio"]["max"]) == (2.0, 2.0)
    assert f["same_text"] == 0.5
