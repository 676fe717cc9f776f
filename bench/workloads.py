"""What the benchmarks ask for: JSON under real schemas, in short and long outputs, and free text.

Everything is drawn by the seed and by nothing else: not by what is fast on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.common import ROOT
from overlap_spec.engine.input_processor import Prompt
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar

OWN_SCHEMAS = ROOT / "bench" / "data" / "schemas.jsonl"
SHARED_SCHEMAS = ROOT.parent / "shared" / "data" / "jsonschemabench_dev.jsonl"
LONGEST_SCHEMA = 1500
LONGEST_FACTS = 500
# Bounded and patterned strings compile for seconds on large vocabularies.
SLOW_KEYWORDS = frozenset({"maxLength", "minLength", "pattern", "patternProperties", "format"})
TEMPLATES = (
    "Extract {keys}: {facts}.",
    "{facts}.\nGive {keys} as JSON.",
    "From the text below, get {keys}.\n{facts}.",
    "Which {keys} are mentioned? {facts}.",
)
SYSTEM = "You answer with JSON."
QUESTIONS = (
    "A shelf holds 14 books. Mara adds 3 boxes of 8 books each. How many books are there now?",
    "Repeat: the ferry to the islands leaves at 07:45 from the eastern pier.",
    "Tickets cost 12 dollars, and children pay half. What do 2 adults and 3 children pay?",
    "A tank loses 4 litres an hour. It holds 90 litres. How much is left after 6 hours?",
    "Repeat: please bring the blue folder, two pens and the key of the archive.",
    "Ivo runs 5 miles on each weekday and 9 on Saturday. How many miles does he run in a week?",
    "A farmer packs 156 eggs into boxes of 12. How many boxes does she fill?",
    "Repeat: the code of the garden gate is 4471, and the dog is called Biscuit.",
)
NAMES = ("Anna", "Ivo", "Mara", "Paul", "Lena", "Omar", "Rosa", "Finn")
CITIES = ("Rome", "Oslo", "Lima", "Bern", "Riga", "Cork", "Nice", "Bonn")
EVENTS = (
    "order", "refund", "shipment", "delivery", "invoice", "payment", "booking", "arrival",
    "departure", "repair", "outage", "upgrade", "meeting", "visit", "call", "complaint",
    "transfer", "deposit", "contract", "renewal", "inspection", "reading", "alarm", "backup",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request of a workload; ``max_tokens`` bounds its output."""

    prompt: Prompt
    grammar: Grammar | None
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """A schema and an instance that is valid under it."""

    id: str
    schema: dict[str, Any]
    instance: dict[str, Any]


def read_samples(path: Path | None) -> list[Sample]:
    """Schemas of a ``.jsonl`` file of rows ``{"id", "schema", "tests": [{"valid", "data"}]}``.

    Rows without a valid instance that is an object are left out.

    Args:
        path: None is JSONSchemaBench's development split if it is available, else our own.

    Raises:
        ConfigError: the file cannot be read as such rows.
    """
    if path is None:
        path = SHARED_SCHEMAS if SHARED_SCHEMAS.exists() else OWN_SCHEMAS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        samples = [(row["id"], row["schema"], row["tests"]) for row in rows]
        valid = [(i, s, [t["data"] for t in tests if t["valid"]]) for i, s, tests in samples]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no schemas with tests: {error!r}") from None
    return [
        Sample(name, schema, data[0])
        for name, schema, data in valid
        if isinstance(schema, dict) and data and isinstance(data[0], dict) and data[0]
    ]


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


def facts(instance: dict[str, Any]) -> str:
    """An instance in words: ``port: 80, limits timeout: 7.5``, cut to a prompt's length."""
    words = [f"{' '.join(path)}: {value}" for path, value in _leaves(instance, ())]
    text = ", ".join(words)
    return text if len(text) <= LONGEST_FACTS else text[:LONGEST_FACTS].rsplit(",", 1)[0]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key.replace("_", " ")))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _leaves(item, path)
    elif isinstance(value, list):
        yield path, " and ".join(str(item) for item in value)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def json_asks(
    samples: Sequence[Sample], count: int, max_tokens: int, chat: bool = False
) -> list[Ask]:
    """``count`` requests for JSON, over the samples in turn, no two with the same prompt until
    samples and phrasings run out.

    Args:
        chat: As a list of messages, with a system prompt, instead of one user turn.
    """
    asks = []
    for number in range(count):
        turn, index = divmod(number, len(samples))
        sample, template = samples[index], TEMPLATES[(index + turn) % len(TEMPLATES)]
        keys = ", ".join(key.replace("_", " ") for key in sample.instance)
        text = template.format(keys=keys, facts=facts(sample.instance))
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        prompt: Prompt = turns if chat else text
        asks.append(Ask(prompt, Grammar.json_schema(sample.schema), max_tokens))
    return asks


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
    asks = []
    for n in range(count):
        event, said = EVENTS[n % len(EVENTS)], QUESTIONS[n % len(QUESTIONS)].partition(".")[0]
        number = "7041392658137"[: 1 + 4 * (n % 4)]
        said = f"id: {number}, name: {NAMES[n % 8]}, city: {CITIES[n % 8]}, text: {said}"
        keys = f"{', '.join(alike)}, {event} number"
        prompt = f"Extract {keys}: {said}, {event} number: {1000 + 37 * n}."
        asks.append(Ask(prompt, grammar, max_tokens))
    return asks


def free_asks(count: int, max_tokens: int) -> list[Ask]:
    """``count`` requests without a grammar."""
    return [Ask(QUESTIONS[n % len(QUESTIONS)], None, max_tokens) for n in range(count)]


def mixed_asks(samples: Sequence[Sample], count: int, max_tokens: int) -> list[Ask]:
    """``count`` requests, every other one without a grammar."""
    pairs = zip(
        json_asks(samples, -(-count // 2), max_tokens),
        free_asks(-(-count // 2), max_tokens),
        strict=True,
    )
    return [ask for pair in pairs for ask in pair][:count]
