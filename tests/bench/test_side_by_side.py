"""Two work trees side by side, and the scripts that are run in them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import side_by_side, step_cost
from bench.step_cost import DECODING, SETTINGS, answer, question, rounds, summary
from overlap_spec import Engine

SCRIPT = """
import json, os, sys
import overlap_spec
print("noise")
tpot = {"before": 4.0, "after": 3.0}[overlap_spec.SIDE]
print(json.dumps({
    "batch_1": {"tpot_ms": tpot, "accept_length": 3.5, "quick": True, "rounds": 9},
    "output_sha256": sys.argv[1] + overlap_spec.SIDE,
    "here": os.getcwd(),
    "child": os.environ["PYTHONPATH"],
}))
"""


@pytest.fixture
def trees(tmp_path: Path) -> dict[str, Path]:
    """Two trees that have a package of their own, and a script that neither has."""
    for side in ("before", "after"):
        package = tmp_path / side / "overlap_spec"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"SIDE = {side!r}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return {side: tmp_path / side for side in ("before", "after")} | {"script": script}


def words(trees: dict[str, Path], *more: str) -> list[str]:
    """A command line over the trees."""
    return [part for name, path in trees.items() for part in (f"--{name}", str(path))] + list(more)


def test_each_tree_runs_its_own_package(
    trees: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    side_by_side.main(words(trees, "--pairs", "3", "--json", str(path), "--", "x"))
    said = capsys.readouterr()
    order = [line.rpartition(" ")[2] for line in said.err.splitlines()]
    assert order == ["before", "after", "after", "before", "before", "after"]
    record = json.loads(said.out.splitlines()[-1])
    assert record == json.loads(path.read_text())
    ratio = {"median": 0.75, "min": 0.75, "max": 0.75, "n": 3}
    assert record["ratios"] == {"batch_1.tpot_ms": ratio}
    assert record["before"] == {"batch_1.tpot_ms": 4.0}
    assert record["after"] == {"batch_1.tpot_ms": 3.0}
    assert record["unequal"] == ["output_sha256"]
    assert record["command"] == "script.py x"
    assert str(tmp_path) not in said.out


def test_a_script_runs_with_its_tree_as_folder_and_path(trees: dict[str, Path]) -> None:
    record = side_by_side.run_in(trees["before"], trees["script"], ["x"])
    assert record["here"] == record["child"] == str(trees["before"])
    assert record["output_sha256"] == "xbefore"


def test_a_module_is_run_where_there_is_no_script(trees: dict[str, Path]) -> None:
    (trees["after"] / "figure.py").write_text("print('{\"tpot_ms\": 2}')")
    assert side_by_side.run_in(trees["after"], None, ["figure"]) == {"tpot_ms": 2}
    with pytest.raises(SystemExit, match="in before: exit status 1"):
        side_by_side.run_in(trees["before"], None, ["figure"])


TURNS = """
import json, sys
import overlap_spec
assert sys.argv[1:] == ["--x", "--turns", "3"], sys.argv
tpot = {"before": 4.0, "after": 3.0}[overlap_spec.SIDE]
for number in range(4):
    sys.stdin.readline()
    print(overlap_spec.SIDE, number, file=sys.stderr, flush=True)
    print(json.dumps({"a": {"tpot_ms": tpot * number}} if number else {}), flush=True)
    if number == {"before": 9, "after": 9}[overlap_spec.SIDE]:
        sys.exit(3)
"""


def test_two_trees_take_turns(trees: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    trees["script"].write_text(TURNS)
    side_by_side.main(words(trees, "--turns", "3", "--", "--x"))
    said = capfd.readouterr()
    record = json.loads(said.out.splitlines()[-1])
    ratio = {"median": 0.75, "min": 0.75, "max": 0.75, "n": 3}
    assert record["ratios"] == {"a.tpot_ms": ratio}
    assert record["before"] == {"a.tpot_ms": 8.0}
    assert record["pairs"] == 3
    rounds_run = [line for line in said.err.splitlines() if not line.startswith("a: pair")]
    turn = ["before 0", "after 0", "after 1", "before 1", "before 2", "after 2", "after 3"]
    assert rounds_run == [*turn, "before 3"]


@pytest.mark.parametrize(("side", "reason"), [("before", "in one tree alone"), (None, "failed in")])
def test_a_script_that_fails_in_its_turn(
    trees: dict[str, Path], side: str | None, reason: str
) -> None:
    script = TURNS
    for name in ("before", "after"):
        if side in (name, None):
            script = script.replace(f'"{name}": 9', f'"{name}": 1')
    trees["script"].write_text(script)
    with pytest.raises(SystemExit, match=reason):
        side_by_side.main(words(trees, "--turns", "3", "--", "--x"))


@pytest.mark.ci
def test_step_cost_takes_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 5))
    step_cost.main(["--batch", "1", "--arrivals", "--turns", "2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [[], ["batch_1"], ["batch_1"], [], ["arrivals"]]
    first, second = lines[1]["batch_1"], lines[2]["batch_1"]
    assert first["output_sha256"] == second["output_sha256"]
    assert first["rounds"] == 1
    assert first["cpu_ms"] > 0


def test_the_median_is_over_pairs() -> None:
    def pair(before: float, after: float) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"a": {"x_ms": before}, "n": 1}, {"a": {"x_ms": after}, "n": 1}

    result = side_by_side.compare([pair(1, 2), pair(10, 10), pair(4, 2)], ["*_ms"])
    ratio = {"median": 1.0, "min": 0.5, "max": 2.0, "n": 3}
    assert result["ratios"] == {"a.x_ms": ratio}
    assert (result["before"], result["after"]) == ({"a.x_ms": 4}, {"a.x_ms": 2})
    assert result["unequal"] == []
    with pytest.raises(SystemExit, match="fits y"):
        side_by_side.compare([pair(1, 2)], ["y"])
    with pytest.raises(SystemExit, match=r"a\.x_ms: it is 0"):
        side_by_side.compare([pair(0, 2)], ["*_ms"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--pairs", "0", "--", "x"], "at least 1"),
        (["--turns", "2", "--", "x"], "needs --script"),
        (["--script", "absent.py"], "no file"),
        (["--after", "absent", "--", "x"], "no work tree"),
    ],
)
def test_flags_that_cannot_be(
    trees: dict[str, Path], given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    del trees["script"]
    with pytest.raises(SystemExit):
        side_by_side.main(words(trees, *given))
    assert reason in capsys.readouterr().err


def test_nothing_to_run(trees: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    del trees["script"]
    with pytest.raises(SystemExit):
        side_by_side.main(words(trees))
    assert "nothing to run" in capsys.readouterr().err


def test_questions_differ() -> None:
    prompts = {question(number).prompt for number in range(64)}
    assert len(prompts) == 64


@pytest.mark.ci
def test_rounds_are_alike_and_arrivals_leave_the_text() -> None:
    with Engine(**SETTINGS) as engine:
        done = rounds(engine, 2, 0.0)
        assert len(done) == 3
        figures = summary(done)
        assert figures["output_tokens"] == sum(o.stats.output_tokens for o in done[0].outputs) > 40
        alone, among = answer(engine, DECODING), answer(engine, DECODING, arrivals=True)
        assert alone.output_sha256 == among.output_sha256 != figures["output_sha256"]
        assert alone.accept_length == among.accept_length > 2
        left = engine.snapshot()
        assert (left["running"], left["waiting"], left["pages_in_use"]) == (0, 0, 0)
