"""Each kernel's time and share of the roofline, beside its torch reference.

``python -m bench.kernels [--quick] [--json PATH] [--seed S] [--only NAME]`` needs a CUDA
device and ends with exit status 2 without one; ``--quick`` without one prints the plan alone: what
would be launched, and what it must move.

First two ceilings are measured: a large copy (bytes read and written) and a large product. Then
every operation at Llama-3.1-8B's shapes, as a CUDA graph of calls over inputs that take turns, so
that none is found in the cache; the reference in the same way. The share is the least time that
the ceilings allow over the time taken. Kernel and reference are first held to each other: where
they disagree, the exit status is 1. What a pass does once for all layers (packing a mask, or
spreading it) is not counted. Attention is measured with FlashAttention-3 too, where that is
installed (``OVERLAP_SPEC_KERNELS=flash``).

Fields of the last line, beside those of every record (``bench.common``):
    measured: Whether there was a device.
    copy_gb_s, matmul_tflop_s: The ceilings.
    kernels: Name → ``us`` and ``reference_us`` (spreads), ``gb_s``, ``tflop_s``, ``share``,
        ``speedup`` (pair by pair), ``bytes``, ``flops``, ``launches``; with FlashAttention-3
        ``flash_us`` and ``flash_speedup`` (over the kernel).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.common import Run, fail, flags, median, paired, spread
from bench.kernel_work import Draw, Work, works
from overlap_spec.kernels.dispatch import flash_installed, use
from overlap_spec.kernels.triton.launch import recorded

CACHE_BYTES = 256 * 2**20
MOST_SETS, CALLS = 16, 32


def input_sets(work: Work) -> list[tuple[Any, ...]]:
    """Enough sets of arguments that together they are more than any cache holds."""
    first = work.draw()
    held = max(1, sum(t.numel() * t.element_size() for t in tensors(first)))
    count = min(MOST_SETS, max(2, -(-CACHE_BYTES // held)))
    return [first, *(work.draw() for _ in range(count - 1))]


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def graph_us(work: Work, choice: str, sets: list[tuple[Any, ...]]) -> Callable[[], float]:
    """A measurement of microseconds a call, by replays of a graph of many calls."""
    with use(choice), torch.inference_mode():
        for args in sets:
            work.operation(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(CALLS):
                work.operation(*sets[index % len(sets)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms * 1e3 / CALLS

    return sample


def disagreement(work: Work, args: tuple[Any, ...], choice: str = "triton") -> float:
    """Largest relative error of the kernel's results, and of what it wrote into its arguments."""
    outcomes = []
    for each in (choice, "reference"):
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        with use(each), torch.inference_mode():
            result = work.operation(*own)
        outcomes.append([*tensors(result), *tensors(own)])
    worst = 0.0
    for mine, theirs in zip(*outcomes, strict=True):
        mine, theirs = (t.double().nan_to_num(7.0, 1e4, -1e4) for t in (mine, theirs))
        size = float(theirs.norm())
        worst = max(worst, float((mine - theirs).norm()) / size if size else 0.0)
    return worst


# Choices may differ by one token at a boundary of the coin; a path's tail is arbitrary.
OPEN = ("masked_choose", "top_candidates", "accept_path")


# Where a choice's time stands in the record.
FIELDS = {"triton": "us", "reference": "reference_us", "flash": "flash_us"}


def choices_of(work: Work) -> tuple[str, ...]:
    """Which of :data:`FIELDS` are held to the reference."""
    is_attention = (work.config or "").startswith("attention")
    return ("triton", "flash") if is_attention and flash_installed() else ("triton",)


def ceilings(quick: bool) -> tuple[float, float]:
    """Bytes a second of a copy, and bf16 operations a second of a product."""
    size = 2**28 if quick else 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = _best_us(lambda: target.copy_(source))
    side = 4096 if quick else 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = _best_us(lambda: torch.mm(a, b))
    return 2 * size / copy_us * 1e6, 2 * side**3 / product_us * 1e6


def _best_us(call: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[2:])


def measure_all(run: Run, chosen: list[Work], repetitions: int) -> dict[str, Any]:
    """Kernel and reference of every work in turn; the record's fields."""
    memory, product = ceilings(run.options.quick)
    rows: dict[str, Any] = {}
    with run.progress() as progress:
        task = progress.add_task("kernels", total=len(chosen))
        for work in chosen:
            progress.update(task, description=work.name)
            sets = input_sets(work)
            choices = choices_of(work)
            for choice in choices:
                error = disagreement(work, sets[0], choice)
                if error > 0.02 and not work.name.startswith(OPEN):
                    fail(f"{work.name}: {choice} and reference disagree by {error:.3g}")
            samples = {c: graph_us(work, c, sets) for c in (*choices, "reference")}
            us: dict[str, list[float]] = {choice: [] for choice in samples}
            for _ in range(repetitions):
                for choice, sample in samples.items():
                    us[choice].append(sample())
                last = {FIELDS[choice]: values[-1] for choice, values in us.items()}
                run.sample(work=work.name, **last)
            taken = us["triton"]
            seconds = median(taken) * 1e-6
            floor = max(work.bytes / memory, work.flops / product)
            rows[work.name] = {
                **{FIELDS[choice]: spread(values) for choice, values in us.items()},
                "gb_s": work.bytes / seconds / 1e9,
                "tflop_s": work.flops / seconds / 1e12,
                "share": floor / seconds,
                "speedup": paired(us["reference"], taken),
                **plan(work),
            }
            if "flash" in us:
                rows[work.name]["flash_speedup"] = paired(taken, us["flash"])
            progress.advance(task)
    return {"copy_gb_s": memory / 1e9, "matmul_tflop_s": product / 1e12, "kernels": rows}


def plan(work: Work) -> dict[str, Any]:
    """What a work moves, computes and launches."""
    with use("reference"):
        args = work.draw()
    with use("triton"), recorded() as launches:
        work.operation(*args)
    return {
        "bytes": work.bytes,
        "flops": work.flops,
        "launches": [f"{one.kernel.__name__.strip('_')} {one.grid}" for one in launches],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("kernels", "Time and share of the roofline of each kernel.")
    parser.add_argument("--only", metavar="NAME", help="kernels whose name holds NAME")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not (cuda or options.quick):
        print("error: bench.kernels needs a CUDA device; --quick shows the plan", file=sys.stderr)
        sys.exit(2)
    run = Run("kernels", options, arguments)
    draw = Draw(torch.device("cuda" if cuda else "cpu"), torch.bfloat16, options.seed)
    batches = (1,) if options.quick else (1, 32)
    chosen = [work for work in works(draw, batches) if (options.only or "") in work.name]
    if cuda:
        repetitions = 5 if options.quick else 15
        record = {"measured": True, **measure_all(run, chosen, repetitions)}
    else:
        repetitions = 0
        print("no CUDA device: the plan alone, nothing is measured", file=sys.stderr)
        record = {"measured": False, "kernels": {work.name: plan(work) for work in chosen}}
    run.finish(repetitions, **record)


if __name__ == "__main__":
    main()
