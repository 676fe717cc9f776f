"""What a decode step costs, by batch size and with prompts that arrive.

``python -m bench.step_cost [--batch 1,4,16,32] [--arrivals] [--free] [--overlap MODE] [--model DIR
--draft DIR] [--threads N] [--turns N]`` asks the embedded model, or another, for JSON under schemas
(with ``--free`` without them), greedily, and drives the engine's steps by hand. Each batch size
gets the same requests round after round, after one round that is not counted; each round begins
when a line comes in, as ``bench.side_by_side`` sends them, and ends in a JSON line. With
``--arrivals``, four requests decode while a new prompt is submitted before every fifth step; only
the four are measured.

It uses nothing but ``Engine``, ``Grammar``, ``SamplingParams`` and the outputs' statistics, so that
it runs in a work tree of another age.

A line has ``batch_N`` or ``arrivals`` with ``tpot_ms`` (mean over requests of (end-to-end - TTFT) /
(tokens - 1)), ``cpu_ms`` (the process's CPU time a token), ``tokens_per_second``,
``accept_length``, ``steps``, ``output_tokens`` and ``output_sha256`` (of all token ids). All but
the times are the same in every round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from overlap_spec import Engine, Grammar, SamplingParams
from overlap_spec import Output as EngineOutput

SETTINGS: dict[str, Any] = {
    # Nothing may depend on the clock, and a prompt must cost the same in every round.
    "adaptive": "static",
    "mask_deadline_ms": None,
    "prefix_cache": False,
    "max_running_requests": 40,
    "context_length": 1024,
    # All prompts of a batch in its first step.
    "chunked_prefill_size": 8192,
}
DECODING = 4
ARRIVES_EVERY = 5
ARRIVING_TOKENS = 8
MOST_TOKENS = 96

NAMES = ("Umar Rogers", "Karen Weber", "Eli Richardson", "Linda Hansen", "Tom Baker", "Ada Brandt")
CITIES = ("Marseille", "Zurich", "Melbourne", "Delhi", "Perth", "Cologne", "Amsterdam")
GOODS = ("notebook", "lamp", "kettle", "drum", "basket")
DAYS = ("2022-09-16", "2023-01-24", "2024-11-05", "2026-03-30")
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))
# A kind of text, and the type of each field that is asked of it.
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "Order {code}-{n}: {n} x {goods}, buyer {name}, {city}, total ${n}.50, status pending.",
        {"order_id": STRING, "product": STRING, "quantity": INTEGER, "customer": STRING,
         "city": STRING, "total": NUMBER,
         "status": {"type": "string", "enum": ["pending", "shipped", "delivered"]}},
    ),
    (
        "{name} from {city} is {n} years old, works as a waiter, likes the {goods} and can be "
        "reached at (286) 570-70{n}.",
        {"name": STRING, "age": INTEGER, "city": STRING, "role": STRING, "phone_number": STRING},
    ),
    (
        "{name} stays {n} nights at Hotel Bellevue in {city} from {day} in a double room with "
        "breakfast, confirmation {code}-{n}.",
        {"guest": STRING, "hotel": STRING, "nights": INTEGER, "check_in": STRING,
         "room": {"type": "string", "enum": ["single", "double", "suite"]}, "breakfast": BOOLEAN,
         "code": STRING},
    ),
    (
        "Save the date: {goods} Tournament, {day}, Palm Court, {city}. {name} speaks, and {n} "
        "guests may come.",
        {"title": STRING, "date": STRING, "venue": STRING, "city": STRING, "speaker": STRING,
         "guests": INTEGER},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A prompt, and the schema that its answer obeys, if any."""

    prompt: str
    grammar: Grammar | None


@dataclass(frozen=True)
class Round:
    """Questions that were answered once: ``outputs`` in their order, and the steps it took."""

    outputs: tuple[EngineOutput, ...]
    steps: int
    seconds: float
    cpu_seconds: float

    @property
    def tpot_ms(self) -> float:
        """Mean over the requests of (end-to-end - TTFT) / (tokens - 1)."""
        return statistics.fmean(o.stats.tpot_ms for o in self.outputs if o.stats.output_tokens > 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all outputs over the seconds of the round."""
        return self.output_tokens / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time of all threads, a token: what other processes disturb least."""
        return self.cpu_seconds * 1e3 / self.output_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(o.stats.output_tokens for o in self.outputs)

    @property
    def accept_length(self) -> float:
        """Tokens that a verify emitted, the bonus included."""
        verifies = sum(o.stats.verifies for o in self.outputs)
        return sum(o.stats.verified_tokens for o in self.outputs) / max(verifies, 1)

    @property
    def output_sha256(self) -> str:
        """Hash of the outputs' token ids."""
        ids = json.dumps([list(output.token_ids) for output in self.outputs])
        return hashlib.sha256(ids.encode()).hexdigest()


def question(number: int, free: bool = False) -> Question:
    """The prompt and the schema of this number; the first 420 prompts differ."""
    text, fields = KINDS[number % len(KINDS)]
    said = text.format(
        name=NAMES[number % len(NAMES)],
        city=CITIES[number % len(CITIES)],
        goods=GOODS[number % len(GOODS)],
        day=DAYS[number // 4 % len(DAYS)],
        code="ABCDEFGH"[number % 8] * 2,
        n=10 + number % 89,
    )
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    keys = ", ".join(name.replace("_", " ") for name in fields)
    return Question(f"Extract {keys}. {said}", None if free else Grammar.json_schema(schema))


def answer(engine: Engine, batch: int, arrivals: bool = False, free: bool = False) -> Round:
    """Decode ``batch`` questions side by side, step by step.

    Args:
        arrivals: Submit another question before every fifth step; it decodes a few tokens.
        free: Without their schemas.

    Raises:
        RuntimeError: a request ended with an error.
    """
    fresh = count(batch)
    start, cpu_start = time.perf_counter(), time.process_time()
    handles = [_submit(engine, question(n, free), MOST_TOKENS) for n in range(batch)]
    arrived = []
    steps = 0
    try:
        while any(handle.output is None for handle in handles):
            steps += 1
            if arrivals and steps % ARRIVES_EVERY == 0:
                arrived.append(_submit(engine, question(next(fresh), free), ARRIVING_TOKENS))
            engine.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        outputs = tuple(handle.output for handle in handles)
    finally:
        engine.release([*handles, *arrived])
        while engine.step():
            pass
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"a request ended with an error: {output.error}")
    return Round(outputs, steps, seconds, cpu_seconds)


def _submit(engine: Engine, asked: Question, max_tokens: int) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, complete=False)
    return engine.submit(asked.prompt, asked.grammar, sampling)


def figures(done: Round) -> dict[str, Any]:
    """Of one round."""
    return {
        "tpot_ms": round(done.tpot_ms, 4),
        "cpu_ms": round(done.cpu_ms, 4),
        "tokens_per_second": round(done.tokens_per_second, 1),
        "accept_length": round(done.accept_length, 4),
        "steps": done.steps,
        "output_tokens": done.output_tokens,
        "output_sha256": done.output_sha256,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a decode step costs, by batch size.")
    parser.add_argument("--batch", default="1,4,16,32", help="batch sizes, with commas between")
    parser.add_argument("--arrivals", action="store_true", help="measure arriving prompts too")
    parser.add_argument("--free", action="store_true", help="without schemas")
    parser.add_argument("--overlap", default="once-sync", help="overlap mode (once-sync)")
    parser.add_argument("--model", help="target's folder; the embedded one if absent")
    parser.add_argument("--draft", help="its EAGLE-3 head's")
    parser.add_argument("--threads", type=int, help="of a pass (default: the engine's choice)")
    parser.add_argument("--turns", type=int, default=5, help="rounds of each (default 5)")
    options = parser.parse_args(arguments)
    batches = [int(size) for size in options.batch.split(",") if size]
    if any(not 1 <= size <= SETTINGS["max_running_requests"] for size in batches):
        parser.error(f"--batch: 1 to {SETTINGS['max_running_requests']} requests")
    torch.set_num_threads(options.threads or 1)
    work = {f"batch_{size}": (size, False) for size in batches}
    if options.arrivals:
        work["arrivals"] = (DECODING, True)
    given = {name: getattr(options, name) for name in ("model", "draft", "threads")}
    given = {name: value for name, value in given.items() if value is not None}
    with Engine(overlap=options.overlap, **SETTINGS, **given) as engine:
        for name, (batch, arrivals) in work.items():
            for number in range(options.turns + 1):
                if not sys.stdin.readline():
                    return
                found = figures(answer(engine, batch, arrivals, options.free))
                print(json.dumps({name: found} if number else {}), flush=True)


if __name__ == "__main__":
    main()
