"""What the clients of ``bench.serving_soak`` ask for, and how their answers are judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema

from bench.workloads import OWN_SCHEMAS, QUESTIONS, json_asks, read_samples

PARAMETERS = {
    "type": "object",
    "properties": {"day": {"enum": ["monday", "friday"]}, "hour": {"type": "integer"}},
    "required": ["day", "hour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
Check = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Wish:
    """A request's body, and whether a finished message is what it asks for."""

    body: dict[str, Any]
    check: Check


class Traffic:
    """Requests by number, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        samples = read_samples(OWN_SCHEMAS)
        self.seed, self.asks = seed, json_asks(samples, 4 * len(samples), 160)

    def wish(self, rng: Random) -> Wish:
        """One request."""
        text = rng.choice(QUESTIONS)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.randint(20, 160),
            "temperature": rng.choice([0.0, 0.0, 1.0]),
            "seed": rng.randrange(1000),
        }
        kind = rng.choice(["json", "json", "json", "regex", "choice", "tool", "free"])
        check: Check = _always
        if kind == "json":
            ask = rng.choice(self.asks)
            assert ask.grammar is not None
            body["messages"] = [{"role": "user", "content": ask.prompt}]
            schema = json.loads(ask.grammar.source)
            form = {"name": "x", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            check = _valid(schema)
        elif kind == "regex":
            pattern = rng.choice([r"\d{4}-\d\d-\d\d", "[a-f]{8}", "(red|blue) [0-9]+ items"])
            body["regex"] = pattern
            check = _matches(pattern)
        elif kind == "choice":
            options = rng.sample(["yes", "no", "maybe", "never", "always"], 3)
            body["structured_outputs"] = {"choice": options}
            check = _one_of(options)
        elif kind == "tool":
            body |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
            check = _calls
        return Wish(body, check)


def _always(_: dict[str, Any]) -> bool:
    return True


def _valid(schema: Any) -> Check:
    def check(message: dict[str, Any]) -> bool:
        jsonschema.validate(json.loads(message["content"]), schema)
        return True

    return check


def _matches(pattern: str) -> Check:
    return lambda message: re.fullmatch(pattern, message["content"]) is not None


def _one_of(options: list[str]) -> Check:
    return lambda message: message["content"] in options


def _calls(message: dict[str, Any]) -> bool:
    (call,) = message["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    return bool(call["function"]["name"] == "note")


def hostile(number: int) -> tuple[str, dict[str, Any]]:
    """A kind of hostile request, and its body; each number's differs from the others."""
    name = f"p{number}"
    recursion: dict[str, Any] = {"type": "object", "properties": {name: {"$ref": "#"}}}
    recursion["required"] = [name]
    nested: dict[str, Any] = {"const": number}
    for _ in range(300):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    rules = "\n".join(f'r{i} ::= r{i + 1} | r{i + 1} "a"' for i in range(10_000))
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("recursion", _schema(recursion)),
        ("nested", _schema(nested)),
        ("maxLength", _schema({"type": "string", "maxLength": 10**9 + number})),
        ("counts", {"regex": f"((a{{1,200}}){{1,200}}){{1,{200 + number}}}"}),
        ("backtracking", {"regex": f"(x+x+)+y{number}"}),
        ("enum", _schema({"enum": [f"{number}-{i:040}" for i in range(2**14 + 2**13)]})),
        ("half enum", _schema({"enum": [f"{number}-{i:040}" for i in range(2**13)]})),
        ("rules", {"ebnf": f'root ::= r0\n{rules}\nr10000 ::= "{number}"'}),
    ]
    kind, body = kinds[number % len(kinds)]
    question = {"role": "user", "content": f"Answer {number}."}
    return kind, {"messages": [question], "max_tokens": 24, **body}


def _schema(schema: Any) -> dict[str, Any]:
    form = {"name": "x", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": form}}
