"""What the supervisor schedules: a compile or a check, and the worker that runs it."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from overlap_spec.grammar.isolation.limits import CompileFailure, FailureKind
from overlap_spec.grammar.spec import Grammar


@dataclass(eq=False)
class WorkItem:
    """A grammar to compile or, if there is a text, an output of it to check.

    The future gets one result: the compiled grammar, or what `check.violation` returns, or its
    `StateTable`.

    Attributes:
        states: Whether the grammar's table of states is asked for.
        holder: Who asks for it.
        lost_by: Process id of the fork server under which a worker was lost with the item.
    """

    grammar: Grammar
    future: Future[Any]
    text: str | None = None
    states: bool = False
    holder: str = ""
    lost_by: int | None = None

    def fail(self, kind: FailureKind, reason: str) -> None:
        """Set a `CompileFailure` whose message begins with the grammar's kind."""
        what = "was not compiled" if self.text is None else "cannot check its output"
        text = f"the {self.grammar.kind} grammar {what}: {reason}"
        self.raises(CompileFailure(text, kind, self.grammar.kind))

    def gives(self, result: Any) -> None:
        """Set the result, unless the item was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def raises(self, error: BaseException) -> None:
        """Set an error, unless the item was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class CompileWorker:
    """The engine's view of a worker process; times are `time.monotonic` seconds. Its process id is
    known from its first item on."""

    number: int
    end: socket.socket
    item: WorkItem | None = None
    given_s: float = 0.0
    started_s: float | None = None
    pid: int | None = None
    is_long: bool = False
    is_slow: bool = False
