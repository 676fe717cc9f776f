"""One submitted request, as its caller sees it."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace

from overlap_spec.types import Delta, Output, Request


@dataclass(eq=False)
class RequestHandle:
    """A submitted request: its pieces as they come, and its output at the end.

    Attributes:
        request: Checked and tokenised, under the id of the engine or client that took it.
        deltas: Pieces that have come and are not read yet.
        output: The whole, once the request has ended and a best-effort output is validated.
        error_type: Class name of the exception whose text is ``output.error``.
        pushed_tokens: Of all pieces so far, read or not.
    """

    request: Request
    deltas: deque[Delta] = field(default_factory=deque)
    output: Output | None = None
    error_type: str | None = None
    pushed_tokens: int = 0

    def push(self, delta: Delta) -> None:
        """Add the next piece."""
        self.deltas.append(delta)
        self.pushed_tokens += len(delta.token_ids)

    def end(self, output: Output, error_type: str | None) -> None:
        """Set the output, and parse it as the request's grammar says, unless a stop string has cut
        it short or its type refuses it."""
        grammar = self.request.grammar
        if output.finish_reason == "stop" and grammar is not None:
            # A type's own checks raise what they like, and cost its request alone.
            with contextlib.suppress(Exception):
                output = replace(output, parsed=grammar.parse(output.text))
        self.output, self.error_type = output, error_type
