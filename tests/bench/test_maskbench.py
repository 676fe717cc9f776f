"""The mask benchmark: classes, the order of keys, tokenizer files, the record."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import maskbench
from bench.masks import Order
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def case(valid: bool, data: Any) -> dict[str, Any]:
    return {"valid": valid, "data": data}


# The labels of the last three are wrong on purpose: they stand for what a backend gets wrong.
ENTRIES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "clean": (PERSON, [case(True, {"age": 3, "name": "Ada"}), case(False, {"age": 3})]),
    "untested": (PERSON, []),
    "refused": ({"uniqueItems": True, "contains": {"type": "null"}}, [case(True, [])]),
    "over_constrained": ({"type": "null"}, [case(True, None), case(True, 3)]),
    "under_constrained": ({"type": "integer"}, [case(True, "x"), case(False, 3)]),
}


def write(folder: Path) -> Path:
    path = folder / "schemas.jsonl"
    lines = [
        json.dumps({"id": name, "schema": schema, "tests": cases})
        for name, (schema, cases) in ENTRIES.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_each_schema_lands_in_its_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    maskbench.main(
        ["--data", str(write(tmp_path)), "--backend", "xgrammar", "--vocab", "2100",
         "--in-process", "--json", str(out)]
    )  # fmt: skip
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert record["counts"] == {name: int(name in ENTRIES) for name in maskbench.CLASSES}
    assert record["schemas"] == len(ENTRIES)
    assert record["ttfm_ms"]["n"] == 4
    assert record["tbm_us"]["n"] > 10
    assert 0 < record["tbm_us"]["p50"] <= record["tbm_us"]["p99"]
    failed = {entry["id"]: entry for entry in record["failures"]}
    assert set(failed) == {"refused", "over_constrained", "under_constrained"}
    assert "uniqueItems" in failed["refused"]["reason"]
    samples = out.with_suffix(".samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in samples] == list(ENTRIES)


def test_a_token_outside_the_mask_stops_the_feed() -> None:
    vocabulary = Vocabulary((*(bytes([i]) for i in range(256)), b""), 257, (256,))
    compiled = XGrammarBackend(vocabulary).compile(Grammar.json_schema({"type": "integer"}))
    times: list[float] = []
    assert maskbench.feed(compiled, list(b"12"), times) is None
    assert len(times) == 3
    assert maskbench.feed(compiled, list(b"1x2"), []) == 1
    assert maskbench.feed(compiled, list(b"-"), []) == 1


@pytest.mark.parametrize(
    ("schema", "value", "names"),
    [
        (PERSON, {"age": 1, "name": "a"}, ["name", "age"]),
        ({"allOf": [{"required": ["z"]}, PERSON]}, {"age": 1, "z": 1, "name": ""},
         ["name", "age", "z"]),
        ({"properties": {"b": {}}, "anyOf": [{"properties": {"c": {"type": "null"}}},
          {"properties": {"a": {}}}]}, {"a": 1, "c": 1, "b": 1}, ["b", "a", "c"]),
        ({"$ref": "#/$defs/p", "$defs": {"p": PERSON}}, {"age": 1, "name": ""}, ["name", "age"]),
        ({"if": {"required": ["b"]}, "then": {"properties": {"b": {}, "a": {}}}},
         {"a": 1, "b": 1}, ["b", "a"]),
        ({}, {"b": 1, "a": 1}, ["b", "a"]),
    ],
)  # fmt: skip
def test_keys_come_in_schema_order(schema: Any, value: Any, names: list[str]) -> None:
    ordered = Order(schema).apply(value)
    assert list(ordered) == names
    assert ordered == value
    nested = {"patternProperties": {"^x": {"items": schema}}, "$defs": schema.get("$defs", {})}
    assert list(Order(nested).apply({"x1": [value]})["x1"][0]) == names
