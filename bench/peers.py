"""The same work through this engine and through what a user would take instead, in one run.

``python -m bench.peers [--server NAME=URL …] [--model DIR --draft DIR] [--repetitions N] [--cases
N] [--max-tokens N] [--quick] [--json PATH] [--seed S]`` gives every system the same checkpoint,
prompts (as tokens), JSON schemas and limits: extraction cases with held-out fillers, whose answers
differ in length. Two workloads: the cases one at a time (batch 1), and 16 at once (batch 16).
Systems take turns within each repetition, and the one that begins changes with every repetition.
Grammars are compiled before, one pass over everything goes first and is not counted, and prompts
are not cached. All are greedy, in float32, with one thread for torch's own operations; the engine's
streams and its grammar lane are threads beside it, as always.

- ``overlap-spec``: the engine at its defaults; ``overlap-spec plain``: without drafts.
- ``transformers + xgrammar``, ``transformers assisted``, ``outlines``: see ``how`` in the record.
- vLLM, SGLang and llama.cpp are measured through their servers, which must serve the same
  checkpoint: ``--server vllm=http://…``. Without one they are missing, not zero.

Fields of the last line, beside those of every record (``bench.common``):
    workloads: ``batch 1`` and ``batch 16`` → system → the figures of
        ``bench.backends.base.figures``, ``valid_share`` (of those that ended by themselves, by
        ``jsonschema``), ``same_text`` (share of texts that are overlap-spec's),
        ``ratio`` (overlap-spec's tokens per second over this system's, repetition by repetition)
        and, of the engine, ``busy_ms_per_step``: stream and span → time, to see what bounds it.
    systems: System → how it is used, and ``compile_ms`` (percentiles).
    missing: System → why.

All of them are made of the raw lines: ``bench.peers.summary([json.loads(line) for line in
open("out.samples.jsonl")])``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.backends import transformers as hf
from bench.backends.base import System, Task, figures, percentiles, rate
from bench.backends.engine import EngineSystem
from bench.client import ServerSystem
from bench.common import Run, fail, flags, paired, rounded
from bench.json_schema import is_valid
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.training.data import held_out_cases

OURS = "overlap-spec"
BATCHES = (1, 16)
LOCAL: dict[str, Callable[[hf.Checkpoint], hf.TransformersSystem]] = {
    "transformers + xgrammar": hf.XGrammarSystem,
    "transformers assisted": hf.AssistedSystem,
    "outlines": hf.OutlinesSystem,
}
SERVERS = ("vllm", "sglang", "llama.cpp")
PACKAGES = ("transformers", "outlines", "outlines-core", "vllm", "sglang", "llama-cpp-python")


def make_tasks(options: argparse.Namespace) -> list[Task]:
    """Extraction cases; their answers have 10 to 100 tokens, mostly."""
    cases = held_out_cases(options.seed, options.cases)
    return [Task(case.prompt, case.schema, options.max_tokens) for case in cases]


def open_systems(
    stack: ExitStack, options: argparse.Namespace
) -> tuple[dict[str, System], dict[str, str]]:
    """All systems that are here, and why the others are not."""
    settings: dict[str, Any] = {
        "max_running_requests": max(BATCHES),
        "prefix_cache": False,
        "mask_deadline_ms": None,
    }
    if options.model is not None:
        settings["model"] = str(options.model)
    draft = {"draft": str(options.draft)} if options.draft is not None else {}
    engine = stack.enter_context(Engine(**settings, **draft))
    plain = stack.enter_context(Engine(**settings, algorithm="none"))
    systems: dict[str, System] = {
        OURS: EngineSystem(engine, "Engine at its defaults, EAGLE-3 drafts, no prefix cache"),
        f"{OURS} plain": EngineSystem(plain, "Engine without drafts, no prefix cache"),
    }
    missing: dict[str, str] = {}
    path = EngineConfig.build(**settings, **draft).target_path

    def encode(task: Task) -> list[int]:
        return engine.input_processor.prompt_ids(task.prompt, task.raw)

    checkpoint: hf.Checkpoint | None = None
    for name, make in LOCAL.items():
        try:
            checkpoint = checkpoint or hf.Checkpoint(path, encode)
            systems[name] = make(checkpoint)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
    given = dict(_server(text) for text in options.server or ())
    for name, url in given.items():
        systems[name] = ServerSystem(url, None, os.environ.get("OPENAI_API_KEY"))
    for name in SERVERS:
        if name not in given:
            missing[name] = f"no server given: start one, and pass --server {name}=URL"
    return systems, missing


def _server(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or not name or "://" not in url:
        raise ConfigError(f"--server must be NAME=URL: {text!r}")
    return name, url


def compile_all(systems: dict[str, System], tasks: Sequence[Task], run: Run) -> None:
    """Compile every schema where a system compiles by itself."""
    for name, system in systems.items():
        if isinstance(system, EngineSystem | hf.TransformersSystem):
            told = run.kept(kind="compile", system=name)
            for task in tasks:
                assert task.schema is not None
                ms = system.compile_ms(task.schema)
                if told is None:
                    run.sample(kind="compile", system=name, compile_ms=ms)


def ask_all(systems: dict[str, System], tasks: Sequence[Task], run: Run) -> None:
    """Every workload on every system, in turn, after a pass that is not counted."""
    names, repetitions = list(systems), run.options.repetitions
    with run.progress() as progress:
        total = (1 + len(BATCHES) * repetitions) * len(names)
        bar = progress.add_task("warm-up", total=total)
        for name in names:
            for batch in BATCHES:
                systems[name].run(tasks[:batch], batch)
            progress.advance(bar)
        for repetition in range(repetitions):
            turn = repetition % len(names)
            for batch in BATCHES:
                part = tasks[: run.options.singles] if batch == 1 else tasks
                for name in names[turn:] + names[:turn]:
                    progress.update(bar, description=f"batch {batch}, {name}")
                    progress.advance(bar)
                    if run.kept(kind="answers", system=name, batch=batch, repetition=repetition):
                        continue
                    raw = systems[name].run(part, batch).raw()
                    for number, reply in enumerate(raw["replies"]):
                        schema = part[number].schema
                        assert schema is not None
                        reply["number"] = number
                        reply["valid"] = is_valid(reply["text"], schema)
                    run.sample(
                        kind="answers", system=name, batch=batch, repetition=repetition, **raw
                    )


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's ``workloads`` and ``compile_ms``, made of the samples."""
    answers = [sample for sample in samples if sample["kind"] == "answers"]
    compiled: dict[str, list[float]] = {}
    for sample in samples:
        if sample["kind"] == "compile":
            compiled.setdefault(sample["system"], []).append(sample["compile_ms"])
    workloads: dict[str, Any] = {}
    for batch in dict.fromkeys(sample["batch"] for sample in answers):
        by_system: dict[str, list[dict[str, Any]]] = {}
        for sample in answers:
            if sample["batch"] == batch:
                by_system.setdefault(sample["system"], []).append(sample)
        for rows in by_system.values():
            rows.sort(key=lambda sample: sample["repetition"])
        ours = by_system[OURS]
        workloads[f"batch {batch}"] = {
            name: _figures(rows, ours) | {"ratio": _ratio(ours, rows) if rows is not ours else None}
            for name, rows in sorted(by_system.items(), key=lambda item: item[0] != OURS)
        }
    return {
        "workloads": workloads,
        "compile_ms": {name: percentiles(values) for name, values in compiled.items()},
    }


def _ratio(ours: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return paired([rate(row) for row in ours], [rate(row) for row in rows])


def _figures(rows: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    replies = [reply for row in rows for reply in row["replies"]]
    ended = [reply for reply in replies if reply["finish_reason"] == "stop"]
    texts = {reply["number"]: reply["text"] for reply in ours[0]["replies"]}
    found: dict[str, Any] = {
        **figures(rows),
        "valid_share": sum(r["valid"] for r in ended) / len(ended) if ended else None,
        "same_text": sum(r["text"] == texts[r["number"]] for r in replies) / len(replies),
    }
    if "busy_ms" in rows[0]:
        steps = sum(row["steps"] for row in rows)
        names = sorted({name for row in rows for name in row["busy_ms"]})
        found["step_ms"] = 1e3 * sum(row["seconds"] for row in rows) / steps
        found["busy_ms_per_step"] = {
            name: sum(row["busy_ms"].get(name, 0.0) for row in rows) / steps for name in names
        }
    return found


def print_results(record: dict[str, Any], console: Console) -> None:
    """What a reader sees."""
    for name, systems in record["workloads"].items():
        table = Table(title=f"{name}; ratio: {OURS} over it", title_justify="left")
        for heading in ("", "token/s", "ratio", "TTFT p50 ms", "TPOT p50 ms", "accept", "finished",
                        "valid", "same text"):  # fmt: skip
            table.add_column(heading, justify="right" if heading else "left")
        for system, side in systems.items():
            ratio, accept = side["ratio"], side["accept_length"]
            valid = side["valid_share"]
            table.add_row(
                system,
                f"{side['tokens_per_second']:.1f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})" if ratio else "1",
                *(f"{t['p50']:.1f}" if t else "-" for t in (side["ttft_ms"], side["tpot_ms"])),
                f"{accept:.2f}" if accept else "-",
                f"{side['finished']}/{side['requests']}",
                "-" if valid is None else f"{valid:.3f}",
                f"{side['same_text']:.2f}",
            )
        console.print(table)
    for name, why in record["missing"].items():
        console.print(f"missing: {name}: {why}")


def faults(record: dict[str, Any]) -> list[str]:
    """What a record says of our own engine that must not be, in words."""
    found = []
    for workload, systems in record["workloads"].items():
        for name in (OURS, f"{OURS} plain"):
            side = systems[name]
            if side["failed"]:
                found.append(f"{workload}, {name}: {side['failed']} requests failed")
            if side["valid_share"] is not None and side["valid_share"] < 1:
                found.append(
                    f"{workload}, {name}: {side['valid_share']:.4f} of the ended are valid"
                )
            if side["same_text"] < 1:
                found.append(f"{workload}, {name}: texts differ with drafts or by repetition")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("peers", "The same work through other systems, in one run.", resumable=True)
    parser.add_argument("--server", action="append", metavar="NAME=URL", help="a server to measure")
    parser.add_argument("--model", type=Path, help="target; the embedded one if absent")
    parser.add_argument("--draft", type=Path, help="its EAGLE-3 head")
    parser.add_argument("--repetitions", type=int, help="9, or 3 with --quick")
    parser.add_argument("--cases", type=int, default=16, help="requests of batch 16 (default 16)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer (default 160)")
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.draft is None):
        parser.error("--model and --draft go together")
    if options.repetitions is None:
        options.repetitions = 3 if options.quick else 9
    if min(options.repetitions, options.cases, options.max_tokens) < 1:
        parser.error("--repetitions, --cases and --max-tokens must be at least 1")
    options.singles = min(options.cases, 4 if options.quick else 16)
    return options


def versions() -> dict[str, str | None]:
    """Versions of the peers' packages; None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("peers", options, arguments)
    run.head["versions"] |= versions()
    torch.set_num_threads(1)
    tasks = make_tasks(options)
    try:
        with ExitStack() as stack:
            systems, missing = open_systems(stack, options)
            compile_all(systems, tasks, run)
            ask_all(systems, tasks, run)
            how = {name: system.how for name, system in systems.items()}
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    record = summary(run.samples)
    compiled = record.pop("compile_ms")
    record["systems"] = {
        name: {"how": text, "compile_ms": compiled.get(name)} for name, text in how.items()
    }
    record["missing"] = missing
    print_results(record, Console(width=120))
    run.finish(options.repetitions, **rounded(record), max_tokens=options.max_tokens)
    wrong = faults(record)
    if wrong:
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
