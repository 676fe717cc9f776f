"""A grammar or an output on its way, and the worker that it is with."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from overlap_spec.grammar.isolation.limits import CompileFailure, FailureKind
from overlap_spec.grammar.spec import Grammar


@dataclass(eq=False)
class WorkItem:
    """A grammar to be compiled, or with a text an output of it to be checked.

    The future is settled once: with the compiled grammar, or with what `violation` gives.
    """

    grammar: Grammar
    future: Future[Any]
    text: str | None = None
    retried: bool = False

    def fail(self, kind: FailureKind, reason: str) -> None:
        """End with a `CompileFailure` that begins with the grammar's kind."""
        what = "was not compiled" if self.text is None else "cannot check its output"
        text = f"the {self.grammar.kind} grammar {what}: {reason}"
        self.raises(CompileFailure(text, kind, self.grammar.kind))

    def gives(self, result: Any) -> None:
        """End well, unless everybody has left."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def raises(self, error: BaseException) -> None:
        """End with an error, unless everybody has left."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class CompileWorker:
    """A worker process as the engine sees it; times are of `time.monotonic`."""

    number: int
    end: socket.socket
    job: WorkItem | None = None
    given_s: float = 0.0
    started_s: float | None = None
    is_long: bool = False
    is_slow: bool = False
