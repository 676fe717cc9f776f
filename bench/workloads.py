"""What the benchmarks ask for: JSON under real schemas, in short and long outputs, and free text.

Everything is drawn by the seed and by nothing else: not by what is fast on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.common import ROOT
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.load import asks
from overlap_spec.load.asks import OWN_SCHEMAS as OWN_SCHEMAS
from overlap_spec.load.asks import QUESTIONS as QUESTIONS
from overlap_spec.load.asks import Ask as Ask
from overlap_spec.load.asks import Sample as Sample
from overlap_spec.load.asks import facts as facts
from overlap_spec.load.asks import free_asks as free_asks
from overlap_spec.load.asks import json_asks as json_asks
from overlap_spec.load.asks import mixed_asks as mixed_asks

SHARED_SCHEMAS = ROOT.parent / "shared" / "data" / "jsonschemabench_dev.jsonl"
LONGEST_SCHEMA = 1500
# Bounded and patterned strings compile for seconds on large vocabularies.
SLOW_KEYWORDS = frozenset({"maxLength", "minLength", "pattern", "patternProperties", "format"})
NAMES = ("Anna", "Ivo", "Mara", "Paul", "Lena", "Omar", "Rosa", "Finn")
CITIES = ("Rome", "Oslo", "Lima", "Bern", "Riga", "Cork", "Nice", "Bonn")
EVENTS = (
    "order", "refund", "shipment", "delivery", "invoice", "payment", "booking", "arrival",
    "departure", "repair", "outage", "upgrade", "meeting", "visit", "call", "complaint",
    "transfer", "deposit", "contract", "renewal", "inspection", "reading", "alarm", "backup",
)  # fmt: skip


def read_samples(path: Path | None) -> list[Sample]:
    """As :func:`overlap_spec.load.asks.read_samples`; of None JSONSchemaBench's development split
    if it is available, else our own."""
    if path is None:
        path = SHARED_SCHEMAS if SHARED_SCHEMAS.exists() else OWN_SCHEMAS
    return asks.read_samples(path)


def is_plain(schema: dict[str, Any]) -> bool:
    """Whether a schema is small, all its objects are closed and no string is bounded: these
    compile in milliseconds at any vocabulary, which this tells without a clock."""
    if len(json.dumps(schema)) > LONGEST_SCHEMA or not {"properties", "anyOf"} & schema.keys():
        return False
    for part in _parts(schema):
        if SLOW_KEYWORDS & part.keys():
            return False
        if "properties" in part and part.get("additionalProperties") is not False:
            return False
        if part.get("type") == "object" and "properties" not in part:
            return False
    return True


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside ``schema``; names of properties are not mistaken for keywords."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties"):
            for inner in value.values() if isinstance(value, dict) else ():
                yield from _parts(inner)
        elif key in ("items", "additionalProperties", "not", "contains"):
            yield from _parts(value)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for inner in value if isinstance(value, list) else ():
                yield from _parts(inner)


def choose_samples(
    samples: Sequence[Sample], count: int, seed: int, accepts: Callable[[Grammar], bool]
) -> list[Sample]:
    """``count`` plain samples in an order drawn by the seed, all of which the grammar room takes.

    Args:
        accepts: Whether a schema's grammar compiles.

    Raises:
        ConfigError: none is left.
    """
    plain = [sample for sample in samples if is_plain(sample.schema)]
    Random(seed).shuffle(plain)
    chosen: list[Sample] = []
    for sample in plain:
        if len(chosen) == count:
            break
        if accepts(Grammar.json_schema(sample.schema)):
            chosen.append(sample)
    if not chosen:
        raise ConfigError("no schema of the file is plain and accepted: give another --data")
    return chosen


def union_asks(count: int, max_tokens: int) -> list[Ask]:
    """``count`` requests for one of 48 kinds of records that begin alike.

    The kind shows only after three texts, so that up to there all are possible and the matcher
    follows them all: the mask where a text begins costs some hundred times a plain string's. The
    requests' leading numbers differ in length, so that their texts do not all begin in one step.
    """
    string, integer = {"type": "string"}, {"type": "integer"}
    ends = [(f"{event}_number", integer) for event in EVENTS]
    ends += [(f"{event}_date", string) for event in EVENTS]
    alike = {"id": integer} | dict.fromkeys(("name", "city", "text"), string)
    kinds = [
        {
            "type": "object",
            "properties": {**alike, name: value},
            "required": [*alike, name],
            "additionalProperties": False,
        }
        for name, value in ends
    ]
    grammar = Grammar.json_schema({"anyOf": kinds})
    made = []
    for n in range(count):
        event, said = EVENTS[n % len(EVENTS)], QUESTIONS[n % len(QUESTIONS)].partition(".")[0]
        number = "7041392658137"[: 1 + 4 * (n % 4)]
        said = f"id: {number}, name: {NAMES[n % 8]}, city: {CITIES[n % 8]}, text: {said}"
        keys = f"{', '.join(alike)}, {event} number"
        prompt = f"Extract {keys}: {said}, {event} number: {1000 + 37 * n}."
        made.append(Ask(prompt, grammar, max_tokens))
    return made
