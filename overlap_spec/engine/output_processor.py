"""Makes the pieces and outputs that callers read from the scheduler's sequences."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.grammar.spec import Grammar
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.types import Delta, Output, Request, Verdict

Validation = Future[str | None]


class Unvalidated(NamedTuple):
    """A best-effort output that waits for its validation, and the last piece that goes with it."""

    handle: RequestHandle
    last: Delta
    output: Output
    validation: Validation


class OutputProcessor:
    """Fills the handles of one engine's requests. Not thread-safe: the engine holds its lock.

    A request is its caller's: when nobody else holds its handle, nobody will read or release it.
    ``begin_validation`` starts to validate a finished output; None if its grammar is exact.
    """

    def __init__(self, begin_validation: Callable[[Grammar, str], Validation | None]) -> None:
        self._handles: dict[int, weakref.ref[RequestHandle]] = {}
        # A handle may be let go of in any thread, at any moment.
        self._abandoned: deque[int] = deque()
        self._begin_validation = begin_validation
        self._unvalidated: dict[int, Unvalidated] = {}

    def add(self, request: Request) -> RequestHandle:
        """Make the handle of a request."""
        handle, abandoned = RequestHandle(request), self._abandoned
        let_go = weakref.ref(handle, lambda _: abandoned.append(request.id))
        self._handles[request.id] = let_go
        return handle

    def remove(self, handle: RequestHandle) -> None:
        """Forget a request."""
        self._handles.pop(handle.request.id, None)

    def open(self) -> list[RequestHandle]:
        """The handles of all requests that nobody has released."""
        return [handle for ref in self._handles.values() if (handle := ref()) is not None]

    def abandoned(self) -> Iterator[int]:
        """The ids of requests whose handles have gone unreleased since the last call; these are
        forgotten."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            if self._handles.pop(request_id, None) is not None:
                yield request_id

    def push(self, sequence: SequenceState) -> None:
        """Hand out the newest tokens of a sequence that is still running."""
        handle = self._handle(sequence)
        if handle is None:
            return
        handle.push(_next_piece(handle, sequence, finished=False))

    def finish(self, sequence: SequenceState) -> None:
        """Hand out the last piece and the output of a sequence that has ended; a best-effort
        output is kept until :meth:`deliver_validated`."""
        handle, reason = self._handle(sequence), sequence.finish_reason
        if handle is None:
            return
        assert reason is not None
        last = _next_piece(handle, sequence, finished=True)
        error, grammar = sequence.error, handle.request.grammar
        warnings = handle.request.warnings + sequence.warnings
        if grammar is not None:
            warnings += grammar.warnings
        output = Output(
            text=sequence.buffer.text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=reason,
            stats=sequence.stats,
            logprobs=tuple(sequence.logprobs),
            stop_match=sequence.stop_match,
            error=None if error is None else str(error) or type(error).__name__,
            warnings=warnings,
        )
        last = last._replace(finish_reason=reason, warnings=warnings)
        for extra in sequence.extras.values():
            last, output = extra.complete(last, output)
        validation = None
        if reason == "stop" and grammar is not None:
            validation = self._begin_validation(grammar, output.text)
        if validation is not None:
            waits = Unvalidated(handle, last, output, validation)
            self._unvalidated[sequence.request.id] = waits
        else:
            handle.push(last)
            handle.end(output, None if error is None else type(error).__name__)

    def _handle(self, sequence: SequenceState) -> RequestHandle | None:
        """A sequence's handle; None if nobody holds it any more."""
        ref = self._handles.get(sequence.request.id)
        return None if ref is None else ref()

    def validation(self, handle: RequestHandle) -> Validation | None:
        """The validation that a handle's output waits for, if it does."""
        unvalidated = self._unvalidated.get(handle.request.id)
        return None if unvalidated is None else unvalidated.validation

    def cancel_validation(self, handle: RequestHandle) -> None:
        """Stop to validate a handle's output, which is aborted."""
        if (validation := self.validation(handle)) is not None:
            validation.cancel()

    def deliver_validated(self) -> None:
        """Hand out the outputs whose validation has ended."""
        for request_id, (handle, last, output, validation) in list(self._unvalidated.items()):
            if validation.done():
                del self._unvalidated[request_id]
                verdict = _verdict(validation)
                handle.push(last._replace(verdict=verdict))
                handle.end(replace(output, verdict=verdict), None)


def _next_piece(handle: RequestHandle, sequence: SequenceState, finished: bool) -> Delta:
    """The new tokens, and the text that they complete; the optional parts' own pieces have been
    handed out before."""
    for extra in sequence.extras.values():
        for piece in extra.pieces():
            handle.push(piece)
    first = handle.pushed_tokens
    text, tokens = sequence.buffer.release(finished), tuple(sequence.output_ids[first:])
    logprobs = tuple(sequence.logprobs[first:]) if sequence.logprobs else ()
    delta = Delta(text, tokens, logprobs, tier=sequence.tier)
    for extra in sequence.extras.values():
        delta = extra.attach(delta, first)
    return delta


def _verdict(validation: Validation) -> Verdict:
    """The result of a validation; one that failed itself does not make the output valid."""
    if validation.cancelled():
        return Verdict(False, "the request was aborted before its output was checked")
    error = validation.exception()
    reason = validation.result() if error is None else str(error)
    return Verdict(reason is None, reason)
