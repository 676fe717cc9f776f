"""A few real inputs through the embedded model: `make demo`.

Of each kind in inputs.json the first input is run. "Valid" means that a constrained output was
parsed and validated against its constraint; "right", that it says what the text says. The demo
fails if one is not. Accept length is the number of tokens that one pass of the target yielded, on
average.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console

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


def show(console: Console, kind: str, prompt: str, answer: Any, output: Output) -> bool:
    """Print one result; whether it is valid and right."""
    valid, right = check(kind, output.text, answer)
    stats = output.stats
    console.print(f"[bold]{kind}[/]  {prompt}", highlight=False)
    console.print(output.text, style="green", highlight=False, markup=False)
    told = "" if kind == "free text" else "valid, " if valid else "INVALID, "
    told += "right" if right else f"WRONG, expected {json.dumps(answer)}"
    console.print(
        f"{told}; {stats.output_tokens} tokens, accept length {stats.accept_length:.2f}, "
        f"{stats.tpot_ms:.1f} ms a token\n",
        style="dim",
        highlight=False,
        markup=False,
    )
    return valid and right


def main() -> int:
    """Run everything; 0 if all outputs are valid and right."""
    console = Console()
    started = time.perf_counter()
    with Engine() as engine:
        console.print(f"loaded in {time.perf_counter() - started:.1f} s\n", style="dim")
        good = []
        for kind, inputs in INPUTS.items():
            prompt, answer = inputs[0]["prompt"], inputs[0]["answer"]
            good.append(show(console, kind, prompt, answer, run(engine, kind, prompt)))
        hidden = engine.figures.hidden_fraction
    if hidden is not None:
        console.print(f"grammar work hidden under verify: {hidden:.0%}", highlight=False)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
