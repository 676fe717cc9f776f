"""What a worker answers, as data: a worker reads what anybody sends, and may be in other hands."""

from __future__ import annotations

from typing import Literal

import msgspec

from overlap_spec.grammar.isolation.channel import Message
from overlap_spec.grammar.isolation.work_items import WorkItem

AnswerKind = Literal[
    "started",
    "compiled",
    "rebuild",
    "states",
    "checked",
    "refused",
    "out_of_memory",
    "no_memory",
    "too_large",
    "crash",
]
RESULTS = ("compiled", "rebuild", "states", "checked")


class Answer(msgspec.Struct, frozen=True):
    """The header of a worker's message.

    Attributes:
        pid: Of the worker that has started on an item.
        goes_on: Whether the worker takes another item.
        message, param: Of an error.
        violation: What a check found.
        plan: Of a compiled grammar.
    """

    answer: AnswerKind
    pid: int = 0
    goes_on: bool = False
    message: str = ""
    param: str | None = None
    violation: str | None = None
    plan: str = ""


def read_answer(message: Message, item: WorkItem | None) -> Answer:
    """The answer in a message of the worker that has ``item``.

    Raises:
        ValueError: no worker of ours answers so.
    """
    try:
        answer = msgspec.convert(message.header, Answer)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if item is None:
        raise ValueError(f"{answer.answer}, and it had nothing to do")
    compiles = ("compiled", "rebuild")
    wanted = ("states",) if item.states else compiles if item.text is None else ("checked",)
    if answer.answer in RESULTS and answer.answer not in wanted:
        raise ValueError(f"{answer.answer}, which it was not asked for")
    if (message.fd >= 0) != (answer.answer in ("compiled", "states")):
        raise ValueError(f"{answer.answer} with a body or without one")
    return answer
