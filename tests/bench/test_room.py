"""``bench.room`` tells what whole outputs cost in mask time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import room

NAMES = {"type": "array", "items": {"type": "string", "maxLength": 6}}
ENTRIES = [
    {"id": "names", "schema": NAMES, "tests": [{"valid": True, "data": ["any", "name"]}]},
    {"id": "no instance", "schema": {"type": "integer"}, "tests": []},
    {"id": "misspelt", "schema": {"typ": "string"}, "tests": []},
    {"id": "large", "schema": {"type": "string", "pattern": "^[ab]{70000}$"}, "tests": []},
]


def test_a_record_of_schemas_of_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "schemas.jsonl", tmp_path / "room.json"
    data.write_text("\n".join(map(json.dumps, ENTRIES)) + "\n")
    room.main(["--data", str(data), "--vocab", "4096", "--rounds", "1", "--json", str(out)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert (record["schemas"], record["untold"]) == (1, ["large"])
    assert 0 < record["narrowed_ms"]["n"] < record["near_ms"]["n"]
    assert record["far_ratio"]["n"] == 1
