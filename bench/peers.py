"""The same work through this engine and through what a user would take instead, in one run.

``python -m bench.peers [--model DIR --draft DIR | --model NAME] [--threads N] [--batches 1,16]
[--by-hand SETTINGS …] [--peer KIND=PROGRAM …] [--server NAME=URL …] [--without NAME …]
[--repetitions N] [--cases N] [--max-tokens N] [--quick] [--json PATH] [--seed S]`` gives every
system the same checkpoint, prompts (as tokens), JSON schemas, limits and threads: extraction cases
with held-out fillers, whose answers differ in length. A workload is a number of requests at once:
by default the cases one at a time (batch 1), and 16 at once (batch 16). ``--model 0.75b`` and other
names are of models at real cost (``bench.targets``).

Systems take turns within each repetition, and the one that begins changes with every repetition.
Grammars are compiled before. Then each system answers its first three requests, which are kept
apart; one pass over everything is not counted, nor are four tokens at the start of a turn; and
prompts are not cached. All are greedy, and compute in the type that the engine takes for the
checkpoint on this machine; ``--threads`` (default 1) are those of a pass, everywhere. The engine's
streams and its grammar lane are threads beside them, as always.

- ``overlap-spec``: the engine at its defaults; ``overlap-spec plain``: without drafts;
  ``by hand: …``: with the settings of ``--by-hand NAME=VALUE,…``, given once or more.
- ``transformers + xgrammar``: see ``how`` in the record.
- ``vllm …``, ``llama-server …``: their own servers, which the run starts and ends, plain and with
  an EAGLE-3 chain of 5 (llama.cpp's also in Q8_0 and Q4_K_M): see ``bench.backends.launched``. They
  are looked for on PATH; ``--peer vllm=PYTHON`` and ``--peer llama-server=PROGRAM`` say where.
- Others are measured through a server that is there, of the same checkpoint:
  ``--server sglang=http://…``. Nothing is installed; what is not there is missing, not zero.

Fields of the last line, beside those of every record (``bench.common``):
    workloads: ``batch 1`` and so on → system → the figures of ``bench.backends.base.figures``,
        ``valid_share`` (of those that ended by themselves, by ``jsonschema``), ``same_text``
        (share of texts that are overlap-spec's), ``ratio`` (overlap-spec's tokens per second over
        this system's, repetition by repetition) and, of the engine, ``busy_ms_per_step``: stream
        and span → time, to see what bounds it.
    first: System → ``tokens_per_second`` of its first three requests after the start, that of the
        same three once warm (median over the repetitions), and ``share``, the first over the
        second; batch 1 must be among the batches.
    systems: System → how it is used, and ``compile_ms`` (percentiles).
    missing: System → why.
    dtype, threads, max_tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.backends import transformers as hf
from bench.backends.base import System, Task, figures, percentiles, rate
from bench.backends.engine import EngineSystem
from bench.backends.launched import PEERS, Work, open_peers
from bench.client import ServerSystem
from bench.common import Run, command, fail, flags, median, paired, positive, sizes, versions
from bench.json_schema import is_valid
from bench.targets import add_model_flags, by_hand, model_settings
from examples.embedded_model.data import held_out_cases
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.memory import machine_bytes
from overlap_spec.worker.site import pick_device, pick_dtype

OURS = "overlap-spec"
PLAIN = f"{OURS} plain"
# What was best on a 2-core machine at a small size, and at one of 0.75 billion parameters.
SMALL_BY_HAND = "overlap=none,adaptive=static"
LARGE_BY_HAND = "adaptive=static,eagle_topk=4,num_draft_tokens=16"
BATCHES = (1, 16)
# Requests that are measured right after the start.
FIRST = 3
LOCAL = "transformers + xgrammar"
SERVERS = ("sglang",)
PACKAGES = ("transformers", "sglang", "gguf")


def make_tasks(options: argparse.Namespace) -> list[Task]:
    """Extraction cases; their answers have 10 to 100 tokens, mostly."""
    cases = held_out_cases(options.seed, options.cases)
    return [Task(case.prompt, case.schema, options.max_tokens) for case in cases]


def open_systems(
    stack: ExitStack, options: argparse.Namespace, tasks: Sequence[Task]
) -> tuple[dict[str, System], dict[str, str], torch.dtype]:
    """All systems that are here, why the others are not, and the type that all compute in."""
    settings: dict[str, Any] = {
        **model_settings(options),
        "max_running_requests": max(options.batches),
        "prefix_cache": False,
        "mask_deadline_ms": None,
        # Several engines share the process.
        "memory_limit_bytes": machine_bytes(),
    }
    config = EngineConfig.build(**settings)
    dtype = pick_dtype(config, pick_device(config.device))

    def engine(how: str, **more: Any) -> EngineSystem:
        return EngineSystem(stack.enter_context(Engine(**{**settings, **more})), how)

    ours = engine("Engine at its defaults, EAGLE-3 drafts, no prefix cache")
    systems: dict[str, System] = {
        OURS: ours,
        PLAIN: engine("Engine without drafts, no prefix cache", algorithm="none"),
    }
    for text in options.by_hand:
        systems[f"by hand: {text}"] = engine(f"Engine with {text}", **by_hand(text))
    missing: dict[str, str] = {}

    def encode(task: Task) -> list[int]:
        return ours.engine.input_processor.prompt_ids(task.prompt, task.raw)

    if LOCAL in options.without:
        missing[LOCAL] = "left out by --without"
    else:
        try:
            device = pick_device(config.device).type
            systems[LOCAL] = hf.XGrammarSystem(config.target_path, encode, dtype, device)
        except ImportError as error:
            missing[LOCAL] = f"not installed: {error}"
    given = dict(named_server(text) for text in options.server or ())
    for name, url in given.items():
        systems[name] = ServerSystem(url, None, os.environ.get("OPENAI_API_KEY"))
    context_tokens = max(len(encode(task)) + task.max_tokens for task in tasks)

    @cache
    def work() -> Work:
        assert config.draft_path is not None
        return Work(
            target=config.target_path,
            head=config.draft_path,
            dtype=dtype,
            encode=encode,
            parallel=max(options.batches),
            context_tokens=context_tokens,
            threads=options.threads,
            folder=Path(stack.enter_context(TemporaryDirectory(prefix="overlap-spec-peers-"))),
        )

    peers, absent = open_peers(stack, options.peer, options.without, work)
    systems |= peers
    missing |= absent
    for name in SERVERS:
        if name not in given:
            missing[name] = f"no server given: start one, and pass --server {name}=URL"
    return systems, missing, dtype


def named_server(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or not name or "://" not in url:
        raise ConfigError(f"--server must be NAME=URL: {text!r}")
    return name, url


def named_peer(text: str) -> tuple[str, str]:
    name, _, given = text.partition("=")
    program = shutil.which(given)
    if name not in PEERS or program is None:
        kinds = " or ".join(PEERS)
        raise ConfigError(f"--peer must be KIND=PROGRAM, of {kinds}, and one that runs: {text!r}")
    return name, program


def compile_all(systems: dict[str, System], tasks: Sequence[Task], run: Run) -> None:
    """Compile every schema where a system compiles by itself."""
    for name, system in systems.items():
        if isinstance(system, EngineSystem | hf.XGrammarSystem):
            for task in tasks:
                assert task.schema is not None
                ms = system.compile_ms(task.schema)
                run.sample(kind="compile", system=name, compile_ms=ms)


def ask_all(systems: dict[str, System], tasks: Sequence[Task], run: Run) -> None:
    """The first requests of each system, a pass that is not counted, and then every workload on
    every system in turn."""
    names, repetitions = list(systems), run.options.repetitions
    batches = run.options.batches
    with run.progress() as progress:
        total = (1 + len(batches) * repetitions) * len(names)
        bar = progress.add_task("first requests and warm-up", total=total)
        for name in names:
            first = systems[name].run(tasks[:FIRST], 1).raw()
            # A server of others was started before.
            if type(systems[name]) is not ServerSystem:
                run.sample(kind="first", system=name, **first)
            for batch in batches:
                systems[name].run(tasks[:batch], batch)
            progress.advance(bar)
        for repetition in range(repetitions):
            turn = repetition % len(names)
            for batch in batches:
                part = tasks[: run.options.singles] if batch == 1 else tasks
                for name in names[turn:] + names[:turn]:
                    progress.update(bar, description=f"batch {batch}, {name}")
                    progress.advance(bar)
                    # Weights that rest while others have their turn are slow to read again.
                    systems[name].run([dataclasses.replace(tasks[0], max_tokens=4)], 1)
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
    """The record's ``workloads``, ``first`` and ``compile_ms``, made of the samples."""
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
        "first": first_requests(samples),
        "compile_ms": {name: percentiles(values) for name, values in compiled.items()},
    }


def first_requests(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """System → rate of its first requests, of the same ones later, and the first over the later."""
    found = {}
    for sample in samples:
        if sample["kind"] != "first":
            continue
        count = len(sample["replies"])
        later = [
            _own_rate(other["replies"][:count])
            for other in samples
            if other["kind"] == "answers"
            and (other["system"], other["batch"]) == (sample["system"], 1)
        ]
        if later:
            early, warm = _own_rate(sample["replies"]), median(later)
            found[sample["system"]] = {
                "tokens_per_second": early,
                "warm_tokens_per_second": warm,
                "share": early / warm,
            }
    return found


def _own_rate(replies: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of requests that came one after another."""
    seconds = sum(reply["end_to_end_ms"] for reply in replies) / 1e3
    return float(sum(reply["tokens"] for reply in replies) / seconds)


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


def faults(record: dict[str, Any], exact: bool = True) -> list[str]:
    """What a record says of our own engine that must not be, in words.

    Args:
        exact: Whether its texts must be equal with and without drafts: in float32. In other types
            bits may depend on the number of rows; there the share is shown, not held.
    """
    found = []
    for workload, systems in record["workloads"].items():
        for name, side in systems.items():
            if name not in (OURS, PLAIN) and not name.startswith("by hand"):
                continue
            if side["failed"]:
                found.append(f"{workload}, {name}: {side['failed']} requests failed")
            if side["valid_share"] is not None and side["valid_share"] < 1:
                found.append(
                    f"{workload}, {name}: {side['valid_share']:.4f} of the ended are valid"
                )
            if exact and side["same_text"] < 1:
                found.append(f"{workload}, {name}: texts differ with drafts or by repetition")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("peers", "The same work through other systems, in one run.")
    parser.add_argument(
        "--peer", action="append", metavar="KIND=PROGRAM", help=f"its program: {', '.join(PEERS)}"
    )
    parser.add_argument("--server", action="append", metavar="NAME=URL", help="a server to measure")
    add_model_flags(parser)
    parser.add_argument("--threads", type=positive, default=1, help="of a pass (default 1)")
    parser.add_argument("--batches", type=sizes, default=BATCHES, help="at once (default 1,16)")
    parser.add_argument(
        "--by-hand",
        action="append",
        metavar="NAME=VALUE,…",
        help="engine settings for a row of their own; may be given again; by default those that "
        "were best on a 2-core machine",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help=f"leave one out: {', '.join((LOCAL, *PEERS))}, or one of a peer's rows; "
        "may be given again",
    )
    parser.add_argument("--repetitions", type=positive, help="9, or 3 with --quick")
    parser.add_argument("--cases", type=positive, help="requests; the largest batch's if absent")
    parser.add_argument("--max-tokens", type=positive, default=160, help="of an answer (160)")
    options = parser.parse_args(arguments)
    options.repetitions = options.repetitions or (3 if options.quick else 9)
    options.cases = options.cases or max(options.batches)
    options.singles = min(options.cases, 4 if options.quick else 16)
    try:
        options.peer = dict(named_peer(text) for text in options.peer or ())
    except ConfigError as error:
        parser.error(str(error))
    if options.by_hand is None:
        options.by_hand = [SMALL_BY_HAND if options.model is None else LARGE_BY_HAND]
    return options


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("peers", options, arguments)
    run.head["versions"] |= versions(PACKAGES)
    torch.set_num_threads(options.threads)
    tasks = make_tasks(options)
    with ExitStack() as stack:
        systems, missing, dtype = open_systems(stack, options, tasks)
        compile_all(systems, tasks, run)
        ask_all(systems, tasks, run)
        how = {name: system.how for name, system in systems.items()}
    record = summary(run.samples)
    compiled = record.pop("compile_ms")
    record["systems"] = {
        name: {"how": text, "compile_ms": compiled.get(name)} for name, text in how.items()
    }
    run.finish(
        options.repetitions,
        **record,
        missing=missing,
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=options.max_tokens,
        threads=options.threads,
    )
    if wrong := faults(record, exact=dtype is torch.float32):
        fail("; ".join(wrong))


if __name__ == "__main__":
    main()
