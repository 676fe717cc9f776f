"""GSM8K, JSON and peers: their records, what they catch, the report, and the check."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import all as everything
from bench import check, gsm8k, json_schema, peers, report
from bench.common import ROOT, rounded, samples_path
from overlap_spec.errors import ConfigError

RUNS: dict[str, tuple[Any, list[str]]] = {
    "gsm8k": (gsm8k, ["--num-questions", "4", "--num-shots", "2", "--parallel", "2",
                      "--max-new-tokens", "24"]),
    "json_schema": (json_schema, ["--rows", "2", "--parallel", "2", "--max-tokens", "64",
                                  "--backend", "xgrammar", "--backend", "llguidance"]),
    "peers": (
        peers,
        [
            *("--repetitions", "1", "--cases", "2", "--max-tokens", "48"),
            *("--without", "vllm", "--without", "llama-server"),
        ],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of a small run of each benchmark, with the embedded model."""
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("records")
    for name, (module, words) in RUNS.items():
        module.main(["--quick", "--json", str(made / f"{name}.json"), *words])
    return made


def read(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A record and its raw samples."""
    path = folder / f"{name}.json"
    lines = samples_path(path).read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(line) for line in lines]


@pytest.mark.ci
@pytest.mark.parametrize("name", RUNS)
def test_a_record_can_be_made_again_from_its_lines(folder: Path, name: str) -> None:
    record, samples = read(folder, name)
    module, _ = RUNS[name]
    again = rounded(module.summary(samples))
    if name == "peers":
        compiled = again.pop("compile_ms")
        assert {n: s["compile_ms"] for n, s in record["systems"].items()} == compiled
    assert {key: record[key] for key in again} == again
    assert record["samples"] == len(samples)


@pytest.mark.ci
def test_gsm8k_finds_both_sides_alike(folder: Path) -> None:
    record, samples = read(folder, "gsm8k")
    assert record["equal"] == 1.0
    on, off = record["sides"]["once-sync"], record["sides"]["none"]
    assert on["output_tokens"] == off["output_tokens"] > 4
    assert on["accept_length"] == off["accept_length"] > 1
    assert on["requests"] == 4
    # Who begins changes with every chunk.
    assert [s["side"] for s in samples] == ["once-sync", "none", "none", "once-sync"]
    replies = [reply for s in samples if s["side"] == "none" for reply in s["replies"]]
    tokens = sum(reply["tokens"] for reply in replies)
    seconds = sum(s["seconds"] for s in samples if s["side"] == "none")
    assert off["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-4)
    assert [reply["shot"] for reply in replies] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 3 + 4 = 7.", 7),
        ("#### 1,234", 1234),
        ("$18.00 a day", 18),
        ("down to -5 degrees", -5),
        ("no idea", None),
        ("", None),
    ],
)
def test_an_answer_is_the_last_number(text: str, number: float | None) -> None:
    assert gsm8k.last_number(text) == number


def test_gsm8k_scores() -> None:
    replies = [
        {"text": text, "label": 7.0, "shot": shot}
        for text, shot in (("is 7", True), ("is 8", False), ("none", False), ("7.0", False))
    ]
    found = gsm8k.scores([{"replies": replies}])
    assert found == {"accuracy": 0.5, "accuracy_unseen": pytest.approx(1 / 3), "invalid": 0.25}


@pytest.mark.ci
def test_json_record_counts_validity(folder: Path) -> None:
    record, samples = read(folder, "json_schema")
    for name in ("xgrammar", "llguidance"):
        entry = record["backends"][name]
        assert (entry["taken"], entry["refused"]) == (2, 0)
        replies = [
            reply
            for s in samples
            if s["kind"] == "answers" and s["backend"] == name and s["constrained"]
            for reply in s["replies"]
        ]
        ended = [reply for reply in replies if reply["finish_reason"] == "stop"]
        assert all(reply["valid"] for reply in ended)
        assert entry["constrained"]["finished"] == len(ended)
        assert 0 <= entry["constrained"]["hidden_fraction"] <= 1
        assert "hidden_fraction" not in entry["unconstrained"]
    assert record["equal"] == 1.0


@pytest.mark.ci
def test_peers_say_the_same_and_missing_ones_are_named(folder: Path) -> None:
    record, _ = read(folder, "peers")
    for workload in ("batch 1", "batch 16"):
        systems = record["workloads"][workload]
        assert {"overlap-spec", "overlap-spec plain", peers.LOCAL} <= set(systems)
        for name, side in systems.items():
            assert side["requests"] == 2, name
            assert side["valid_share"] in (None, 1.0), name
            assert side["same_text"] == 1.0, name
            assert side["tokens_per_second"] > 0
        assert systems["overlap-spec"]["ratio"] is None
        assert systems["overlap-spec"]["busy_ms_per_step"]["compute: verify"] > 0
    assert "no server" in record["missing"]["sglang"]
    assert {"vllm", "llama-server"} <= set(record["missing"])


@pytest.mark.ci
def test_peers_tell_the_first_requests_apart(folder: Path) -> None:
    record, samples = read(folder, "peers")
    names = set(record["workloads"]["batch 1"])
    assert set(record["first"]) == names
    assert any(name.startswith("by hand: overlap=none") for name in names)
    for name, first in record["first"].items():
        (early,) = (s for s in samples if (s["kind"], s.get("system")) == ("first", name))
        (later,) = (
            s for s in samples if s["kind"] == "answers" and (s["system"], s["batch"]) == (name, 1)
        )
        rates = [
            sum(r["tokens"] for r in s["replies"])
            / sum(r["end_to_end_ms"] / 1e3 for r in s["replies"])
            for s in (early, later)
        ]
        assert first["share"] == pytest.approx(rates[0] / rates[1], rel=1e-3)
        assert first["tokens_per_second"] == pytest.approx(rates[0], rel=1e-3)


def test_settings_by_hand() -> None:
    given = "adaptive=static,eagle_topk=4,graphs=false, mask_deadline_ms=null"
    assert peers.by_hand(given) == {
        "adaptive": "static",
        "eagle_topk": 4,
        "graphs": False,
        "mask_deadline_ms": None,
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        peers.by_hand("static")


@pytest.mark.ci
def test_differing_texts_are_a_fault_of_ours(folder: Path) -> None:
    record, samples = read(folder, "peers")
    assert peers.faults(record) == []
    for sample in samples:
        if sample["kind"] == "answers" and sample["system"] == "overlap-spec plain":
            sample["replies"][0]["text"] = "other"
    found = peers.faults(peers.summary(samples))
    assert [line.partition(":")[0] for line in found] == [
        "batch 1, overlap-spec plain", "batch 16, overlap-spec plain",
    ]  # fmt: skip
    assert peers.faults(peers.summary(samples), exact=False) == []


def test_the_report_shows_all_records_and_needs_nothing_else() -> None:
    """A record's paths and figures stand in tables, whatever benchmark made it."""
    page = report.render(ROOT / "bench" / "results")
    text = re.sub("<[^>]*>", "", page)
    for name in ("gsm8k", "peers", "six_machines", "side_by_side"):
        assert re.search(rf"─ {name} ─", text)
    assert re.search(r"sides +┃ +once-sync +┃ +none", text)
    assert re.search(r"accept_length +│ +4.17 +│ +4.17", text)
    assert not re.search(r"<(script|link|img|iframe)|\b(src|href)=(?!\"#)|@import", page)


def test_figures_that_are_alike_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"median": 1.5, "min": 1.0, "max": 2.0, "n": 3}
    few = {f"figure {n}": n / 3 for n in range(9)}
    by = {"a": {"x": 1, "y": None}, "b": {"x": 2, "y": spread}}
    record = {"bench": "x", "equal": True, "by": by, "many": {"only": few}, "listed": [1, 2.5]}
    assert report.tables(record) == [
        (["", "equal", "listed"], [["", "yes", "1, 2.5"]]),
        (["by", "x", "y"], [["a", "1", "–"], ["b", "2", "1.5 (1 – 2)"]]),
        (["many", "only"], [[name, f"{value:.4g}"] for name, value in few.items()]),
    ]
    report.tell(record)
    assert "1.5 (1 – 2)" in capsys.readouterr().err


def test_committed_records_are_of_committed_trees_and_read() -> None:
    """A record that no page names backs nothing; one of a changed tree cannot be made again."""
    folder = ROOT / "bench" / "results"
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    # "…seed2… to …seed6…" names those between.
    text += "".join(f"cpu-embedded-seed{n}-2026-11-23" for n in range(3, 6))
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        commits = record["commits"].values() if "commits" in record else [record["commit"]]
        assert not any(commit.endswith("-dirty") for commit in commits), path.name
        assert path.stem in text, path.name
    assert not list(folder.glob("*.samples.jsonl"))


@pytest.mark.parametrize(
    ("expected", "error", "skipped"),
    [
        ({"path": ["a", "b"], "equals": 1.0}, False, False),
        ({"path": ["a", "b"], "equals": 0.5}, True, False),
        ({"path": ["a", "c"], "equals": 1.0}, True, False),
        ({"path": ["a", "b"], "between": [0.5, 2]}, False, False),
        ({"path": ["a", "b"], "between": [2, 3]}, True, False),
        ({"path": ["a", "none"], "between": [2, 3]}, True, False),
        ({"path": ["a", "b"], "equals": 5, "sizes": "quick"}, False, True),
        ({"path": ["x"], "equals": 5, "bench": "absent"}, False, True),
    ],
)
def test_an_expectation(expected: dict[str, Any], error: bool, skipped: bool) -> None:
    records = {"t": {"a": {"b": 1.0, "none": None}}}
    found = check.compare({"bench": "t"} | expected, records, "ci")
    assert (bool(found.error), found.skipped) == (error, skipped)


@pytest.mark.ci
def test_the_check_fails_on_a_change_of_correctness(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, _ = read(folder, "gsm8k")
    # The sizes of this file's runs are no expectation's; what holds for all sizes is held.
    (tmp_path / "gsm8k.json").write_text(json.dumps(record | {"quick": False}))
    check.main(["--records", str(tmp_path)])
    assert "error" not in capsys.readouterr().err
    (tmp_path / "gsm8k.json").write_text(json.dumps(record | {"quick": False, "equal": 0.9}))
    with pytest.raises(SystemExit) as ended:
        check.main(["--records", str(tmp_path)])
    assert ended.value.code == 1
    assert "gsm8k: equal is 0.9, not 1.0" in capsys.readouterr().err


def test_committed_expectations_are_well_formed() -> None:
    known = set(everything.USUAL)
    for expected in json.loads(check.EXPECTED.read_text()):
        assert expected["bench"] in known
        assert expected["path"]
        assert ("equals" in expected) != ("between" in expected)
        assert expected.get("sizes", "ci") in ("ci", "quick", "full")


# What they run is run in another tree, by another benchmark, or by no one benchmark.
APART = {"all", "check", "exactness", "report", "side_by_side", "step_cost"}


def test_all_reaches_every_benchmark() -> None:
    folder = ROOT / "bench"
    commands = {
        path.stem
        for path in folder.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert commands == {*everything.USUAL, *everything.OTHERS} | APART


def test_all_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def fake(words: list[str], **_: Any) -> Namespace:
        ran.append(words[2].removeprefix("bench."))
        return Namespace(returncode=int(ran[-1] == "attack"))

    monkeypatch.setattr(everything.subprocess, "run", fake)
    done = everything.USUAL[0]
    (tmp_path / f"{done}.json").write_text("{}")
    options = Namespace(folder=tmp_path, full=False, only=None, resume=True, seed=3)
    assert everything.run_all(options) == ["attack (exit status 1)"]
    assert set(ran) | {"gpu"} == {*everything.USUAL[1:], *everything.OTHERS}
    assert f"{done}: there already" in capsys.readouterr().err
    options.resume = False
    everything.run_all(options)
    assert not (tmp_path / f"{done}.json").exists()
