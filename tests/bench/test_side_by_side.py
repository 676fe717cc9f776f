"""Two work trees side by side, and the scripts that are run in them."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import side_by_side, step_cost
from bench.step_cost import DECODING, SETTINGS, answer
from overlap_spec import Engine


@pytest.fixture
def trees(tmp_path: Path) -> dict[str, Path]:
    """Two trees that have a package of their own, and a script that neither has."""
    for side in ("before", "after"):
        package = tmp_path / side / "overlap_spec"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"SIDE = {side!r}")
    script = tmp_path / "script.py"
    script.write_text(TURNS)
    return {side: tmp_path / side for side in ("before", "after")} | {"script": script}


def words(trees: dict[str, Path], *more: str) -> list[str]:
    """A command line over the trees."""
    return [part for name, path in trees.items() for part in (f"--{name}", str(path))] + list(more)


TURNS = """
import json, os, sys
import overlap_spec
assert sys.argv[1:] == ["--x", "--turns", "3"], sys.argv
assert os.getcwd() == os.environ["PYTHONPATH"]
tpot = {"before": 4.0, "after": 3.0}[overlap_spec.SIDE]
for number in range(4):
    sys.stdin.readline()
    print(overlap_spec.SIDE, number, file=sys.stderr, flush=True)
    told = {"tpot_ms": tpot * number, "accept_length": 3.5, "sha256": overlap_spec.SIDE}
    print(json.dumps({"a": told} if number else {}), flush=True)
    if number == {"before": 9, "after": 9}[overlap_spec.SIDE]:
        sys.exit(3)
"""


def test_two_trees_take_turns(
    trees: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    side_by_side.main(words(trees, "--turns", "3", "--json", str(path), "--", "--x"))
    said = capfd.readouterr()
    record = json.loads(said.out.splitlines()[-1])
    assert record == json.loads(path.read_text())
    assert str(tmp_path) not in said.out
    ratio = {"median": 0.75, "min": 0.75, "max": 0.75, "n": 3}
    assert record["ratios"] == {"a.tpot_ms": ratio}
    assert record["before"] == {"a.tpot_ms": 8.0}
    assert record["unequal"] == ["a.sha256"]
    assert record["repetitions"] == 3
    rounds_run = [line for line in said.err.splitlines() if line.startswith(("before", "after"))]
    turn = ["before 0", "after 0", "after 1", "before 1", "before 2", "after 2", "after 3"]
    assert rounds_run == [*turn, "before 3"]


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


@pytest.mark.ci
def test_arrivals_leave_the_text() -> None:
    with Engine(**SETTINGS) as engine:
        alone, among = answer(engine, DECODING), answer(engine, DECODING, arrivals=True)
        assert alone["output_sha256"] == among["output_sha256"]
        assert alone["accept_length"] == among["accept_length"] > 2
        left = engine.snapshot()
        assert (left["running"], left["waiting"], left["pages_in_use"]) == (0, 0, 0)
