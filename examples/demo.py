"""A few real inputs through the embedded model, plain and with everything: `make demo`.

Of each kind in inputs.json the first input is run, once plain (no drafts, grammar after each pass)
and once as the engine does by default. "Valid" means that a constrained output was parsed and
validated against its constraint; "right", that it says what the text says. The demo fails if one
is not, or if the two texts differ. ``--json`` prints one JSON line an input instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console
from rich.table import Table

from overlap_spec import Engine, Grammar, Output, SamplingParams

HERE = Path(__file__).parent
INPUTS = json.loads((HERE / "inputs.json").read_text())
TOOLS = json.loads((HERE / "tools.json").read_text())
STATUS = ["pending", "shipped", "delivered", "cancelled"]


def tool_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """JSON schema of a call of one of ``tools``."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"]["parameters"],
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"anyOf": calls}


def constraint(kind: str) -> dict[str, Any] | list[str] | None:
    """What outputs of a kind of input are held to: a schema, a list of choices, or nothing."""
    if kind == "status":
        return STATUS
    if kind == "tool call":
        return tool_schema(TOOLS)
    if kind == "free text":
        return None
    schema: dict[str, Any] = json.loads((HERE / f"{kind}.schema.json").read_text())
    return schema


def run(engine: Engine, kind: str, prompt: str) -> Output:
    """The greedy answer to an input of a kind."""
    rule = constraint(kind)
    grammar = None
    if rule is not None:
        grammar = Grammar.choice(rule) if isinstance(rule, list) else Grammar.json_schema(rule)
    tools = TOOLS if kind == "tool call" else None
    return engine.generate(prompt, grammar, SamplingParams(max_tokens=160), tools=tools)


def check(kind: str, text: str, answer: Any) -> tuple[bool, bool]:
    """Whether an output is valid under its constraint, and whether it is the answer."""
    rule = constraint(kind)
    if rule is None or isinstance(rule, list):
        return rule is None or text in rule, text == answer
    try:
        value = json.loads(text)
        jsonschema.validate(value, rule)
    except (ValueError, jsonschema.ValidationError):
        return False, False
    return True, value == answer


def compare(plain: Engine, engine: Engine, kind: str) -> dict[str, Any]:
    """The first input of a kind through both engines, after one round that fills their caches."""
    prompt, answer = INPUTS[kind][0]["prompt"], INPUTS[kind][0]["answer"]
    for each in (plain, engine):
        run(each, kind, prompt)
    without, output = run(plain, kind, prompt), run(engine, kind, prompt)
    valid, right = check(kind, output.text, answer)
    stats = output.stats
    return {
        "kind": kind,
        "prompt": prompt,
        "answer": answer,
        "text": output.text,
        "valid": valid,
        "right": right,
        "same_text": output.token_ids == without.token_ids,
        "tokens": stats.output_tokens,
        "passes_plain": without.stats.verifies,
        "passes": stats.verifies,
        "tokens_per_s_plain": round(1e3 / without.stats.tpot_ms, 1),
        "tokens_per_s": round(1e3 / stats.tpot_ms, 1),
        "accept_length": round(stats.accept_length, 2),
    }


def show(console: Console, found: list[dict[str, Any]]) -> None:
    """The answers, and how fast both engines wrote them."""
    for one in found:
        told = "" if one["kind"] == "free text" else "valid, " if one["valid"] else "INVALID, "
        told += "right" if one["right"] else f"WRONG, expected {json.dumps(one['answer'])}"
        told += "" if one["same_text"] else ", NOT the text of plain decoding"
        console.print(f"[bold]{one['kind']}[/]  {one['prompt']}", highlight=False)
        console.print(one["text"], style="green", highlight=False, markup=False)
        console.print(f"{told}\n", style="dim", highlight=False, markup=False)
    table = Table(
        "", "tokens", "passes,\nplain", "with\ndrafts", "tokens/s,\nplain", "with\ndrafts"
    )
    table.add_column("accept\nlength")
    for one in found:
        counts = (str(one[name]) for name in ("tokens", "passes_plain", "passes"))
        rates = (f"{one[name]:.0f}" for name in ("tokens_per_s_plain", "tokens_per_s"))
        table.add_row(one["kind"], *counts, *rates, f"{one['accept_length']:.2f}")
    console.print(table)
    console.print(
        "Accept length is how many tokens one pass of the model gave: drafts that it agreed with, "
        "and one of its own.",
        style="dim",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run everything; 0 if all outputs are valid, right and those of plain decoding."""
    parser = argparse.ArgumentParser(prog="demo", description="Real inputs, plain and drafted.")
    parser.add_argument("--json", action="store_true", help="one JSON line an input")
    as_json = parser.parse_args(arguments).json
    with Engine(algorithm="none", overlap="none") as plain, Engine() as engine:
        found = [compare(plain, engine, kind) for kind in INPUTS]
    if as_json:
        for one in found:
            print(json.dumps(one))
    else:
        show(Console(), found)
    return 0 if all(one["valid"] and one["right"] and one["same_text"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
