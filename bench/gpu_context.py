"""What the parts of ``bench.gpu`` share: sizes, engines, ceilings, and what a part returns."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.common import median
from bench.kernels import ceilings
from bench.overlap import SETTINGS
from overlap_spec.engine import Engine


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        batches: Batch sizes of the comparison with and without a grammar.
        repetitions: Of every comparison.
        cases: Extraction cases that are drawn.
        schemas: Schemas that are drawn.
        tokens: Most tokens of an output.
        long_tokens: Of the one output whose verifies are timed.
    """

    batches: tuple[int, ...]
    repetitions: int
    cases: int
    schemas: int
    tokens: int
    long_tokens: int


FULL = Size((1, 4, 16, 32), 7, 64, 32, 96, 384)
QUICK = Size((1, 4, 16, 32), 3, 48, 16, 64, 128)
REHEARSAL = Size((1, 2), 1, 4, 1, 16, 16)

VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"eagle_topk": 4, "num_draft_tokens": 16},
}


@dataclass
class Result:
    """What a part found.

    Attributes:
        figures: Name → :func:`figure`.
        details: More of it, as plain data.
        samples: Raw samples.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


def figure(
    value: float, *, least: float | None = None, most: float | None = None, **more: Any
) -> dict[str, Any]:
    """A figure held against its target, ``least`` or ``most``; without one, ``met`` is None.

    Args:
        more: ``unit``, ``by`` (what else was measured of it: label → value), and the like.
    """
    target = most if least is None else least
    met = None if target is None else value >= target if least is not None else value <= target
    goal = None if target is None else "at least" if least is not None else "at most"
    return {"value": value, "target": target, "goal": goal, "met": met, **more}


class Context:
    """The engines on one checkpoint, opened when a part asks for them.

    Args:
        options: Of the command line.
        target, draft: Folders of the checkpoint and of its EAGLE-3 head.
    """

    def __init__(self, options: Namespace, target: Path, draft: Path) -> None:
        self.options, self.target, self.draft = options, target, draft
        self.rehearse: bool = options.rehearse
        self.size = REHEARSAL if self.rehearse else QUICK if options.quick else FULL
        self.device = "cpu" if self.rehearse else "cuda"
        # Of a weight as the engine holds it: float32 on the CPU.
        self.itemsize = 4 if self.rehearse else 2
        self._open: dict[str, Engine] = {}

    def engines(self, *names: str) -> list[Engine]:
        """The engines of these ``VARIANTS``; all others are closed, and their memory is free."""
        torch.set_num_threads(1)
        for name in [name for name in self._open if name not in names]:
            self._open.pop(name).close()
        gc.collect()
        torch.cuda.empty_cache()
        for name in names:
            if name not in self._open:
                more = {"draft": str(self.draft), "device": self.device, "grammar_backend": "auto"}
                self._open[name] = Engine(str(self.target), **SETTINGS | more | VARIANTS[name])
        return [self._open[name] for name in names]

    @cached_property
    def ceilings(self) -> tuple[float, float]:
        """Bytes a second of a large copy, and operations a second of a large product."""
        if not self.rehearse:
            return ceilings(self.options.quick)
        source, side = torch.randint(0, 255, (2**26,), dtype=torch.uint8), 256
        target, factor = torch.empty_like(source), torch.randn(side, side)
        copied_s = _median_s(lambda: target.copy_(source))
        return 2 * len(source) / copied_s, 2 * side**3 / _median_s(lambda: factor @ factor)


def _median_s(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)
