"""The syntax of a model's tool calls; each file in `formats/` has one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """The syntax of a model's tool calls. A reply with calls is, without the spaces:

        opening begin NAME middle ARGUMENTS end (separator begin NAME middle ARGUMENTS end)* close

    Args:
        starts: Texts that start calls; every opening + `begin` starts with one of them.
        anywhere: Whether calls may follow free text, which then contains none of `starts`. If
            not, calls are at the start of the reply, and free text does not begin with `starts`.
        begin: Before the name.
        middle: Between name and arguments.
        end: After the arguments.
        openings: One of these comes before the first call.
        separator: Between two calls: white space, with at most one other character.
        close: After the last call: nothing, or one character.
        markers: Parts that are single tokens in real tokenizers, often special ones.
        signs: Texts that the chat templates of such models all hold, without white space,
            backslashes and line breaks as Jinja writes them; none: the format is not guessed.
    """

    starts: tuple[str, ...]
    anywhere: bool
    begin: str
    middle: str
    end: str
    openings: tuple[str, ...] = ("",)
    separator: str = ""
    close: str = ""
    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
