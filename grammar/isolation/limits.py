"""What one compile may use, and the error of one that uses more."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from overlap_spec.errors import ConfigError, GrammarError

FailureKind = Literal["timeout", "out_of_memory", "crash", "busy", "closed"]


class CompileFailure(GrammarError):
    """A grammar that was neither compiled nor refused: compiling it ended otherwise.

    Args:
        message: What happened, and what to do.
        kind: `timeout` and `out_of_memory`: over its limits. `crash`: the library ended its
            process or raised what it may not. `busy`: no room in the queue, try again later.
            `closed`: the engine was closed while it waited.
        param: The field at fault.
    """

    def __init__(self, message: str, kind: FailureKind = "crash", param: str | None = None) -> None:
        super().__init__(message, param)
        self.kind = kind


def _share_of_cores(part: int, least: int) -> int:
    return max(least, min(4, (os.cpu_count() or 1) // part))


@dataclass(frozen=True)
class CompileLimits:
    """Bounds of one compile, and of all at once.

    A compile starts on the fast queue. One that still runs after `fast_s` counts as long: it goes
    on where fewer than `long_running` are, otherwise it is stopped and starts again when its turn
    comes. What waits holds no memory.

    Args:
        time_s: Wall-clock seconds that a compile may run; waiting is not counted.
        memory_bytes: Memory that a compile may add to its worker process.
        result_bytes: Most bytes of a compiled grammar's serialised form.
        fast_s: Seconds after which a compile counts as long.
        fast_running, long_running: Compiles that run at once.
        fast_waiting, long_waiting: Compiles that wait; what comes beyond is refused as `busy`.
        nice, long_nice: Added to the niceness of workers, from the start and once their compile is
            a long one: the engine's own threads go first.

    Raises:
        ConfigError: a bound that cannot be; names it.
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
    long_nice: int = 19

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("nice", "long_nice", "long_waiting")):
                raise ConfigError(f"grammar compile limit {name} cannot be {value}")
        if self.long_nice < self.nice:
            raise ConfigError(f"grammar compile limit long_nice cannot be under nice, {self.nice}")

    @property
    def first_s(self) -> float:
        """Seconds that a compile may run on the fast queue."""
        return min(self.fast_s, self.time_s)
