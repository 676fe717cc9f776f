"""Where an output ends, decided once a token, for output, matcher and cache alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from overlap_spec.types import FinishReason, Request


class Detokenizer(Protocol):
    """Turns one request's output tokens into text, as they come."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that ``tokens`` complete; characters cut between tokens come with the last."""


class Cut(NamedTuple):
    """The first ``kept`` tokens of a run belong to the output, which then is finished or not."""

    kept: int
    reason: FinishReason | None
    match: str | int | None = None


class Finder(Protocol):
    """Looks for a pattern in one output, as its text comes."""

    source: str

    def push(self, text: str, watched: bool) -> int | None:
        """Go on by ``text``: its characters up to the first place where a match ends; None: there
        is none, or the text is not watched."""


class TextBuffer:
    """The text of one output, and how much of it can no longer be part of a stop string;
    ``finders`` are of the patterns that end it; with ``keep_stop`` it keeps the stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        finders: Sequence[Finder] = (),
        keep_stop: bool = False,
    ) -> None:
        self.text = ""
        self._sent = 0
        self._detokenizer, self._stops = detokenizer, stops
        self._finders, self.keep_stop = finders, keep_stop
        self._longest = max(map(len, stops), default=0)

    def push(self, tokens: Sequence[int], unwatched: int = 0) -> tuple[int, str] | None:
        """Append the text of tokens, up to the one that completes a stop string or a match, which
        the first ``unwatched`` of them may not.

        Returns:
            Its index and the stop string, before which the text is cut, or the pattern, after whose
            match it is; of several, that which leaves the shorter text. None if there is none.
        """
        if not self._stops and not self._finders:
            self.text += self._detokenizer.push(tokens)
            return None
        for index, token in enumerate(tokens):
            before, watched = len(self.text), index >= unwatched
            added = self._detokenizer.push((token,))
            self.text += added
            found = [(finder.push(added, watched), finder.source) for finder in self._finders]
            ends = [(before + end, source) for end, source in found if end is not None]
            if watched and added:
                ends += self._stops_from(max(before - self._longest + 1, 0))
            if ends:
                end, stop = min(ends)
                self.text = self.text[:end]
                return index, stop
        return None

    def add(self, token: int) -> None:
        """Append the text of the stop token that ends the output."""
        self.text += self._detokenizer.push((token,))

    def _stops_from(self, first: int) -> list[tuple[int, str]]:
        """Where the text would end by each stop string that it has from character ``first`` on."""
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        return [(at + len(stop) if self.keep_stop else at, stop) for at, stop in found]

    def release(self, finished: bool) -> str:
        """Text that may be shown now and was not shown before."""
        end = len(self.text)
        if self._stops and not finished:
            begun = (stop[:n] for stop in self._stops for n in range(1, min(len(stop), end + 1)))
            end -= max((len(part) for part in begun if self.text.endswith(part)), default=0)
        shown = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown


def cut(request: Request, output_tokens: int, buffer: TextBuffer, run: Sequence[int]) -> Cut:
    """Cut an accepted run by the request's stop rules; the earliest token wins.

    At one token the order is: stop token, stop string or pattern, length. A grammar that has ended
    allows nothing but stop tokens. ``output_tokens`` are in the output already; ``buffer``, its
    text, takes in the kept ones.
    """
    room = request.max_tokens - output_tokens
    run = run[:room]
    text, stop_token = run, None
    if not request.stop_ids.isdisjoint(run):
        at = next(i for i, token in enumerate(run) if token in request.stop_ids)
        text, stop_token = run[:at], run[at]
    found = buffer.push(text, request.sampling.min_tokens - output_tokens - 1)
    if found is not None:
        return Cut(found[0] + 1, "stop", found[1])
    if stop_token is not None:
        if buffer.keep_stop:
            buffer.add(stop_token)
        return Cut(len(text) + 1, "stop", stop_token)
    return Cut(len(run), "length" if len(run) == room else None)
