"""What the commands show on a terminal: a spinner while a model loads, and coloured tokens."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from overlap_spec.server.origins import TokenOrigins
    from overlap_spec.types import Delta

# How a token came → its style, and what the legend says of it.
ORIGINS = {
    "drafted": ("bold #4a90e2", "drafted: guessed, and the target agreed"),
    "grafted": ("bold #a66bd9", "grafted: forced text, drafted by the grammar"),
    "bonus": ("bold #e0912f", "bonus: the target's own choice"),
    "forced": ("bold #1fae7d", "forced: the only token that the grammar allowed"),
}


@contextmanager
def loading(model: str | None, until: Sequence[str] = ()) -> Iterator[None]:
    """A spinner on stderr, if that is a terminal, until the block ends.

    Args:
        model: What is loaded; None is the embedded model.
        until: Names of loggers; their first record ends the spinner already.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"loading {model or 'the embedded model'} …") as status:

        class Ends(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
                status.stop()

        ends, logs = Ends(logging.INFO), [logging.getLogger(name) for name in until]
        for log in logs:
            log.addHandler(ends)
        try:
            yield
        finally:
            for log in logs:
                log.removeHandler(ends)


def coloured(origins: TokenOrigins, delta: Delta) -> Text:
    """The text of a piece, each token in the colour of how it came."""
    text = Text()
    for token in origins.chunk_fields(delta).get("overlap_spec", {}).get("tokens", ()):
        text.append(token["text"], style=ORIGINS[token["origin"]][0])
    return text


def legend(names: Sequence[str] = tuple(ORIGINS)) -> Text:
    """One line for each way that a token can come."""
    lines = [Text.assemble(("■ ", ORIGINS[name][0]), ORIGINS[name][1]) for name in names]
    return Text("\n").join(lines)


@contextmanager
def stops() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came; the first lets the step end, a second one does not."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:  # noqa: ARG001
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block with exit status 0, until somebody else handles it."""

    def end(number: int, frame: Any) -> None:  # noqa: ARG001
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
