"""Every drafter on the same requests, beside plain decoding: what is accepted, and what it costs.

``python -m bench.drafters [--model DIR --draft DIR | --model NAME] [--gsm8k FILE] [--spec-bench
FILE] [--checkpoint DRAFTER=DIR …] [--only DRAFTER …] [--over DRAFTER] [--by-hand SETTINGS …]
[--batch N] [--threads N] [--quick] [--json PATH] [--seed S]`` runs each drafter that has a file
(``overlap_spec.config.drafter_names``); ``--only`` takes several in a row, too
(``suffix,eagle3``). ``--over DRAFTER`` has that one in the place of plain decoding: a row over its
better member is the lesser ratio of two runs.

Requests: JSON extraction, each under its own schema; extraction under one schema, where values come
again; GSM8K questions and the first turns of Spec-Bench, from the files given (without one they are
skipped, which the record says); and a document that repeats itself, to be said again. Each drafter
is measured in the rows of :data:`ROWS`: as a chain and as a tree, greedy, and as a chain with
sampling at temperature 1. Each ``--by-hand NAME=VALUE,…`` (``adaptive=auto``, ``overlap=none``)
adds the greedy rows with these engine settings, which what it is over has too.

Drafter and plain decoding take turns, workload by workload, and the one that begins changes with
every repetition; ratios are of such pairs. A pass goes first that is not counted. Lengths are
static where nothing else is said, nothing depends on a clock, and prompts are not cached.

A drafter, or the last of a row, takes its checkpoint from ``--checkpoint``; else ``eagle3`` has the
model's head, and ``draft_model``, at a named size, the embedded target with that size's vocabulary:
since the target is the same function, its acceptance bounds that of any other. One that cannot be
built with what is there is skipped, with the reason.

Fields of the last line, beside those of every record (``bench.common``):
    models: Model → ``dtype``; ``rows``: row → drafter → workload → figures; ``skipped``: drafter →
        why. The figures: ``accept_length``; ``by_position`` (share of verifies whose first, second
        … draft was accepted, with all before it); ``draft_ms``, ``extend_ms`` and ``verify_ms`` a
        step; ``tokens_per_second``; ``ratio`` (over plain decoding or ``--over``, pair by pair);
        ``same_text`` (share of passes whose tokens are that one's).
    missing: Workload → why.
    over, batch, threads.

All of them but ``dtype`` and the reasons are made of the raw lines, by :func:`summary`. Where a row
says something else than what it is over in float32, the exit status is 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from bench.backends.engine import busy_ms
from bench.common import ROOT, Run, command, fail, flags, paired, positive, read_jsonl
from bench.measure import GREEDY, measure
from bench.padded import PRESETS
from bench.targets import add_model_flags, by_hand, model_settings, padded_target, work_folder
from bench.workloads import CITIES, NAMES, Ask
from examples.embedded_model.data import held_out_cases
from overlap_spec.config import EngineConfig, drafter_names
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.worker.site import pick_device, pick_dtype

BASE = "base"
EMBEDDED_NAME = "embedded"
SETTINGS: dict[str, Any] = {
    "adaptive": "static",
    "mask_deadline_ms": None,
    "prefix_cache": False,
    "context_length": 2048,
}


@dataclass(frozen=True)
class Row:
    """How a drafter is run.

    Attributes:
        engine: Engine settings.
        sampling: Sampling of every request.
    """

    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]


VISIT: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "city", "job", "country")},
    "required": ["name", "city", "job", "country"],
    "additionalProperties": False,
}
# Drafters may learn of earlier answers: each pass has a salt of its own, lest they know them all.
LEARNING: dict[str, Any] = {"slots_earlier": True}
CHAIN: dict[str, Any] = {"num_steps": 5}
TREE: dict[str, Any] = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 0}
ROWS: dict[str, Row] = {
    "greedy, chain of 5": Row(CHAIN, GREEDY),
    "greedy, tree of 16": Row(TREE, GREEDY),
    "temperature 1, chain of 5": Row(CHAIN, SAMPLED),
}


def rows_of(settings: Sequence[str] = ()) -> dict[str, Row]:
    """:data:`ROWS`, and those of ``settings`` by hand."""
    shapes = {"chain of 5": CHAIN, "tree of 16": TREE}
    return ROWS | {
        f"greedy, {shape}, {text}": Row(own | by_hand(text), GREEDY)
        for shape, own in shapes.items()
        for text in settings
    }


@dataclass(frozen=True)
class Size:
    """Requests of a workload, most tokens of an answer, and repetitions."""

    requests: int
    tokens: int
    repetitions: int


QUICK = Size(2, 32, 1)
FULL = Size(8, 128, 3)
# Of models that need tenths of a second for a token.
FULL_LARGE = Size(3, 64, 2)


def workloads(
    options: argparse.Namespace, size: Size
) -> tuple[dict[str, list[Ask]], dict[str, str]]:
    """Workloads by name, and why others are not there.

    Raises:
        ConfigError: a file that does not hold what it should.
    """
    cases = held_out_cases(options.seed, size.requests)
    work = {
        "JSON": [Ask(c.prompt, Grammar.json_schema(c.schema), size.tokens) for c in cases],
        "repetitive document": [
            Ask(f"Repeat: {document(n)}", None, size.tokens) for n in range(size.requests)
        ],
    }
    schema = Grammar.json_schema(VISIT)
    work["repeated schema"] = [Ask(visit(n), schema, size.tokens) for n in range(size.requests)]
    missing = {}
    files: dict[str, tuple[Path | None, str, Callable[[Any], str]]] = {
        "GSM8K": (options.gsm8k, "--gsm8k", lambda row: str(row["question"])),
        "Spec-Bench": (options.spec_bench, "--spec-bench", lambda row: str(row["turns"][0])),
    }
    for name, (path, flag, text) in files.items():
        if path is None:
            missing[name] = f"no file given: {flag}"
            continue
        questions = read_jsonl(path, text, flag)
        # Spread over the file, whose rows are in order of their kind.
        step = max(1, len(questions) // size.requests)
        chosen = questions[::step][: size.requests]
        work[name] = [Ask(question, None, size.tokens) for question in chosen]
    return work, missing


def visit(number: int) -> str:
    """A prompt to be read under :data:`VISIT`: of names all are others, of the rest few."""
    name, city = NAMES[number % len(NAMES)], CITIES[number % 2]
    job = ("teacher", "nurse")[number // 2 % 2]
    return f"Extract name, city, job and country. {name} works as a {job} in {city}, Portugal."


def document(number: int) -> str:
    """Sentences that are alike."""
    city = CITIES[number % len(CITIES)]
    lines = (f"{name} from {city} has paid 40 dollars for the trip to {city}." for name in NAMES)
    return " ".join(lines)


def checkpoints(options: argparse.Namespace, weights: dict[str, str]) -> dict[str, str]:
    """Drafter → folder of its checkpoint; what is padded is built where it is not there yet.

    Raises:
        ConfigError: a ``--checkpoint`` that is not ``DRAFTER=DIR``.
    """
    found = {"eagle3": weights["draft"]} if "draft" in weights else {}
    if options.model in PRESETS:
        vocab = PRESETS[options.model][0].vocab
        assert vocab is not None
        target, _ = padded_target(work_folder(options.work), vocab)
        found["draft_model"] = str(target)
    for text in options.checkpoint or ():
        name, sign, folder = text.partition("=")
        if not sign or name not in drafter_names():
            raise ConfigError(
                f"--checkpoint must be DRAFTER=DIR, with one of {', '.join(drafter_names())}: "
                f"{text!r}"
            )
        found[name] = folder
    return found


def drafters_of(text: str) -> str:
    """The type of a flag that names a drafter, or several in a row."""
    known = ("none", *drafter_names())
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(known)}")
    return text


def passed(
    engine: Engine, asks: Sequence[Ask], sampling: Mapping[str, Any], salt: str
) -> dict[str, Any]:
    """One pass over a workload, as raw figures."""
    start_ns = time.perf_counter_ns()
    result = measure(engine, asks, sampling, salt)
    busy = busy_ms(engine, start_ns)
    histograms = [output.stats.accept_histogram for output in result.outputs]
    return {
        **result.raw,
        "histogram": [sum(column) for column in zip_longest(*histograms, fillvalue=0)],
        "draft_ms": busy.get("compute: draft", 0.0) + busy.get("host: propose", 0.0),
        "extend_ms": busy.get("compute: extend", 0.0),
        "verify_ms": busy.get("compute: verify", 0.0),
    }


def run_model(
    run: Run, name: str, weights: dict[str, str], work: dict[str, list[Ask]], repetitions: int
) -> dict[str, str]:
    """Every drafter at one size, in every row, beside what it is over; those skipped, and why."""
    options = run.options
    common = {**SETTINGS, "max_running_requests": options.batch}
    target = {key: value for key, value in weights.items() if key != "draft"}
    folders, skipped = checkpoints(options, weights), dict[str, str]()
    names, rows = options.only or drafter_names(), rows_of(options.by_hand)
    for how in rows.values():
        # A setting that is wrong is told before the first row.
        EngineConfig.build(**{**target, **common, **how.engine, **LEARNING})

    def engine_of(drafter: str, how: Row) -> Engine:
        folder = folders.get(drafter.rpartition(",")[2])
        draft = {} if folder is None else {"draft": folder}
        return Engine(**{**target, **draft, **common, **how.engine, **LEARNING}, algorithm=drafter)

    with run.progress() as progress:
        bar = progress.add_task(name, total=len(names) * len(rows) * len(work) * repetitions)
        for row, how in rows.items():
            with engine_of(options.over, how) as base:
                for drafter in names:
                    progress.update(bar, description=f"{name}, {drafter}, {row}")
                    try:
                        engine = engine_of(drafter, how)
                    except (ConfigError, CheckpointError) as error:
                        # A record that is kept tells no folders of the machine that made it.
                        skipped[drafter] = str(error).replace(f"{ROOT}/", "")
                        continue
                    with engine:
                        sides = {BASE: base, drafter: engine}
                        for workload, repetition, taken in turns(sides, work, how, repetitions):
                            where = {"row": row, "drafter": drafter, "workload": workload}
                            for side, raw in taken.items():
                                run.sample(
                                    model=name, **where, side=side, repetition=repetition, **raw
                                )
                            progress.advance(bar)
    return skipped


def turns(
    sides: dict[str, Engine], work: dict[str, list[Ask]], how: Row, repetitions: int
) -> Iterator[tuple[str, int, dict[str, dict[str, Any]]]]:
    """Workload, repetition, and each side's pass, after one that is not counted."""
    for engine in sides.values():
        for asks in work.values():
            for ask in asks:
                if ask.grammar is not None:
                    engine.compile(ask.grammar)
            measure(engine, asks[:1], how.sampling)
    for repetition in range(repetitions):
        order = list(sides) if repetition % 2 == 0 else list(sides)[::-1]
        for workload, asks in work.items():
            yield (
                workload,
                repetition,
                {s: passed(sides[s], asks, how.sampling, f"pass {repetition}") for s in order},
            )


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Model → row → drafter → workload → figures, made of the samples."""
    models: dict[str, Any] = {}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        key = tuple(sample[part] for part in ("model", "row", "drafter", "workload"))
        groups.setdefault(key, []).append(sample)
    for (model, row, drafter, workload), own in groups.items():
        by_drafter = models.setdefault(model, {}).setdefault(row, {})
        by_drafter.setdefault(drafter, {})[workload] = figures(own, drafter)
    return models


def figures(samples: Sequence[dict[str, Any]], drafter: str) -> dict[str, Any]:
    """Figures of one drafter's passes over a workload, and of those beside them."""
    ordered = sorted(samples, key=lambda sample: int(sample["repetition"]))
    others = [sample for sample in ordered if sample["side"] == BASE]
    own = [sample for sample in ordered if sample["side"] == drafter]
    verifies, steps = sum(s["verifies"] for s in own), sum(s["steps"] for s in own)
    columns = zip_longest(*(s["histogram"] for s in own), fillvalue=0)
    histogram = [sum(column) for column in columns]
    rates = [s["output_tokens"] / s["seconds"] for s in own]
    base = [s["output_tokens"] / s["seconds"] for s in others]
    same = [a["output_sha256"] == b["output_sha256"] for a, b in zip(own, others, strict=True)]
    return {
        "accept_length": sum(s["verified_tokens"] for s in own) / verifies if verifies else None,
        "by_position": [sum(histogram[at:]) / verifies for at in range(1, len(histogram))],
        **{n: sum(s[n] for s in own) / steps for n in ("draft_ms", "extend_ms", "verify_ms")},
        "tokens_per_second": sum(s["output_tokens"] for s in own) / sum(s["seconds"] for s in own),
        "ratio": paired(rates, base),
        "same_text": sum(same) / len(same),
    }


def faults(models: dict[str, Any]) -> list[str]:
    """Rows that did not keep the text, in float32, in words."""
    return [
        f"{model}, {row}, {drafter}, {workload}: text is not that of what it is over"
        for model, entry in models.items()
        for row, by_drafter in entry["rows"].items()
        for drafter, by_workload in by_drafter.items()
        for workload, found in by_workload.items()
        if entry["dtype"] == "float32" and found["same_text"] < 1
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("drafters", "Every drafter beside plain decoding.")
    add_model_flags(parser)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K questions, .jsonl")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench questions, .jsonl")
    parser.add_argument("--checkpoint", action="append", metavar="DRAFTER=DIR", help="a drafter's")
    parser.add_argument("--only", nargs="+", type=drafters_of, help="these, or rows, alone")
    parser.add_argument("--over", type=drafters_of, default="none", help="in place of plain")
    parser.add_argument(
        "--by-hand", action="append", default=[], metavar="NAME=VALUE,…", help="more rows"
    )
    parser.add_argument("--batch", type=positive, default=1, help="requests at once (default 1)")
    parser.add_argument("--threads", type=positive, default=1, help="of a pass (default 1)")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("drafters", options, arguments)
    torch.set_num_threads(options.threads)
    weights = model_settings(options)
    config = EngineConfig.build(**weights)
    name = EMBEDDED_NAME if options.model is None else Path(options.model).name
    size = QUICK if options.quick else FULL if options.model is None else FULL_LARGE
    work, missing = workloads(options, size)
    skipped = run_model(run, name, weights, work, size.repetitions)
    dtype = str(pick_dtype(config, pick_device(config.device))).removeprefix("torch.")
    rows = summary(run.samples).get(name, {})
    models = {name: {"dtype": dtype, "skipped": skipped, "rows": rows}}
    given = {"over": options.over, "batch": options.batch, "threads": options.threads}
    run.finish(size.repetitions, models=models, missing=missing, **given)
    if wrong := faults(models):
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
