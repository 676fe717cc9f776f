"""What servers and engines are asked: JSON under schemas, and free text, drawn by nothing but the
arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.engine.arguments import Prompt
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar

OWN_SCHEMAS = Path(__file__).parent / "schemas.jsonl"
LONGEST_FACTS = 500
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


@dataclass(frozen=True)
class Ask:
    """One request of a workload.

    Attributes:
        max_tokens: Bounds its output.
        raw: The prompt is the text itself, not a user's turn: a server is asked for a completion.
        stop: Texts that end the output, of a server.
    """

    prompt: Prompt
    grammar: Grammar | None
    max_tokens: int
    raw: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A schema and an instance that is valid under it."""

    id: str
    schema: dict[str, Any]
    instance: dict[str, Any]


def read_samples(path: Path) -> list[Sample]:
    """Schemas of a ``.jsonl`` file of rows ``{"id", "schema", "tests": [{"valid", "data"}]}``.

    Rows without a valid instance that is an object are left out.

    Raises:
        ConfigError: the file cannot be read as such rows, or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        samples = [(row["id"], row["schema"], row["tests"]) for row in rows]
        valid = [(i, s, [t["data"] for t in tests if t["valid"]]) for i, s, tests in samples]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no schemas with tests: {error!r}") from None
    found = [
        Sample(name, schema, data[0])
        for name, schema, data in valid
        if isinstance(schema, dict) and data and isinstance(data[0], dict) and data[0]
    ]
    if not found:
        raise ConfigError(f"{path} holds no schemas with tests: no row has a valid object")
    return found


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
