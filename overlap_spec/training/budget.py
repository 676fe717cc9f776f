"""How long training runs, and how far it is: by minutes, by steps or by tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """A limit in minutes of training time, in steps or in tokens, whichever is given.

    Attributes:
        minutes, steps, tokens: The limit; exactly one is not None. Tokens leave out padding.
        used: Seconds of training before this process (from a checkpoint).
        done: Steps done.
        tokens_done: Tokens trained on.
    """

    minutes: float | None = None
    steps: int | None = None
    tokens: int | None = None
    used: float = 0.0
    done: int = 0
    tokens_done: int = 0
    _start: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        if (self.minutes, self.steps, self.tokens).count(None) != 2:
            raise ValueError("give the budget in minutes, in steps or in tokens, in one of them")

    def seconds(self) -> float:
        """Seconds trained so far, earlier processes included."""
        return self.used + time.monotonic() - self._start

    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        if self.tokens is not None:
            return min(1.0, self.tokens_done / max(1, self.tokens))
        if self.steps is not None:
            return min(1.0, self.done / max(1, self.steps))
        assert self.minutes is not None
        return min(1.0, self.seconds() / max(1e-9, 60 * self.minutes))

    def restart_clock(self, used: float) -> None:
        """Count from now, with ``used`` seconds trained before."""
        self.used, self._start = used, time.monotonic()
