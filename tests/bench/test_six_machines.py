"""``bench.six_machines`` ends in its record, whose figures are those of its samples."""

import json
from pathlib import Path

import pytest

from bench import six_machines


def test_it_ends_in_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that has one tier makes all that its tier does."""
    path = tmp_path / "six_machines.json"
    six_machines.main(["--verifies", "4", "--policy", "static", "--json", str(path)])
    record = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == record
    lines = path.with_suffix(".samples.jsonl").read_text().splitlines()
    shares = [json.loads(line)["of_best"] for line in lines]
    assert len(shares) == record["phases"] == 6 * 6 * 4
    assert record["worst"] == pytest.approx(min(shares), rel=1e-4)
    assert shares == pytest.approx([1.0] * len(shares))
    assert set(record["machines"]) == set(six_machines.MACHINES)
