"""A request as whoever submitted it sees it: pieces, and an output at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from overlap_spec.engine.input_processor import parse_output
from overlap_spec.grammar.spec import Grammar
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.types import Delta, Output, Request, Verdict

Check = Future[str | None]


@dataclass
class RequestHandle:
    """A submitted request on its way.

    Attributes:
        deltas: Pieces that nobody has read yet.
        output: The whole output, once it has ended and, under a best-effort grammar, is checked.
        error: What ended it wrongly.
        check: What finds whether the output is valid, while or after it does.
    """

    request: Request
    deltas: deque[Delta] = field(default_factory=deque)
    output: Output | None = None
    error: Exception | None = None
    check: Check | None = None
    _pushed_tokens: int = 0
    _end: tuple[Delta, Output] | None = None

    def push(self, sequence: SequenceState, run: Sequence[int]) -> None:
        """The next piece: ``run`` are the newest tokens of ``sequence``."""
        text = sequence.buffer.release(finished=False)
        self.deltas.append(_delta(sequence, len(sequence.output_ids) - len(run), text))
        self._pushed_tokens += len(run)

    def finish(
        self, sequence: SequenceState, begin_check: Callable[[Grammar, str], Check | None]
    ) -> None:
        """``sequence`` has ended: its last piece and its output are there now or, where
        ``begin_check`` gives one, at :meth:`deliver`."""
        grammar, reason = self.request.grammar, sequence.finish_reason
        assert reason is not None
        text, parsed, error = sequence.buffer.text, None, None
        self.error = sequence.error
        if sequence.error is not None:
            error = str(sequence.error) or type(sequence.error).__name__
        elif reason == "stop" and grammar is not None:
            parsed = parse_output(grammar, text)
            self.check = begin_check(grammar, text)
        last = _delta(sequence, self._pushed_tokens, sequence.buffer.release(finished=True))
        output = Output(
            text=text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=reason,
            stats=sequence.stats,
            parsed=parsed,
            logprobs=tuple(sequence.logprobs),
            stop_match=sequence.stop_match,
            error=error,
        )
        self._end = replace(last, finish_reason=reason), output
        if self.check is None:
            self.deliver()

    def deliver(self) -> None:
        """Hand out the end; the check, where there is one, is done."""
        assert self._end is not None
        last, output = self._end
        verdict = _verdict(self.check) if self.check is not None else None
        self.deltas.append(replace(last, verdict=verdict))
        self.output = replace(output, verdict=verdict)


def _delta(sequence: SequenceState, first: int, text: str) -> Delta:
    """A piece of the tokens from ``first`` on."""
    new = slice(first, None)
    return Delta(
        text,
        tuple(sequence.output_ids[new]),
        tuple(sequence.logprobs[new]),
        origins=tuple(sequence.origins[new]),
        tier=sequence.tier,
    )


def _verdict(check: Check) -> Verdict:
    """What a check has found; one that came to nothing is no sign that the output is valid."""
    if check.cancelled():
        return Verdict(False, "the request was aborted before its output was checked")
    error = check.exception()
    reason = check.result() if error is None else str(error)
    return Verdict(reason is None, reason)
