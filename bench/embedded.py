"""What the embedded model can do: extraction under a grammar, and the draft head's accept length.

``python -m bench.embedded [--cases N] [--data GSM8K.jsonl]`` runs held-out cases through the engine
with the schema's grammar on: phrasings of the training families with fillers that training never
saw, and templates that training never saw. Exact: the parsed object is the answer; fields: share of
top-level fields that are. Accept length: tokens a verify emitted, over verifies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import Run, flags, rounded
from overlap_spec import Engine, Grammar, Output, SamplingParams
from overlap_spec.training.cases import Case
from overlap_spec.training.data import held_out_cases

DRAFTS: dict[str, dict[str, Any]] = {
    "chain of 5": {"num_steps": 5},
    "tree of 16, top-k 4": {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16},
}
SAMPLE_QUESTIONS = [
    "Tom has 3 boxes with 12 pencils each. He gives 10 away. How many pencils are left?",
    "A ticket costs $8. How much do 7 tickets cost?",
]


def accept_length(outputs: Sequence[Output]) -> float:
    """Tokens per verify over all outputs."""
    verifies = sum(o.stats.verifies for o in outputs)
    return sum(o.stats.verified_tokens for o in outputs) / max(verifies, 1)


def score(cases: Sequence[Case], outputs: Sequence[Output]) -> dict[str, float]:
    """Shares over cases: finished and valid, exact, and of fields."""
    exact = fields = total = done = 0
    for case, output in zip(cases, outputs, strict=True):
        found = output.parsed if isinstance(output.parsed, dict) else {}
        done += output.finish_reason == "stop"
        exact += found == case.answer
        total += len(case.answer)
        fields += sum(found.get(key) == value for key, value in case.answer.items())
    return {"finished": done / len(cases), "exact": exact / len(cases), "fields": fields / total}


def questions(path: Path | None, count: int) -> list[str]:
    """GSM8K questions, or the benchmark's own where there is no file."""
    if path is None or not path.exists():
        return SAMPLE_QUESTIONS
    return [json.loads(line)["question"] for line in path.read_text().splitlines()[:count]]


def main(arguments: list[str] | None = None) -> None:
    """Run all and print one record."""
    parser = flags("embedded", "accuracy and accept length of the embedded model")
    parser.add_argument("--cases", type=int, default=300, help="of each kind (default 300)")
    parser.add_argument("--data", type=Path, help="GSM8K test split, .jsonl")
    options = parser.parse_args(arguments)
    run = Run("embedded", options, arguments)
    count = 40 if options.quick else options.cases
    kinds = {kind: held_out_cases(options.seed, count, kind) for kind in ("seen", "unseen")}
    asked = questions(options.data, 16 if options.quick else 64)
    results: dict[str, Any] = {}
    with run.progress() as progress:
        task = progress.add_task("embedded", total=len(DRAFTS) * 3)
        for name, settings in DRAFTS.items():
            with Engine(adaptive="static", mask_deadline_ms=None, **settings) as engine:
                figures: dict[str, Any] = {}
                for kind, cases in kinds.items():
                    outputs = engine.generate(
                        [c.prompt for c in cases],
                        [Grammar.json_schema(c.schema) for c in cases],
                        SamplingParams(temperature=0.0, max_tokens=400),
                    )
                    figures[kind] = score(cases, outputs) | {
                        "templates": len({c.template_id for c in cases}),
                        "accept_length": accept_length(outputs),
                    }
                    for case, output in zip(cases, outputs, strict=True):
                        run.sample(
                            draft=name, kind=kind, template=case.template_id, text=output.text,
                            answer=case.answer, verifies=output.stats.verifies,
                            verified_tokens=output.stats.verified_tokens,
                        )  # fmt: skip
                    progress.advance(task)
                outputs = engine.generate(asked, None, SamplingParams(max_tokens=160))
                figures["gsm8k_accept_length"] = accept_length(outputs)
                progress.advance(task)
            results[name] = rounded(figures)
    run.finish(1, cases=count, drafts=results)


if __name__ == "__main__":
    main()
