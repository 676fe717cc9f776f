"""How far a training is, on the terminal or in a log."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from overlap_spec.training.trainer import Report

COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.fields[note]}"),
    TimeElapsedColumn(),
)


def progress_bar(progress: Progress, title: str) -> Report:
    """A Report that moves a bar of ``progress`` and shows the smoothed loss."""
    task = progress.add_task(title, total=1.0, note="")
    smooth: list[float] = []

    def report(share: float, step: int, loss: float) -> None:
        smooth.append(loss)
        mean = sum(smooth[-50:]) / len(smooth[-50:])
        progress.update(task, completed=share, note=f"step {step} loss {mean:.3f}")
        if not progress.console.is_terminal and step % 50 == 0:
            progress.console.print(f"{title} {share:.3f} step {step} loss {mean:.4f}")

    return report


def share_bar(progress: Progress, title: str) -> Callable[[float], None]:
    """A bar for work without steps or a loss: called with the share that is done."""
    task = progress.add_task(title, total=1.0, note="")

    def report(share: float) -> None:
        progress.update(task, completed=share)
        if not progress.console.is_terminal and share >= 1:
            progress.console.print(f"{title} done")

    return report


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

    def steps(self, title: str) -> Report:
        """For a phase with steps and losses."""
        bar = progress_bar(self.progress, title)

        def report(share: float, step: int, loss: float) -> None:
            bar(share, step, loss)
            self._check()

        return report

    def share(self, title: str) -> Callable[[float], None]:
        """For a phase without."""
        bar = share_bar(self.progress, title)

        def report(share: float) -> None:
            bar(share)
            self._check()

        return report

    def _check(self) -> None:
        if self.stop():
            raise KeyboardInterrupt
