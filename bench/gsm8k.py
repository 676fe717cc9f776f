"""GSM8K, few-shot: accuracy, latency and throughput, with overlap and without it in one run.

``python -m bench.gsm8k [--data FILE] [--num-shots 8] [--num-questions N] [--parallel P] [--model
DIR --draft DIR] [--quick] [--json PATH] [--seed S]`` asks the first N questions of the file, each
after the file's first rows as shots, as plain text, greedy.
So do SGLang's and other GSM8K benchmarks; as there, a question may stand among its own shots, and
``accuracy_unseen`` leaves those out. The default file is a small one of our own.

The engine with overlap (``once-sync``) and the one without (``none``), at one static draft length,
take turns, chunk by chunk of questions, and the side that begins changes with every chunk. The exit
status is 1 where an answer or an accept length differs between them.

An answer is the last number of the text; where there is none, it is invalid.

Fields of the last line, beside those of every record (``bench.common``):
    sides: Side → ``accuracy``, ``accuracy_unseen``, ``invalid`` (shares), and the figures of
        ``bench.backends.base.figures``: ``latency_s`` and ``tokens_per_second`` among them.
    ratio: Side → spread of its tokens per second over those of ``none``, chunk by chunk.
    equal: Share of questions with the same text on all sides.
    shots, parallel, questions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.backends.base import Batch, Task, figures, rate
from bench.backends.engine import EngineSystem
from bench.common import ROOT, Run, command, fail, flags, paired, positive, read_jsonl
from bench.targets import add_model_flags, model_settings
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError

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
    """Rows ``{"question", "answer"}`` of a file, errors as for :func:`bench.common.read_jsonl`."""
    return read_jsonl(path, lambda row: Row(str(row["question"]), str(row["answer"])))


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
    more: dict[str, Any] = {"max_tokens": options.max_new_tokens, "stop": STOP, "raw": True}
    return [Task(head + row.text(False), **more) for row in rows[:count]]


def open_engines(
    stack: ExitStack, options: argparse.Namespace, weights: dict[str, str]
) -> dict[str, EngineSystem]:
    """The engine with overlap and the one without."""
    settings: dict[str, Any] = {
        "adaptive": "static",
        "num_steps": 5,
        "max_running_requests": options.parallel,
        "mask_deadline_ms": None,
    }
    sides = {}
    for mode in ("once-sync", "none"):
        engine = stack.enter_context(Engine(overlap=mode, **settings, **weights))
        sides[mode] = EngineSystem(engine, f"overlap {mode}, chain or tree of static length")
    return sides


def ask_all(
    sides: dict[str, EngineSystem], tasks: Sequence[Task], rows: Sequence[Row], run: Run
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
                batch = sides[name].run(tasks[start : start + size], options.parallel)
                done[name] = batch
                raw = batch.raw()
                for number, reply in enumerate(raw["replies"], start):
                    reply["number"] = number
                    reply["label"] = last_number(rows[number].answer)
                    reply["shot"] = number < options.num_shots
                run.sample(side=name, chunk=chunk, **raw)
            yield from differences(done, start)


def differences(done: dict[str, Batch], start: int) -> Iterator[str]:
    """What is not the same on all sides of one chunk."""
    (name, first), (other, second) = done.items()
    for number, (got, want) in enumerate(zip(first.replies, second.replies, strict=True), start):
        texts = [(r.text, r.token_ids, r.finish_reason) for r in (got, want)]
        lengths = [(r.verifies, r.verified_tokens) for r in (got, want)]
        if texts[0] != texts[1]:
            yield f"question {number}: {name} says {got.text[-60:]!r}, {other} {want.text[-60:]!r}"
        elif lengths[0] != lengths[1]:
            yield f"question {number}: accept length of {name} is not that of {other}"


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    names = ("once-sync", "none")
    by_side = {
        name: sorted((s for s in samples if s["side"] == name), key=lambda s: s["chunk"])
        for name in names
    }
    rates = {name: [rate(batch) for batch in by_side[name]] for name in names}
    texts: dict[int, set[str]] = {}
    for sample in samples:
        for reply in sample["replies"]:
            texts.setdefault(reply["number"], set()).add(reply["text"])
    return {
        "sides": {name: figures(by_side[name]) | scores(by_side[name]) for name in names},
        "ratio": {name: paired(rates[name], rates["none"]) for name in names[:-1]},
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
    parser = flags("gsm8k", "GSM8K, few-shot, with overlap and without.")
    parser.add_argument("--data", type=Path, default=OWN_QUESTIONS, help="GSM8K rows, .jsonl")
    parser.add_argument("--num-shots", type=int, help="shots in the prompt; 8, or 4 with --quick")
    parser.add_argument("--num-questions", type=positive, help="all, or 16 with --quick")
    parser.add_argument("--parallel", type=positive, help="requests at once; 64, or 4 with --quick")
    parser.add_argument("--max-new-tokens", type=positive, help="512, or 96 with --quick")
    add_model_flags(parser)
    options = parser.parse_args(arguments)
    quick = {"num_shots": 4, "num_questions": 16, "parallel": 4, "max_new_tokens": 96}
    full = {"num_shots": 8, "num_questions": None, "parallel": 64, "max_new_tokens": 512}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("gsm8k", options, arguments)
    torch.set_num_threads(1)
    rows = read_rows(options.data)
    count = options.num_questions or len(rows)
    tasks = make_tasks(rows, count, options)
    with ExitStack() as stack:
        sides = open_engines(stack, options, model_settings(options))
        wrong = list(ask_all(sides, tasks, rows, run))
    record = run.finish(
        len({sample["chunk"] for sample in run.samples}),
        **summary(run.samples),
        questions=count,
        shots=options.num_shots,
        parallel=options.parallel,
        data=options.data.name,
    )
    failed = sum(side["failed"] for side in record["sides"].values())
    if failed:
        fail(f"{failed} requests ended with an error")
    if wrong or record["equal"] < 1:
        fail("answers are not the same on all sides:\n" + "\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
