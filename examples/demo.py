"""A few real inputs through the embedded model: `make demo`.

Every constrained output is parsed and validated against its schema; the demo fails if one is not
valid. Accept length is the number of tokens that one pass of the target yielded, on average.
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
TOOLS = json.loads((HERE / "tools.json").read_text())
EXTRACTIONS = {
    "person": "Extract the person: Maria Lopez is 34 years old and lives in Lisbon.",
    "order": "David Clark ordered 12 units of the desk lamp for $24.50 each.",
    "event": "The Robotics Fair takes place on 2025-03-14 at 18:30 in Harbour Hall, Oslo.",
}
TOOL_PROMPT = "What is the weather in Vienna in celsius?"
QUESTION = (
    "Tom has 3 boxes with 12 pencils each. He gives 10 pencils to his sister. "
    "How many pencils does Tom have left?"
)


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


def show(console: Console, title: str, prompt: str, output: Output, schema: Any = None) -> bool:
    """Print one result; whether it is what was asked for."""
    verdict, good = "free text", output.error is None
    if schema is not None:
        try:
            jsonschema.validate(json.loads(output.text), schema)
            verdict = "valid"
        except (ValueError, jsonschema.ValidationError) as error:
            verdict, good = f"INVALID: {error}", False
    stats = output.stats
    console.print(f"[bold]{title}[/]  {prompt}", highlight=False)
    console.print(f"  [green]{output.text}[/]", highlight=False)
    console.print(
        f"  {verdict}, {stats.output_tokens} tokens, accept length {stats.accept_length:.2f}, "
        f"{stats.tpot_ms:.1f} ms a token\n",
        style="dim",
        highlight=False,
    )
    return good


def main() -> int:
    """Run everything; 0 if all constrained outputs are valid."""
    console = Console()
    started = time.perf_counter()
    with Engine() as engine:
        console.print(f"loaded in {time.perf_counter() - started:.1f} s\n", style="dim")
        good = []
        for name, prompt in EXTRACTIONS.items():
            schema = json.loads((HERE / f"{name}.schema.json").read_text())
            output = engine.generate(prompt, Grammar.json_schema(schema))
            good.append(show(console, name, prompt, output, schema))
        schema = tool_schema(TOOLS)
        output = engine.generate(TOOL_PROMPT, Grammar.json_schema(schema), tools=TOOLS)
        good.append(show(console, "tool call", TOOL_PROMPT, output, schema))
        output = engine.generate(QUESTION, None, SamplingParams(max_tokens=160))
        good.append(show(console, "GSM8K", QUESTION, output))
        hidden = engine.figures.hidden_fraction
    if hidden is not None:
        console.print(f"grammar work hidden under verify: {hidden:.0%}", highlight=False)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
