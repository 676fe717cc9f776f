"""GSM8K, few-shot: accuracy, latency and throughput, with overlap and without it in one run.

``python -m bench.gsm8k [--data FILE] [--num-shots 8] [--num-questions N] [--parallel P] [--overlap
MODE] [--model DIR --draft DIR] [--base-url [NAME=]URL …] [--quick] [--json PATH] [--seed S]`` asks
the first N questions of the file, each after the file's first rows as shots, as plain text (or,
with ``--chat``, in a user turn), greedy.
So do SGLang's and other GSM8K benchmarks; as there, a question may stand among its own shots, and
``accuracy_unseen`` leaves those out. The default file is a small one of our own.

Sides take turns, chunk by chunk of questions, and the side that begins changes with every chunk.
In this process they are the engine with ``--overlap`` and the one without (``none``), at one static
draft length, and the exit status is 1 where an answer or an accept length differs between them.
With ``--base-url``, given once or more, they are servers instead, which must be OpenAI-compatible
(streaming ``/v1/completions``, or chat): ``--model`` is then the model's name there, which settings
they run with is theirs, and equality is reported.

An answer is the last number of the text; where there is none, it is invalid.

Fields of the last line, beside those of every record (``bench.common``):
    sides: Side → ``accuracy``, ``accuracy_unseen``, ``invalid`` (shares), and the figures of
        ``bench.backends.base.figures``: ``latency_s`` and ``tokens_per_second`` among them.
        ``server_accept_length``: a server's own average since it started.
    ratio: Side → spread of its tokens per second over the last side's, chunk by chunk.
    equal: Share of questions with the same text on all sides.
    shots, parallel, questions.

All of them are made of the raw lines: ``bench.gsm8k.summary([json.loads(line) for line in
open("out.samples.jsonl")])``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.backends.base import Batch, System, Task, figures, rate
from bench.backends.engine import EngineSystem
from bench.client import ServerSystem
from bench.common import ROOT, Run, fail, flags, paired, rounded
from bench.targets import add_model_flags, model_settings
from overlap_spec.config import OVERLAP_MODES
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError, OverlapSpecError

OWN_QUESTIONS = ROOT / "bench" / "data" / "questions.jsonl"
STOP = ("Question", "Assistant:", "<|separator|>")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PAIRS = 8


@dataclass(frozen=True)
class Row:
    """One row of the file."""

    question: str
    answer: str

    def text(self, solved: bool) -> str:
        """As it stands in a prompt."""
        return f"Question: {self.question}\nAnswer:" + (f" {self.answer}\n\n" if solved else "")


def read_rows(path: Path) -> list[Row]:
    """Rows ``{"question", "answer"}`` of a ``.jsonl`` file.

    Raises:
        ConfigError: the file cannot be read as such rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        data = [json.loads(line) for line in lines if line.strip()]
        return [Row(str(row["question"]), str(row["answer"])) for row in data]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--data {path}: no rows of question and answer: {error!r}") from None


def last_number(text: str) -> float | None:
    """The last number of a text, commas of thousands left out; None where there is none."""
    found = NUMBER.findall(text.replace(",", ""))
    return float(found[-1]) if found else None


def make_tasks(rows: Sequence[Row], count: int, options: argparse.Namespace) -> list[Task]:
    """The first ``count`` questions after the first ``num_shots`` rows.

    Raises:
        ConfigError: the file has fewer rows.
    """
    if max(options.num_shots, count) > len(rows):
        raise ConfigError(f"--data has {len(rows)} rows, fewer than --num-shots or --num-questions")
    head = "".join(row.text(True) for row in rows[: options.num_shots])
    more: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "stop": STOP,
        "raw": not options.chat,
    }
    return [Task(head + row.text(False), **more) for row in rows[:count]]


def open_engines(
    stack: ExitStack, options: argparse.Namespace, weights: dict[str, str]
) -> dict[str, System]:
    """The engine with overlap and the one without; a single one for ``--overlap none``."""
    settings: dict[str, Any] = {
        "adaptive": "static",
        "num_steps": options.num_steps,
        "eagle_topk": options.eagle_topk,
        "max_running_requests": options.parallel,
        "context_length": options.context_length,
        "mask_deadline_ms": None,
    }
    sides: dict[str, System] = {}
    for mode in dict.fromkeys((options.overlap, "none")):
        engine = stack.enter_context(Engine(overlap=mode, **settings, **weights))
        sides[mode] = EngineSystem(engine, f"overlap {mode}, chain or tree of static length")
    return sides


def open_servers(urls: Sequence[str], model: str | None) -> dict[str, System]:
    """Servers by name; a URL without one is its own name."""
    sides: dict[str, System] = {}
    for given in urls:
        name, found, url = given.partition("=")
        if not found or "://" in name:
            name, url = given, given
        if name in sides:
            raise ConfigError(f"--base-url: two servers are called {name!r}")
        sides[name] = ServerSystem(url, model, os.environ.get("OPENAI_API_KEY"))
    return sides


def ask_all(
    sides: dict[str, System], tasks: Sequence[Task], rows: Sequence[Row], run: Run
) -> Iterator[str]:
    """Ask everything on every side, chunk by chunk; what differs, in words."""
    options, names = run.options, list(sides)
    size = max(options.parallel, -(-len(tasks) // PAIRS))
    starts = range(0, len(tasks), size)
    with run.progress() as progress:
        bar = progress.add_task("warm-up", total=len(starts) * len(names))
        for system in sides.values():
            # The shots' pages are cached from here on, on every side alike.
            system.run(tasks[: min(2, len(tasks))], options.parallel)
        for chunk, start in enumerate(starts):
            turn = chunk % len(names)
            done: dict[str, Batch] = {}
            for name in names[turn:] + names[:turn]:
                progress.update(bar, description=f"chunk {chunk + 1} of {len(starts)}, {name}")
                progress.advance(bar)
                if run.kept(side=name, chunk=chunk):
                    continue
                batch = sides[name].run(tasks[start : start + size], options.parallel)
                done[name] = batch
                raw = batch.raw()
                for number, reply in enumerate(raw["replies"], start):
                    reply["number"] = number
                    reply["label"] = last_number(rows[number].answer)
                    reply["shot"] = number < options.num_shots
                run.sample(side=name, chunk=chunk, **raw)
            if len(done) == len(names):
                yield from differences(done, start)


def differences(done: dict[str, Batch], start: int) -> Iterator[str]:
    """What is not the same on all sides of one chunk."""
    names = list(done)
    for name in names[1:]:
        pairs = zip(done[name].replies, done[names[0]].replies, strict=True)
        for number, (got, want) in enumerate(pairs, start):
            if (got.text, got.token_ids, got.finish_reason) != (
                want.text, want.token_ids, want.finish_reason,
            ):  # fmt: skip
                yield (
                    f"question {number}: {name} says {got.text[-60:]!r} ({got.finish_reason}), "
                    f"{names[0]} {want.text[-60:]!r} ({want.finish_reason})"
                )
            elif (got.verifies, got.verified_tokens) != (want.verifies, want.verified_tokens):
                yield f"question {number}: accept length of {name} is not that of {names[0]}"


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    names = list(dict.fromkeys(sample["side"] for sample in samples))
    by_side = {
        name: sorted((s for s in samples if s["side"] == name), key=lambda s: s["chunk"])
        for name in names
    }
    # The side without overlap is what the others are compared with.
    base = "none" if "none" in names else names[-1]
    names = [name for name in names if name != base] + [base]
    rates = {name: [rate(batch) for batch in by_side[name]] for name in names}
    texts: dict[int, set[str]] = {}
    for sample in samples:
        for reply in sample["replies"]:
            texts.setdefault(reply["number"], set()).add(reply["text"])
    return {
        "sides": {name: figures(by_side[name]) | scores(by_side[name]) for name in names},
        "ratio": {name: paired(rates[name], rates[base]) for name in names if name != base},
        "equal": sum(len(said) == 1 for said in texts.values()) / len(texts),
    }


def scores(batches: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Shares of right and of invalid answers; ``accuracy_unseen`` None where all were shots."""
    replies = [reply for batch in batches for reply in batch["replies"]]
    answers = [(last_number(reply["text"]), reply["label"], reply["shot"]) for reply in replies]
    unseen = [answer == label for answer, label, shot in answers if not shot]
    return {
        "accuracy": sum(answer == label for answer, label, _ in answers) / len(answers),
        "accuracy_unseen": sum(unseen) / len(unseen) if unseen else None,
        "invalid": sum(answer is None for answer, _, _ in answers) / len(answers),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("gsm8k", "GSM8K, few-shot, with overlap and without.", resumable=True)
    parser.add_argument("--data", type=Path, default=OWN_QUESTIONS, help="GSM8K rows, .jsonl")
    parser.add_argument("--num-shots", type=int, help="shots in the prompt; 8, or 4 with --quick")
    parser.add_argument("--num-questions", type=int, help="all, or 16 with --quick")
    parser.add_argument("--parallel", type=int, help="requests at once; 64, or 4 with --quick")
    parser.add_argument("--max-new-tokens", type=int, help="512, or 96 with --quick")
    parser.add_argument("--overlap", default="once-sync", choices=OVERLAP_MODES)
    parser.add_argument("--num-steps", type=int, default=5, help="draft steps (default 5)")
    parser.add_argument("--eagle-topk", type=int, default=1, help="branches of a draft step")
    add_model_flags(parser)
    parser.add_argument("--context-length", type=int, help="longest prompt + output")
    parser.add_argument("--chat", action="store_true", help="ask in a user turn, not as plain text")
    parser.add_argument("--base-url", action="append", metavar="[NAME=]URL", help="a server")
    options = parser.parse_args(arguments)
    quick = {"num_shots": 4, "num_questions": 16, "parallel": 4, "max_new_tokens": 96}
    full = {"num_shots": 8, "num_questions": None, "parallel": 64, "max_new_tokens": 512}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("num_questions", "parallel", "max_new_tokens"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.num_shots < 0:
        parser.error("--num-shots must be at least 0")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("gsm8k", options, arguments)
    torch.set_num_threads(1)
    try:
        rows = read_rows(options.data)
        count = options.num_questions or len(rows)
        tasks = make_tasks(rows, count, options)
        with ExitStack() as stack:
            if options.base_url:
                sides = open_servers(options.base_url, options.model)
            else:
                sides = open_engines(stack, options, model_settings(options, run.console))
            wrong = list(ask_all(sides, tasks, rows, run))
            record = summary(run.samples)
            for name, system in sides.items():
                if isinstance(system, ServerSystem):
                    record["sides"][name]["server_accept_length"] = system.accept_length()
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run.finish(
        len({sample["chunk"] for sample in run.samples}),
        **rounded(record),
        questions=count,
        shots=options.num_shots,
        parallel=options.parallel,
        data=options.data.name,
    )
    failed = sum(side["failed"] for side in record["sides"].values())
    if failed:
        fail(f"{failed} requests ended with an error")
    if (wrong or record["equal"] < 1) and not options.base_url:
        fail("answers are not the same on all sides:\n" + "\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
