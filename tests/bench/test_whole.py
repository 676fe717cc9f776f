"""``bench.whole`` tells which outputs are whole, and fails where one is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import whole
from bench.whole import MORE, summary

ENTRIES = [
    {"id": "an integer", "schema": {"type": "integer"}, "tests": []},
    {"id": "a name", "schema": {"type": "object", "properties": {"a": {"type": "string"}},
                                "required": ["a"]}, "tests": []},
    {"id": "misspelt", "schema": {"typ": "string"}, "tests": []},
]  # fmt: skip


def test_a_record_of_schemas_of_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "schemas.jsonl", tmp_path / "whole.json"
    data.write_text("\n".join(map(json.dumps, ENTRIES)) + "\n")
    whole.main(["--data", str(data), "--json", str(out)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert (record["schemas"], record["refused"], record["untold"]) == (3, 1, [])
    assert record["whole"] == record["outputs"] == 2 * len(MORE)
    # The model's own text rarely fits where the shortest just does.
    assert record["cut"] > 0
    assert record["narrowed"] > 0
    assert (record["started"], record["broken"]) == ([], [])


def test_what_is_not_whole_is_told_by_name() -> None:
    out = {"more": 0, "tokens": 3, "finish_reason": "length", "narrowed": 0, "whole": False}
    sample: dict[str, Any] = {"id": "x", "refused": None, "least": 3, "room_ms": 1.0}
    sample |= {"refuses_fewer": False, "complete": [out], "free": [out]}
    found = summary([sample, {"id": "y", "refused": None, "least": None}])
    assert found["broken"] == [{"id": "x", **out}]
    assert (found["started"], found["untold"], found["whole"]) == (["x"], ["y"], 0)
