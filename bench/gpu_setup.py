"""What the parts of ``bench.gpu`` share: settings, sizes, engines, and what a part returns."""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Run, median

if TYPE_CHECKING:
    from overlap_spec.engine import Engine


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        batches: Batch sizes of the comparison with and without a grammar.
        repetitions: Of every comparison.
        cases: Extraction cases that are drawn; the first ``singles`` go one at a time.
        schemas: Schemas that are drawn.
        tokens: Most tokens of an output.
        long_tokens: Of the one output whose verifies are timed.
    """

    batches: tuple[int, ...]
    repetitions: int
    cases: int
    singles: int
    schemas: int
    tokens: int
    long_tokens: int


FULL = Size((1, 4, 16, 32), 7, 64, 8, 32, 96, 384)
QUICK = Size((1, 4, 16, 32), 3, 48, 4, 16, 64, 128)
REHEARSAL = Size((1, 2), 1, 4, 1, 1, 16, 16)

# Beside the settings of ``bench.overlap``.
VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {"grammar_backend": "auto"},
    "tree": {"grammar_backend": "auto", "eagle_topk": 4, "num_draft_tokens": 16},
    "plain": {"grammar_backend": "auto", "algorithm": "none"},
}


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        rehearse: On the CPU, at tiny sizes.
        like: Name of the model whose cost the checkpoint has; ``bench.padded`` knows them.
        folder: Of the checkpoint: ``target`` and ``eagle3`` in it.
        data: Rows of schemas; None is what ``bench.workloads`` finds.
    """

    rehearse: bool
    quick: bool
    seed: int
    like: str
    folder: Path
    data: Path | None = None

    @property
    def size(self) -> Size:
        """How much is run."""
        return REHEARSAL if self.rehearse else QUICK if self.quick else FULL

    @property
    def target(self) -> Path:
        """Folder of the target."""
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        """Folder of its EAGLE-3 head."""
        return self.folder / "eagle3"


@dataclass
class Result:
    """What a part found.

    Attributes:
        figures: Name → :func:`figure`.
        details: More of it, as plain data.
        samples: Raw samples.
        faults: What is wrong, in words: the part has failed then.
        differences: Outputs that differ, in words; None where none were compared.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    differences: list[str] | None = None


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
        setup: What is measured.
        keep: Takes what a part has found so far: it is kept if the part is ended before its end.

    Attributes:
        before: What the same part told before it was ended: details of an earlier :class:`Result`.
        ends_s: When the part is ended, as ``time.monotonic`` has it.
    """

    def __init__(self, setup: Setup, keep: Callable[[Result], object] = lambda _: None) -> None:
        self.setup, self.size, self.keep = setup, setup.size, keep
        self.before: dict[str, Any] = {}
        self.ends_s = float("inf")
        self._open: dict[str, Engine] = {}
        if setup.rehearse:
            # A rehearsal is the same everywhere.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def engines(self, *names: str) -> list[Engine]:
        """The engines of these ``VARIANTS``; all others are closed, and their memory is free."""
        import torch

        from bench.overlap import SETTINGS
        from overlap_spec.engine import Engine

        torch.set_num_threads(1)
        for name in [name for name in self._open if name not in names]:
            self._open.pop(name).close()
        gc.collect()
        torch.cuda.empty_cache()
        for name in names:
            if name not in self._open:
                more = SETTINGS | {"draft": str(self.setup.draft)} | VARIANTS[name]
                self._open[name] = Engine(str(self.setup.target), **more)
        return [self._open[name] for name in names]

    def run(self, name: str, **more: Any) -> Run:
        """A run of another benchmark within this one: its samples, and its options."""
        options = {"quick": self.setup.quick, "seed": self.setup.seed, "json": None, **more}
        return Run(name, Namespace(**options), [])

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self.ends_s - time.monotonic()

    @property
    def copy_bytes_s(self) -> float:
        """Bytes that a large copy reads and writes in a second: the memory's ceiling."""
        return self.ceilings[0]

    @cached_property
    def ceilings(self) -> tuple[float, float]:
        """Bytes a second of a large copy, and operations a second of a large product."""
        import torch

        if torch.cuda.is_available():
            from bench.kernels import ceilings

            return ceilings(self.setup.quick)
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
