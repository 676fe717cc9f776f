"""How far a training is, on the terminal or in a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from overlap_spec.training.budget import Budget
from overlap_spec.training.trainer import Report

COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.fields[note]}"),
    TimeElapsedColumn(),
)


class Bars:
    """Bars of the phases of a training.

    Args:
        progress: Where they are shown.
        stop: Whether the user has asked to stop: the next report then raises KeyboardInterrupt.
    """

    def __init__(self, progress: Progress, stop: Callable[[], bool] = lambda: False) -> None:
        self.progress, self.stop = progress, stop

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, highlight=False, soft_wrap=True)

    def steps(self, title: str, budget: Budget | None = None) -> Report:
        """For a phase with steps and losses, of which the smoothed one is shown; logs say how many
        tokens a second of ``budget`` were trained on."""
        task = self.progress.add_task(title, total=1.0, note="")
        last: deque[float] = deque(maxlen=50)

        def report(share: float, step: int, loss: float) -> None:
            last.append(loss)
            mean = sum(last) / len(last)
            self.progress.update(task, completed=share, note=f"step {step} loss {mean:.3f}")
            if step % 50 == 0:
                line = f"{title} {share:.3f} step {step} loss {mean:.4f}"
                if budget is not None:
                    line += f" tokens/s {budget.tokens_done / budget.seconds():.0f}"
                self._log(line)
            self._check()

        return report

    def share(self, title: str) -> Callable[[float], None]:
        """For a phase without."""
        task = self.progress.add_task(title, total=1.0, note="")

        def report(share: float) -> None:
            self.progress.update(task, completed=share)
            if share >= 1:
                self._log(f"{title} done")
            self._check()

        return report

    def _log(self, line: str) -> None:
        """What a log gets in place of a bar."""
        if not self.progress.console.is_terminal:
            self.progress.console.print(line)

    def _check(self) -> None:
        if self.stop():
            raise KeyboardInterrupt
