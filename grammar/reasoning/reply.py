"""Splits a reply into thinking and answer, by the markers around the thinking."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from overlap_spec.errors import ConfigError
from overlap_spec.grammar.tools.stream import partial_end

GAP = "\n"
MOST_GAP = 2


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers of a model's thinking.

    Args:
        begin: Opens it; some chat templates put it into the prompt.
        opens_inside: Whether a reply without `begin` starts inside the thinking, because the
            template has opened it or the model always thinks. If not, a reply thinks only if it
            starts with `begin`.
    """

    begin: str
    end: str
    opens_inside: bool


FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", True),
    "qwen3": ReasoningFormat("<think>", "</think>", False),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", False),
}


def load_reasoning(name: str) -> ReasoningFormat:
    """A format by name (hyphens count as underscores, case is ignored).

    Raises:
        ConfigError: the name is unknown.
    """
    found = FORMATS.get(name.lower().replace("-", "_"))
    if found is None:
        raise ConfigError(f"unknown reasoning parser {name!r}; known are: {', '.join(FORMATS)}")
    return found


def opened_by(form: ReasoningFormat, prompt: str) -> bool | None:
    """Whether a prompt opens the thinking (True) or has closed it (False); None if it ends in
    neither marker, so that the model decides.

    Only the end of the prompt counts: markers inside messages are ignored.
    """
    ending = prompt.rstrip()
    if ending.endswith(form.end):
        return False
    return True if ending.endswith(form.begin) else None


class ReasoningStream:
    """Splits a streamed reply into thinking and answer; pieces may have any size.

    Drops the markers, and up to two line breaks after the end of the thinking. A leading `begin`
    is dropped even if the reply starts inside the thinking.

    Args:
        format: A name as for `load_reasoning`, or the format.
        inside: Overrides `opens_inside`: True if the prompt has opened the thinking, False if it
            has closed it (see `opened_by`).
    """

    def __init__(self, format: str | ReasoningFormat, inside: bool | None = None) -> None:
        form = load_reasoning(format) if isinstance(format, str) else format
        self._format = form
        self._inside = form.opens_inside if inside is None else inside
        self._held = ""
        self._step: Callable[[str], tuple[str, str]] = self._begin

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns new thinking and new answer."""
        return self._step(text)

    def finish(self) -> tuple[str, str]:
        """End the reply; returns what was held back, as thinking and answer."""
        held, self._held = self._held, ""
        if self._step == self._gap:
            return "", ""
        thinking = self._step == self._think or self._inside
        return (held, "") if thinking else ("", held)

    def _begin(self, text: str) -> tuple[str, str]:
        text, begin = self._held + text, self._format.begin
        self._held = ""
        if text.startswith(begin):
            self._step = self._think
            return self._think(text.removeprefix(begin))
        if begin.startswith(text):
            self._held = text
            return "", ""
        self._step = self._think if self._inside else self._answer
        return self._step(text)

    def _think(self, text: str) -> tuple[str, str]:
        text, end = self._held + text, self._format.end
        thought, found, rest = text.partition(end)
        if found:
            self._held, self._step = "", self._gap
            return thought, self._gap(rest)[1]
        keep = partial_end(text, (end,))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def _gap(self, text: str) -> tuple[str, str]:
        text = self._held + text
        answer = without_gap(text)
        gap = len(text) - len(answer)
        if not answer and gap < MOST_GAP:
            self._held = text
            return "", ""
        self._held, self._step = "", self._answer
        return "", answer

    def _answer(self, text: str) -> tuple[str, str]:
        return "", text


def without_gap(text: str) -> str:
    """A text without its leading line breaks, at most two."""
    return text[min(len(text) - len(text.lstrip(GAP)), MOST_GAP) :]


def answer_of(source: str, text: str) -> str:
    """The part of an output after the thinking.

    Args:
        source: The source of a grammar of kind `after_thinking`.

    Raises:
        ValueError: the thinking has no end.
    """
    markers = json.loads(source)
    if markers["begin"] is not None and not text.startswith(markers["begin"]):
        return text
    _, found, answer = text.partition(markers["end"])
    if not found:
        raise ValueError(f"the thinking has no end: {markers['end']!r} is missing")
    return without_gap(answer)
