"""Where the time of each pass goes, on a CPU.

``python -m bench.parts [--model 0.75b] [--batch 1,8]`` decodes JSON under schemas in the serial
mode: plain, with chains of 5 drafts (verifies of 6 nodes), and of 15 (of 16). First as it is: the
time of a step and of each of its passes. Then under torch's profiler, which lengthens each
operation by about a microsecond: the share of each part of a pass is from there, its time is not.

Fields of the record, by case and batch size: ``step_ms``, ``accept_length``, ``tokens_per_second``,
``passes`` (by pass: ``ms`` a step, and ``parts``, each part's share of it), and ``weights_gb_s``:
the bytes of the target's weights over the time that verify's products take. ``read_gb_s`` is what
all threads read of memory together when they only add.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.common import Run, command, flags, median, sizes
from bench.step_cost import SETTINGS, answer
from bench.targets import add_model_flags, model_settings
from overlap_spec import Engine

# By what the name of an operation holds; the first that fits.
PARTS = (
    ("products", ("product", "linear", "addmm", "::mm", "matmul")),
    ("attention", ("scaled_dot_product", "bmm", "softmax", "index_select")),
    ("norms", ("rms_norm", "rsqrt", "pow", "mean")),
    ("activation", ("silu", "gelu")),
    ("choice", ("argmax", "topk", "sort", "max", "where", "gather", "bitwise", "cumsum")),
    ("copies", ("index", "copy", "cat", "::to", "clone", "pad", "repeat")),
    ("arithmetic", ("add", "mul", "sub", "div", "tanh", "exp", "neg", "clamp", "compare", "::eq")),
)
# The rest are views and the like, which compute nothing: their time is dispatch.
DISPATCH = "dispatch"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "none"},
    "6 nodes": {"num_steps": 5},
    "16 nodes": {"num_steps": 15},
}
# Read once, so much that no cache holds it.
READ_BYTES = 1 << 30
ROUNDS = 3


def part_of(name: str, shapes: Sequence[Sequence[int]], vocab: int) -> str:
    """The part that an operation belongs to; products with as many columns as the vocabulary has
    are ``logits``."""
    for part, names in PARTS:
        if any(piece in name for piece in names):
            # A native product's weight is in blocks of 16 rows.
            rows = vocab, -(-vocab // 16)
            wide = part == "products" and any(n in shape for shape in shapes for n in rows)
            return "logits" if wide else part
    return DISPATCH


def timed(engine: Engine, label_times: dict[str, list[float]]) -> Callable[[], None]:
    """Note how long each of compute's passes takes, under its name in a profile as well; the
    function that is returned ends it."""
    stream = engine.core.worker.streams.compute
    run = stream.run

    def noted(label: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        with record_function(f"pass:{label}"):
            value = run(label, work, *args)
        label_times[label].append((time.perf_counter() - start) * 1e3)
        return value

    stream.run = noted  # type: ignore[method-assign]

    def end() -> None:
        stream.run = run  # type: ignore[method-assign]

    return end


def shares(engine: Engine, batch: int, vocab: int) -> dict[str, dict[str, float]]:
    """By pass, each part's share of the time in its operations."""
    end = timed(engine, defaultdict(list))
    try:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            answer(engine, batch)
    finally:
        end()
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in profiled.events() or ():
        above = event
        while above is not None and not above.name.startswith("pass:"):
            above = above.cpu_parent
        if above is not None and above is not event:
            part = part_of(event.name, event.input_shapes or (), vocab)
            found[above.name.removeprefix("pass:")][part] += event.self_cpu_time_total
    for parts in found.values():
        whole = sum(parts.values())
        for part in parts:
            parts[part] = round(parts[part] / whole, 4)
    return found


def read_gb_s(threads: int) -> float:
    """Gigabytes a second that ``threads`` threads read and add up."""
    torch.set_num_threads(threads)
    held = torch.ones(READ_BYTES // 4)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        held.sum()
        best = max(best, READ_BYTES / (time.perf_counter() - start) / 1e9)
    return round(best, 1)


def measure(case: str, batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One cell of the record."""
    with Engine(**SETTINGS | settings | CASES[case], overlap="none") as engine:
        answer(engine, batch)
        times: dict[str, list[float]] = defaultdict(list)
        end = timed(engine, times)
        done = [answer(engine, batch) for _ in range(ROUNDS)]
        end()
        worker = engine.core.worker
        parts = shares(engine, batch, worker.runner.tables.vocab_size)
        target = worker.runner.target
        weights = sum(t.numel() * t.itemsize for t in (*target.parameters(), *target.buffers()))
        weights -= target.embed_tokens.weight.numel() * target.embed_tokens.weight.itemsize
        steps = sum(one.steps for one in done)
        passes: dict[str, dict[str, Any]] = {
            label: {"ms": round(sum(each) / steps, 3), "parts": dict(parts[label])}
            for label, each in times.items()
            if sum(each) / steps > 0.01
        }
        verify = passes["verify"]
        products = sum(verify["parts"].get(part, 0.0) for part in ("products", "logits"))
        return {
            "step_ms": round(median([one.seconds * 1e3 / one.steps for one in done]), 3),
            "tokens_per_second": round(median([one.tokens_per_second for one in done]), 1),
            "accept_length": round(done[0].accept_length, 3),
            "passes": passes,
            "weights_gb_s": round(weights / (median(times["verify"]) * products) / 1e6, 1),
        }


@command
def main(arguments: Sequence[str] | None) -> dict[str, Any]:
    """The command line; returns the record."""
    parser = flags("parts", "Where the time of each pass goes, on a CPU.")
    add_model_flags(parser)
    parser.add_argument("--batch", type=sizes, default=[1, 8], help="sizes, with commas between")
    parser.add_argument("--threads", type=int, help="torch's (default: the engine's choice)")
    parser.add_argument("--quantization", choices=["int8"])
    options = parser.parse_args(arguments)
    run = Run("parts", options, arguments)
    settings = model_settings(options, run.console) | {"device": "cpu"}
    given = {"threads": options.threads, "quantization": options.quantization}
    settings |= {name: value for name, value in given.items() if value is not None}
    found: dict[str, Any] = {}
    for batch in options.batch:
        for case in list(CASES)[: 2 if options.quick else None]:
            found[f"{case}, batch {batch}"] = cell = measure(case, batch, settings)
            run.sample(case=case, batch=batch, **cell)
    read = read_gb_s(options.threads or torch.get_num_threads())
    return run.finish(ROUNDS, cases=found, read_gb_s=read, model=Path(options.model or "").name)


if __name__ == "__main__":
    main()
