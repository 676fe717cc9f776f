"""Int8 weights: what they cost in accuracy and what they bring in speed, against other types.

``python -m bench.quantization [--model DIR] [--draft DIR] [--types T …] [--data FILE] [--texts N]
[--requests N] [--threads T] [--quick] [--json PATH] [--seed S]``. Everything takes turns in one
process: ``float32``, ``bfloat16``, and ``int8`` over bfloat16 (``--dtype bfloat16 --quantization
int8``), each with its weights in the layout that the engine gives them.

*Accuracy*: one pass over each text, a question and its answer as a chat, of ``--data`` (rows of
GSM8K; the project's own questions if absent). ``perplexity`` is over all tokens but the first of
each; ``equal_greedy`` by base: the share of positions whose best token is the base's. Perplexity
says nothing of a padded vocabulary: a channel of 2^-40, which 8 bits round to 0, holds its new
tokens down.

*Speed*: greedy JSON under ``bench.step_cost``'s schemas, one request after the other, by an engine
of each type with the same static chain of 5 where there is a draft head, and no drafts otherwise.
``tokens_per_second`` and ``cpu_ms`` (the process's CPU time a token, which other processes disturb
least) of each; ``ratio`` of int8's tokens/s over each of the others' in the same turn, and
``cpu_ratio`` of their ``cpu_ms`` over its; after one turn that is not counted. A model of real cost
is ``python -m bench.padded``'s.

Fields of the last line, beside those of every record (``bench.common``): ``perplexity``,
``equal_greedy``, ``tokens`` (that accuracy is over), ``tokens_per_second``, ``cpu_ms``, ``ratio``,
``cpu_ratio``, ``accept_length``, ``threads``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from bench.common import ROOT, Run, flags, paired, rounded, spread
from bench.step_cost import question
from overlap_spec.config import EMBEDDED
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.packing import pack
from overlap_spec.models.quantization import quantize
from overlap_spec.models.weights import load_decoder
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.training.attention import CausalRows
from overlap_spec.types import SamplingParams

OWN_QUESTIONS = ROOT / "bench" / "data" / "questions.jsonl"
# Name → its type, and its quantization.
TYPES: dict[str, tuple[str, str | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
}
MOST_TOKENS = 64


def load(model: Path, name: str) -> Decoder:
    """The decoder in ``model`` as an engine of this type computes with it."""
    dtype, quantization = TYPES[name]
    decoder = load_decoder(model, getattr(torch, dtype), torch.device("cpu"))
    if quantization is not None:
        quantize([decoder])
    pack(decoder)
    return decoder


def read_texts(data: Path, tokenizer: Tokenizer, count: int) -> list[Tensor]:
    """Token ids of the first ``count`` questions with their answers, int64 ``(T,)`` each.

    Raises:
        ConfigError: the file cannot be read as such rows.
    """
    try:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:count]]
        pairs = [(str(row["question"]), str(row["answer"])) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--data {data}: no rows of question and answer: {error!r}") from None
    return [
        torch.tensor(tokenizer.chat([{"role": "user", "content": asked}]) + tokenizer.encode(said))
        for asked, said in pairs
    ]


@torch.inference_mode()
def read_through(decoder: Decoder, text: Tensor) -> tuple[float, Tensor]:
    """Summed negative log-likelihood of a text's tokens after the first, and the best token after
    each of its tokens ``(T,)``."""
    hidden, _ = decoder(text, torch.arange(len(text)), CausalRows(1, len(text)))
    logits = decoder.logits(hidden).float()
    loss = F.cross_entropy(logits[:-1], text[1:], reduction="sum")
    return float(loss), logits.argmax(-1)


def measure_accuracy(
    run: Run, model: Path, types: Sequence[str], texts: Sequence[Tensor]
) -> dict[str, Any]:
    """One pass of every type over every text."""
    found: dict[str, list[tuple[float, Tensor]]] = {}
    for name in types:
        decoder = load(model, name)
        found[name] = [read_through(decoder, text) for text in texts]
        del decoder
    losses: dict[str, float] = dict.fromkeys(types, 0.0)
    equal = {base: dict.fromkeys(types, 0) for base in types if base != "int8"}
    for number, text in enumerate(texts):
        for name in types:
            loss, best = found[name][number]
            same = {base: int((best == found[base][number][1]).sum()) for base in equal}
            tokens = len(text)
            run.sample(
                part="accuracy", type=name, text=number, tokens=tokens, loss=loss, equal=same
            )
            losses[name] += loss
            for base in equal:
                equal[base][name] += same[base]
    tokens = sum(len(text) for text in texts)
    return {
        "tokens": tokens,
        "perplexity": {name: math.exp(losses[name] / (tokens - len(texts))) for name in types},
        "equal_greedy": {
            base: {name: count / tokens for name, count in counts.items()}
            for base, counts in equal.items()
        },
    }


def measure_speed(run: Run, options: argparse.Namespace, types: Sequence[str]) -> dict[str, Any]:
    """The types answer the same questions in turn."""
    settings: dict[str, Any] = {
        "adaptive": "static",
        "device": "cpu",
        "context_length": 512,
        "max_running_requests": 2,
        "prefix_cache": False,
        "mask_deadline_ms": None,
        "threads": options.threads,
    }
    if options.draft is not None:
        settings["draft"] = str(options.draft)
    model = None if options.model is None else str(options.model)
    sampling = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, complete=False)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(model, dtype=TYPES[name][0], quantization=TYPES[name][1], **settings)
            )
            for name in types
        }
        for turn in range(-1, options.requests):
            asked = question(max(turn, 0) + options.seed)
            for name, engine in engines.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                output = engine.generate(asked.prompt, asked.grammar, sampling)
                seconds = time.perf_counter() - start
                cpu_seconds = time.process_time() - cpu_start
                if output.error is not None:
                    raise RuntimeError(f"{name}: {output.error}")
                if turn >= 0:
                    run.sample(
                        part="speed",
                        type=name,
                        turn=turn,
                        tokens=output.stats.output_tokens,
                        seconds=seconds,
                        cpu_seconds=cpu_seconds,
                        verifies=output.stats.verifies,
                        verified_tokens=output.stats.verified_tokens,
                    )
    rows = [sample for sample in run.samples if sample["part"] == "speed"]
    mine = {name: [row for row in rows if row["type"] == name] for name in types}
    speeds = {name: [row["tokens"] / row["seconds"] for row in mine[name]] for name in types}
    cpu_ms = {
        name: [row["cpu_seconds"] * 1e3 / row["tokens"] for row in mine[name]] for name in types
    }
    others = [name for name in types if name != "int8"]
    return {
        "tokens_per_second": {name: spread(speeds[name]) for name in types},
        "cpu_ms": {name: spread(cpu_ms[name]) for name in types},
        "ratio": {name: paired(speeds["int8"], speeds[name]) for name in others},
        "cpu_ratio": {name: paired(cpu_ms[name], cpu_ms["int8"]) for name in others},
        "accept_length": {
            name: sum(row["verified_tokens"] for row in mine[name])
            / max(sum(row["verifies"] for row in mine[name]), 1)
            for name in types
        },
        "threads": options.threads,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("quantization", "Accuracy and speed of int8 weights.")
    parser.add_argument("--model", type=Path, help="checkpoint; the embedded one if absent")
    parser.add_argument("--draft", type=Path, help="its draft head, if any")
    parser.add_argument(
        "--types",
        nargs="+",
        choices=[name for name in TYPES if name != "int8"],
        default=["float32", "bfloat16"],
        help="what int8 is held against",
    )
    parser.add_argument("--data", type=Path, default=OWN_QUESTIONS, help="GSM8K rows, .jsonl")
    parser.add_argument("--texts", type=int, help="of --data (default 200, quick 20)")
    parser.add_argument("--requests", type=int, help="of each type (default 20, quick 3)")
    parser.add_argument("--threads", type=int, help="of torch; the engine's choice if absent")
    options = parser.parse_args(arguments)
    texts_wanted = options.texts or (20 if options.quick else 200)
    options.requests = options.requests or (3 if options.quick else 20)
    run = Run("quantization", options, arguments)
    model = options.model or EMBEDDED / "target"
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    try:
        texts = read_texts(options.data, Tokenizer(model, vocabulary), texts_wanted)
    except ConfigError as error:
        parser.error(str(error))
    types = [*options.types, "int8"]
    accuracy = measure_accuracy(run, model, types, texts)
    speed = measure_speed(run, options, types)
    table = Table("", *types, title="int8 against the others")
    table.add_row("perplexity", *(f"{accuracy['perplexity'][name]:.4f}" for name in types))
    for base, shares in accuracy["equal_greedy"].items():
        table.add_row(f"greedy token as {base}'s", *(f"{shares[name]:.4f}" for name in types))
    for field in ("tokens_per_second", "cpu_ms"):
        table.add_row(field, *(f"{speed[field][name]['median']:.1f}" for name in types))
    run.console.print(table)
    figures = accuracy | speed
    run.finish(options.requests, data=options.data.name, **rounded(figures))


if __name__ == "__main__":
    main()
