"""Where an output ends, decided once a token, for output, matcher and cache alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from overlap_spec.types import FinishReason, Request


class Detokenizer(Protocol):
    """Turns one request's output tokens into text, one at a time."""

    def push(self, token: int) -> str:
        """Text that ``token`` completes; characters cut between tokens come with the last."""


@dataclass(frozen=True)
class Cut:
    """The first ``kept`` tokens of a run belong to the output, which then is finished or not."""

    kept: int
    reason: FinishReason | None
    match: str | int | None = None


class TextBuffer:
    """The text of one output, and how much of it can no longer be part of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.text = ""
        self._sent = 0
        self._detokenizer, self._stops = detokenizer, stops
        self._longest = max(map(len, stops), default=0)

    def push(self, token: int, watch: bool = True) -> str | None:
        """Append a token's text; the stop string it completes, if any, cuts the text before it."""
        added = self._detokenizer.push(token)
        first = max(len(self.text) - self._longest + 1, 0)
        self.text += added
        if not watch or not added:
            return None
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def release(self, finished: bool) -> str:
        """Text that may be shown now and was not shown before."""
        end = len(self.text)
        if not finished:
            end -= max(
                (
                    n
                    for stop in self._stops
                    for n in range(1, min(len(stop), len(self.text) + 1))
                    if self.text.endswith(stop[:n])
                ),
                default=0,
            )
        shown = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown


def cut(request: Request, output_tokens: int, buffer: TextBuffer, run: Sequence[int]) -> Cut:
    """Cut an accepted run by the request's stop rules; the earliest token wins.

    At one token the order is: stop token, stop string, length. A grammar that has ended allows
    nothing but stop tokens.

    Args:
        output_tokens: Tokens already in the output.
        buffer: Its text; takes in the kept tokens.
    """
    for index, token in enumerate(run):
        count = output_tokens + index + 1
        if token in request.stop_ids:
            return Cut(index + 1, "stop", token)
        stop = buffer.push(token, watch=count >= request.sampling.min_tokens)
        if stop is not None:
            return Cut(index + 1, "stop", stop)
        if count >= request.max_tokens:
            return Cut(index + 1, "length")
    return Cut(len(run), None)
