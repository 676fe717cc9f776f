"""Resource limits of a compile, and the error of one that fails."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from overlap_spec.errors import ConfigError, GrammarError

FailureKind = Literal[
    "timeout", "out_of_memory", "crash", "busy", "closed", "unavailable", "no_memory"
]
SIMPLIFY = "simplify it (long repetitions are the usual cause)"


class CompileFailure(GrammarError):
    """A grammar was neither compiled nor refused.

    Args:
        message: What happened, and what to do.
        kind: `timeout` and `out_of_memory`: a limit was exceeded. `crash`: the library ended its
            process or raised an unexpected error. `busy`: the queue is full, try again later.
            `closed`: the engine was closed while the grammar waited. `unavailable`: its workers
            were stopped, killed or could not start, also at a second try; no grammar is to blame.
            `no_memory`: the engine is at its memory's ceiling, or the machine has no memory left
            that a compile may have; nor is it the grammar's fault.
        param: The request's field at fault.
    """

    def __init__(self, message: str, kind: FailureKind = "crash", param: str | None = None) -> None:
        super().__init__(message, param)
        self.kind = kind


def _share_of_cores(part: int, least: int) -> int:
    return max(least, min(4, (os.cpu_count() or 1) // part))


@dataclass(frozen=True)
class CompileLimits:
    """Limits of one compile, and of all of them together.

    A compile starts on the fast queue. One that still runs after `fast_s` counts as long: it
    continues if fewer than `long_running` do, otherwise it is stopped and restarted when its turn
    comes. Waiting compiles hold no memory. All numbers are shared out by holder: see
    :func:`overlap_spec.shares.has_room`.

    Args:
        time_s: Wall-clock seconds that a compile may run, without waiting.
        memory_bytes: Memory that a compile may add to its worker process.
        result_bytes: Largest serialised form of a compiled grammar.
        fast_s: Seconds after which a compile counts as long.
        fast_running, long_running: Compiles that run at the same time.
        fast_waiting, long_waiting: Compiles that wait; any more are refused as `busy`.
        nice: Added to the niceness of workers, so that the engine's own threads go first.

    Raises:
        ConfigError: a value is out of range; names it.
    """

    time_s: float = 10.0
    memory_bytes: int = 2 * 2**30
    result_bytes: int = 2**28
    fast_s: float = 1.0
    fast_running: int = field(default_factory=lambda: _share_of_cores(4, least=2))
    long_running: int = field(default_factory=lambda: _share_of_cores(8, least=1))
    fast_waiting: int = 1024
    long_waiting: int = 64
    nice: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("nice", "long_waiting")):
                raise ConfigError(f"grammar compile limit {name} cannot be {value}")


class Failed(Exception):
    """A job has failed: the kind and the reason of its `CompileFailure`."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def out_of_memory(limits: CompileLimits, is_its_own: bool) -> Failed:
    """A job met its own limit of memory, or the machine's."""
    most = f"{limits.memory_bytes / 2**20:g} MiB of memory"
    if is_its_own:
        return Failed("out_of_memory", f"it took more than {most}; {SIMPLIFY}")
    reason = f"the machine has less than the {most} that it may take; try again later"
    return Failed("no_memory", reason)
