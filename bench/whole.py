"""How many outputs are whole where ``max_tokens`` is small.

``python -m bench.whole [--data FILE.jsonl] [--limit N] [--temperature T] [--parallel P] [--quick]
[--json PATH]`` takes schemas (as ``bench.maskbench`` does) and lets each be answered with as many
tokens as its shortest output needs, and 1, 2, 4 … 256 more; with ``complete``, and without. An
output is ``whole`` if it is JSON that is valid by ``jsonschema`` and has no more tokens than asked
for. Under one token fewer than needed the request must be refused. The exit status is 1 where an
output with ``complete`` is not whole, or a request that cannot end is let start.

Fields of the last line, beside those of every record (``bench.common``): ``schemas``, ``refused``
(schemas by no fault of their length), ``untold`` (nothing tells how long their texts are),
``least_tokens`` and ``room_ms`` (time to know it, behind the compile) as
percentiles, ``outputs`` and ``whole`` with ``complete``; ``cut`` (outputs without it that are not
whole), ``narrowed`` (outputs of which a token was narrowed), ``started`` (requests that were let
start with one token fewer than needed), ``broken`` (which outputs are not whole).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bench.common import Run, flags
from bench.json_schema import is_valid
from bench.maskbench import percentiles
from bench.masks import add_flags, entries_of
from overlap_spec import Engine, Grammar
from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.grammar.room.matcher import least_tokens
from overlap_spec.types import Output

MORE = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK = 8
PROMPT = "Write an example."


def least_of(engine: Engine, grammar: Grammar) -> tuple[int | None, float]:
    """The tokens that a grammar's shortest output needs, and the milliseconds that took."""
    compiled = engine.compile(grammar)
    start = time.perf_counter_ns()
    # Until its rules are there, or cannot be made.
    room = engine.compiler.compile(grammar, 0).room
    told = room is not None and room.chart() is not None
    return least_tokens(compiled, 1) if told else None, (time.perf_counter_ns() - start) / 1e6


def is_refused(engine: Engine, grammar: Grammar, tokens: int) -> bool:
    """Whether a request with so few tokens is refused before it starts."""
    if tokens < 1:
        return True
    try:
        engine.generate(PROMPT, grammar, max_tokens=tokens)
    except InvalidRequest as error:
        return error.param == "max_tokens"
    return False


def ask(
    engine: Engine, grammar: Grammar, schema: Any, least: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """An output for each number of tokens, and what became of it."""
    most = [least + more for more in MORE]
    samplings = [{"max_tokens": count, **options} for count in most]
    outputs: list[Output] = engine.generate([PROMPT] * len(most), grammar, samplings)
    return [
        {
            "more": more,
            "tokens": len(output.token_ids),
            "finish_reason": output.finish_reason,
            "narrowed": output.stats.narrowed_tokens,
            "whole": len(output.token_ids) <= count and is_valid(output.text, schema),
        }
        for more, count, output in zip(MORE, most, outputs, strict=True)
    ]


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    told = [sample for sample in samples if sample["least"] is not None]
    with_it = [(s["id"], out) for s in told for out in s["complete"]]
    without = [out for sample in told for out in sample["free"]]
    return {
        "schemas": len(samples),
        "refused": sum(sample["refused"] is not None for sample in samples),
        "untold": [s["id"] for s in samples if s["least"] is None and s["refused"] is None],
        "least_tokens": percentiles([sample["least"] for sample in told]),
        "room_ms": percentiles([sample["room_ms"] for sample in told]),
        "outputs": len(with_it),
        "whole": sum(out["whole"] for _, out in with_it),
        "cut": sum(not out["whole"] for out in without),
        "narrowed": sum(out["narrowed"] > 0 for _, out in with_it),
        "started": [sample["id"] for sample in told if not sample["refuses_fewer"]],
        "broken": [{"id": name, **out} for name, out in with_it if not out["whole"]],
    }


def main(arguments: list[str] | None = None) -> None:
    """Run all and print one record."""
    parser = flags("whole", "how many outputs are whole where there are few tokens for them")
    add_flags(parser)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--parallel", type=int, default=len(MORE), metavar="P")
    options = parser.parse_args(arguments)
    run = Run("whole", options, arguments)
    entries = entries_of(options, QUICK)
    drawn = {"temperature": options.temperature, "seed": options.seed}
    settings: dict[str, Any] = {"complete": True, "mask_deadline_ms": None}
    with Engine(max_running_requests=options.parallel, **settings) as engine, run.progress() as bar:
        task = bar.add_task("schemas", total=len(entries))
        for entry in entries:
            bar.advance(task)
            sample: dict[str, Any] = {"id": entry["id"], "refused": None, "least": None}
            try:
                text = json.dumps(entry["schema"])
                grammar = Grammar.json_schema(text, additional_properties="schema")
                sample["least"], sample["room_ms"] = least_of(engine, grammar)
            except GrammarError as error:
                sample["refused"] = str(error)
            if (least := sample["least"]) is not None:
                sample["refuses_fewer"] = is_refused(engine, grammar, least - 1)
                for name, whether in (("complete", True), ("free", False)):
                    asked = drawn | {"complete": whether}
                    sample[name] = ask(engine, grammar, entry["schema"], least, asked)
            run.sample(**sample)
    record = run.finish(1, **summary(run.samples))
    if record["broken"] or record["started"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
