"""JSON under schemas: how much of it is valid, what the constraint costs, by grammar backend.

``python -m bench.json_schema [--data FILE] [--backend NAME …] [--rows N] [--parallel P] [--model
DIR --draft DIR] [--quick] [--json PATH] [--seed S]`` draws rows of the file (``{"id", "schema",
"tests"}``; JSONSchemaBench's form; by default our own), asks for each row's valid instance in
words, and lets every backend answer under the row's schema, and without it, chunk by chunk in turn:
the backend that begins changes with every chunk. Rows that a backend refuses are counted; what is
compared are the rows that all of them take. Every output is checked with ``jsonschema``; the exit
status is 1 where one that ended by itself under its grammar is not valid.

Fields of the last line, beside those of every record (``bench.common``):
    backends: Backend → ``taken``, ``refused``, ``compile_ms`` (percentiles, cold; with
        ``worker_start_ms``, the first grammar of all), ``ratio_tpot`` and ``ratio_step``
        (constrained over unconstrained, chunk by chunk: of a token, which accept lengths move
        too, and of a step), and ``constrained`` and ``unconstrained``, each with the figures of
        ``bench.backends.base.figures`` and ``step_ms``, ``valid_share`` (of those that ended by
        themselves), ``valid_of_all``, ``exact_keys`` (share of all whose top-level keys are those
        of the row's instance). The schema is not in the prompt. Constrained also:
        ``grammar_ms_per_step`` (accepting and masks), ``exposed_ms_per_step``,
        ``hidden_fraction``.
    equal: Share of rows with the same constrained text on all backends.
    refusals: Backend → row → why.
    rows, compared, parallel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from jsonschema import validators

from bench.backends.base import Task, figures, percentiles, tpot_ms
from bench.backends.engine import EngineSystem, takes
from bench.common import Run, command, fail, flags, mean, paired, positive
from bench.targets import add_model_flags, model_settings
from bench.workloads import OWN_SCHEMAS, Sample, json_asks, read_samples
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError

BACKENDS = ("xgrammar", "llguidance", "outlines", "auto")
CHUNKS = 6


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that is valid under a schema, by ``jsonschema``."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    kind = validators.validator_for(schema, validators.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def keys_of(text: str) -> list[str] | None:
    """The top-level keys of a text that is a JSON object; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return sorted(value) if isinstance(value, dict) else None


def open_engines(
    stack: ExitStack, options: argparse.Namespace, weights: dict[str, str]
) -> dict[str, EngineSystem]:
    """An engine for each backend."""
    settings: dict[str, Any] = {
        "adaptive": "static",
        "additional_properties": "schema",
        "overlap": "once-sync",
        "max_running_requests": options.parallel,
        "mask_deadline_ms": None,
        # A prompt must cost the same with a grammar and without one.
        "prefix_cache": False,
    }
    settings |= weights
    systems = {}
    for name in options.backend:
        engine = stack.enter_context(Engine(grammar_backend=name, **settings))
        systems[name] = EngineSystem(engine, f"grammar backend {name}")
    return systems


def compile_all(systems: dict[str, EngineSystem], samples: Sequence[Sample], run: Run) -> list[str]:
    """Compile every row's schema on every backend; ids of the rows that all of them take."""
    taken = {sample.id: 0 for sample in samples}
    with run.progress() as progress:
        bar = progress.add_task("compile", total=len(systems) * len(samples))
        for name, system in systems.items():
            # Starts the workers, which is no grammar's fault.
            ms, error = takes(system, {"enum": ["yes", "no"]})
            run.sample(kind="start", backend=name, compile_ms=ms, error=error)
            for sample in samples:
                ms, error = takes(system, sample.schema)
                run.sample(kind="compile", backend=name, row=sample.id, compile_ms=ms, error=error)
                taken[sample.id] += error is None
                progress.advance(bar)
    return [row for row, count in taken.items() if count == len(systems)]


def ask_all(systems: dict[str, EngineSystem], samples: Sequence[Sample], run: Run) -> None:
    """Every row on every backend, under its schema and without."""
    options, names = run.options, list(systems)
    asks = json_asks(samples, len(samples), options.max_tokens)
    tasks = [
        Task(str(ask.prompt), sample.schema, ask.max_tokens)
        for ask, sample in zip(asks, samples, strict=True)
    ]
    size = max(options.parallel, -(-len(tasks) // CHUNKS))
    starts = range(0, len(tasks), size)
    with run.progress() as progress:
        bar = progress.add_task("warm-up", total=2 * len(starts) * len(names))
        for system in systems.values():
            system.run([replace(task, max_tokens=8) for task in tasks[:size]], options.parallel)
        for chunk, start in enumerate(starts):
            turn = chunk % len(names)
            part = tasks[start : start + size]
            for name in names[turn:] + names[:turn]:
                progress.update(bar, description=f"chunk {chunk + 1} of {len(starts)}, {name}")
                for constrained in (True, False) if chunk % 2 == 0 else (False, True):
                    progress.advance(bar)
                    key = {"backend": name, "constrained": constrained, "chunk": chunk}
                    asked = part if constrained else [replace(task, schema=None) for task in part]
                    raw = systems[name].run(asked, options.parallel).raw()
                    for sample, reply in zip(samples[start:], raw["replies"], strict=False):
                        reply["row"] = sample.id
                        reply["valid"] = is_valid(reply["text"], sample.schema)
                        reply["exact_keys"] = keys_of(reply["text"]) == sorted(sample.instance)
                    run.sample(kind="answers", **key, **raw)


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    names = list(dict.fromkeys(s["backend"] for s in samples if s["kind"] == "compile"))
    backends: dict[str, Any] = {}
    refusals: dict[str, dict[str, str]] = {}
    for name in names:
        mine = [s for s in samples if s["backend"] == name]
        compiled = [s for s in mine if s["kind"] == "compile"]
        refusals[name] = {s["row"]: s["error"] for s in compiled if s["error"] is not None}
        answers = sorted((s for s in mine if s["kind"] == "answers"), key=lambda s: s["chunk"])
        with_grammar = [s for s in answers if s["constrained"]]
        without = [s for s in answers if not s["constrained"]]
        backends[name] = {
            "taken": len(compiled) - len(refusals[name]),
            "refused": len(refusals[name]),
            "worker_start_ms": next(s["compile_ms"] for s in mine if s["kind"] == "start"),
            "compile_ms": percentiles(s["compile_ms"] for s in compiled),
            "ratio_tpot": paired(
                [_chunk_tpot(s) for s in with_grammar], [_chunk_tpot(s) for s in without]
            ),
            "ratio_step": paired(
                [s["seconds"] / s["steps"] for s in with_grammar],
                [s["seconds"] / s["steps"] for s in without],
            ),
            "constrained": _figures(with_grammar) | _grammar_figures(with_grammar),
            "unconstrained": _figures(without),
        }
    return {"backends": backends, "refusals": refusals, "equal": _equal(samples)}


def _equal(samples: Sequence[dict[str, Any]]) -> float:
    """Share of rows with the same constrained text on all backends."""
    texts: dict[str, set[str]] = {}
    for sample in samples:
        if sample["kind"] == "answers" and sample["constrained"]:
            for reply in sample["replies"]:
                texts.setdefault(reply["row"], set()).add(reply["text"])
    return sum(len(said) == 1 for said in texts.values()) / len(texts)


def _figures(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    replies = [reply for batch in batches for reply in batch["replies"]]
    ended = [reply for reply in replies if reply["finish_reason"] == "stop"]
    return {
        **figures(batches),
        "step_ms": 1e3 * sum(b["seconds"] for b in batches) / sum(b["steps"] for b in batches),
        "valid_share": sum(r["valid"] for r in ended) / len(ended) if ended else None,
        "valid_of_all": sum(r["valid"] for r in replies) / len(replies),
        "exact_keys": sum(r["exact_keys"] for r in replies) / len(replies),
    }


def _grammar_figures(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = sum(batch["steps"] for batch in batches)
    grammar_ms = sum(batch["grammar_ms"] for batch in batches)
    exposed_ms = sum(batch["exposed_ms"] for batch in batches)
    return {
        "grammar_ms_per_step": grammar_ms / steps,
        "exposed_ms_per_step": exposed_ms / steps,
        "hidden_fraction": max(0.0, 1 - exposed_ms / grammar_ms) if grammar_ms else None,
    }


def _chunk_tpot(batch: dict[str, Any]) -> float:
    return mean(ms for ms in map(tpot_ms, batch["replies"]) if ms is not None)


def faults(record: dict[str, Any]) -> list[str]:
    """What a record says that must not be, in words."""
    found = []
    for name, entry in record["backends"].items():
        side = entry["constrained"]
        if side["valid_share"] is not None and side["valid_share"] < 1:
            found.append(f"{name}: only {side['valid_share']:.4f} of the finished are valid")
        failed = side["failed"] + entry["unconstrained"]["failed"]
        if failed:
            found.append(f"{name}: {failed} requests ended with an error")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("json_schema", "JSON under schemas, by grammar backend.")
    parser.add_argument("--data", type=Path, default=OWN_SCHEMAS, help="rows of schemas, .jsonl")
    parser.add_argument("--backend", action="append", help=f"one or more of {', '.join(BACKENDS)}")
    parser.add_argument("--rows", type=positive, help="rows that are drawn; 64, or 8 with --quick")
    parser.add_argument("--parallel", type=positive, default=4, help="requests at once (default 4)")
    parser.add_argument("--max-tokens", type=positive, help="256, or 96 with --quick")
    add_model_flags(parser)
    options = parser.parse_args(arguments)
    options.rows = options.rows or (8 if options.quick else 64)
    options.max_tokens = options.max_tokens or (96 if options.quick else 256)
    options.backend = list(dict.fromkeys(options.backend or BACKENDS))
    return options


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("json_schema", options, arguments)
    torch.set_num_threads(1)
    samples = read_samples(options.data)
    Random(options.seed).shuffle(samples)
    samples = samples[: options.rows]
    with ExitStack() as stack:
        systems = open_engines(stack, options, model_settings(options))
        common = set(compile_all(systems, samples, run))
        chosen = [sample for sample in samples if sample.id in common]
        if not chosen:
            raise ConfigError("no row is taken by all backends: give other --data or --backend")
        ask_all(systems, chosen, run)
    record = run.finish(
        len({sample["chunk"] for sample in run.samples if sample["kind"] == "answers"}),
        **summary(run.samples),
        rows=len(samples),
        compared=len(chosen),
        parallel=options.parallel,
        data=options.data.name,
    )
    if wrong := faults(record):
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
