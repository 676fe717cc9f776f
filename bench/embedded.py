"""What the embedded model can do: answers under a grammar by kind, and the head's accept length.

``python -m bench.embedded [--cases N] [--data GSM8K.jsonl]`` runs cases through the engine,
greedily, with fillers that training never saw: extractions and tool calls in phrasings of the
training families, in held-out ones and in such as were written when training had ended, extractions
of texts made by grammar, and questions about a text; and a hundred sentences in ten domains that
were written by hand (``bench/data/open.jsonl``). Exact: the parsed object is the answer; fields:
share of top-level fields that are. Accept length: tokens a verify emitted, over verifies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bench.common import Run, command, flags, read_jsonl
from bench.gsm8k import OWN_QUESTIONS, read_rows
from bench.targets import add_model_flags, model_settings
from examples.embedded_model.cases import Case, object_schema
from examples.embedded_model.data import CaseKind, held_out_cases, held_out_choices, prompt_text
from examples.embedded_model.questions import Choice
from overlap_spec import Engine, Grammar, Output, SamplingParams

DRAFTS: dict[str, dict[str, Any]] = {
    "chain of 5": {"num_steps": 5},
    "tree of 16, top-k 4": {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16},
}
KINDS: dict[str, tuple[CaseKind | Literal["open"], ...]] = {
    "chain of 5": ("seen", "unseen", "fresh", "open", "seen_tools", "unseen_tools", "wide"),
    "tree of 16, top-k 4": ("seen", "unseen"),
}
OPEN = Path(__file__).parent / "data" / "open.jsonl"
JSON_TYPES = {str: "string", int: "integer", float: "number"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=400)


def open_cases() -> list[Case]:
    """The sentences of ``open.jsonl``: each alone is the prompt, its answer's types the schema."""

    def case(row: dict[str, Any]) -> Case:
        types = {name: {"type": JSON_TYPES[type(v)]} for name, v in row["answer"].items()}
        return Case(row["prompt"], object_schema(types), row["answer"], f"open:{row['domain']}")

    return read_jsonl(OPEN, case, "the cases,")


def accept_length(outputs: Sequence[Output]) -> float:
    """Tokens per verify over all outputs."""
    verifies = sum(o.stats.verifies for o in outputs)
    return sum(o.stats.verified_tokens for o in outputs) / max(verifies, 1)


def score(cases: Sequence[Case], outputs: Sequence[Output]) -> dict[str, Any]:
    """Shares over cases: finished and valid, exact, of fields."""
    exact = fields = total = done = 0
    for case, output in zip(cases, outputs, strict=True):
        found = output.parsed if isinstance(output.parsed, dict) else {}
        done += output.finish_reason == "stop"
        exact += found == case.answer
        total += len(case.answer)
        fields += sum(found.get(key, ...) == value for key, value in case.answer.items())
    return {
        "finished": done / len(cases),
        "exact": exact / len(cases),
        "fields": fields / total,
    }


def prompt_of(engine: Engine, case: Case) -> str | list[int]:
    """A case's user turn; with tools the whole prompt in tokens, since each case has its own."""
    if not case.tools:
        return case.prompt
    ids: list[int] = engine.tokenizer.encode(prompt_text(case))
    return ids


def extractions(
    run: Run, engine: Engine, draft: str, kind: str, cases: Sequence[Case]
) -> dict[str, Any]:
    """Figures of extractions or tool calls under their schemas."""
    outputs = engine.generate(
        [prompt_of(engine, c) for c in cases],
        [Grammar.json_schema(c.schema) for c in cases],
        GREEDY,
    )
    for case, output in zip(cases, outputs, strict=True):
        run.sample(
            draft=draft, kind=kind, template=case.template_id, prompt=case.prompt,
            text=output.text, answer=case.answer, verifies=output.stats.verifies,
            verified_tokens=output.stats.verified_tokens,
        )  # fmt: skip
    return score(cases, outputs) | {
        "templates": len({c.template_id for c in cases}),
        "accept_length": accept_length(outputs),
    }


def choices(run: Run, engine: Engine, draft: str, cases: Sequence[Choice]) -> dict[str, float]:
    """Figures of questions about a text, each under its own list of answers."""
    outputs = engine.generate(
        [c.prompt for c in cases], [Grammar.choice(list(c.options)) for c in cases], GREEDY
    )
    for case, output in zip(cases, outputs, strict=True):
        run.sample(
            draft=draft, kind="choice", template=case.template_id, prompt=case.prompt,
            text=output.text, answer=case.answer,
        )  # fmt: skip
    right = sum(o.text == case.answer for case, o in zip(cases, outputs, strict=True))
    return {"exact": right / len(cases)}


def free(engine: Engine, cases: Sequence[Case]) -> dict[str, float]:
    """Share of answers without a grammar that are JSON objects."""
    outputs = engine.generate([c.prompt for c in cases], None, GREEDY)
    valid = 0
    for output in outputs:
        try:
            valid += isinstance(json.loads(output.text), dict)
        except ValueError:
            continue
    return {"json": valid / len(cases), "accept_length": accept_length(outputs)}


@command
def main(arguments: Sequence[str] | None) -> None:
    """Run all and print one record."""
    parser = flags("embedded", "accuracy and accept length of the embedded model")
    parser.add_argument("--cases", type=int, default=300, help="of each kind (default 300)")
    parser.add_argument("--data", type=Path, default=OWN_QUESTIONS, help="GSM8K rows, .jsonl")
    add_model_flags(parser)
    options = parser.parse_args(arguments)
    run = Run("embedded", options, arguments)
    count = 40 if options.quick else options.cases
    asked = [row.question for row in read_rows(options.data)[: 16 if options.quick else 64]]
    weights = model_settings(options)
    results: dict[str, Any] = {}
    with run.progress() as progress:
        total = sum(len(kinds) + 1 for kinds in KINDS.values()) + 2
        task = progress.add_task("embedded", total=total)
        for name, settings in DRAFTS.items():
            with Engine(adaptive="static", mask_deadline_ms=None, **weights, **settings) as engine:
                figures: dict[str, Any] = {}
                for kind in KINDS[name]:
                    if kind == "open":
                        cases = open_cases()[:count]
                    else:
                        cases = held_out_cases(options.seed, count, kind)
                    figures[kind] = extractions(run, engine, name, kind, cases)
                    progress.advance(task)
                outputs = engine.generate(asked, None, SamplingParams(max_tokens=160))
                figures["gsm8k_accept_length"] = accept_length(outputs)
                progress.advance(task)
                if name == "chain of 5":
                    drawn = held_out_choices(options.seed, count)
                    figures["choice"] = choices(run, engine, name, drawn)
                    progress.advance(task)
                    figures["free"] = free(engine, held_out_cases(options.seed + 1, count, "seen"))
                    progress.advance(task)
            results[name] = figures
    run.finish(1, cases=count, drafts=results)


if __name__ == "__main__":
    main()
