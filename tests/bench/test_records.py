"""GSM8K, JSON and peers: their records, what they catch, the report, and the check."""

import json
import re
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
    text += "".join(f"cpu-embedded-seed{n}-2026-11-27" for n in range(3, 6))
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
