"""Optional parts that are no files of the package."""

from dataclasses import replace
from typing import Any

from overlap_spec.types import Delta, Output, Request
from overlap_spec.worker.extras.base import Extra, Row, Surroundings


class StepTokens(Extra):
    """How many tokens each step brought, and how many of them are output."""

    reads_rows = True

    def __init__(self, request: Request, engine: Surroundings) -> None:
        super().__init__(request, engine)
        self._steps: list[tuple[int, int]] = []

    @staticmethod
    def read_row(row: Row) -> int:
        return len(row.tokens)

    def take(self, told: Any, kept: int) -> None:
        self._steps.append((told, kept))

    def complete(self, last: Delta, output: Output) -> tuple[Delta, Output]:
        return last, replace(output, told={**output.told, self.name: self._steps})
