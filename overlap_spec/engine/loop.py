"""An engine in this process: requests that are checked and compiled, and steps that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_spec.config import EngineConfig
from overlap_spec.engine.build import build
from overlap_spec.engine.calls import Calls
from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.engine.input_processor import Limits
from overlap_spec.engine.output_processor import OutputProcessor
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.engine.sequences import SequenceMaker
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.stats import Standing
from overlap_spec.timeline import Timeline
from overlap_spec.types import Request


class EngineLoop:
    """Runs requests, step by step, and keeps their handles up to date; safe to share between
    threads."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer, self.core, self.compiler, self._preparation = build(config)
        assert self.compiler.ceiling is not None
        self.memory_limit_bytes = self.compiler.ceiling.most_bytes
        self.context_length = self.core.worker.traits.context_length
        self.limits = Limits(self.context_length, self.core.scheduler.allocator.longest)
        tries, has_states = self.core.budgets.widens, self.core.worker.traits.state_bytes > 0
        self.sequences = SequenceMaker(
            self.tokenizer, self.limits, tries, config.complete, has_states
        )
        self.output_processor = OutputProcessor(self.compiler.check)
        self._calls = Calls()

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps: this process's, and those of other ranks that
        :meth:`gather_spans` has taken."""
        return self.core.timeline

    def gather_spans(self) -> None:
        """Take the other ranks' spans since the last call into the timeline, in lanes of their own
        (``rank 1 compute``). Their clock is this process's on the same machine alone.
        EngineUnavailable: a rank is gone."""
        with self._calls.held():
            self._calls.check_open()
            self.core.worker.gather_spans()

    @property
    def figures(self) -> StepFigures:
        """Time of grammar work so far, and how much of it was hidden."""
        return self.core.grammar.figures

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, pages, requests, grammar time."""
        return self.core.snapshot()

    def standings(self, most: int) -> list[Standing]:
        """Where requests stand that run or wait, running ones first; of at most ``most``."""
        with self._calls.held():
            return self.core.standings(most)

    def flush_cache(self) -> int:
        """Forget the computed pages of earlier prompts that no request holds; how many there
        were."""
        with self._calls.held():
            return self.core.scheduler.allocator.flush()

    def admit(
        self, request: Request, compiled: CompiledGrammar | None = None, compile_ms: float = 0.0
    ) -> RequestHandle:
        """Queue a processed request with its compiled grammar, for which it waited ``compile_ms``;
        otherwise as :meth:`submit`. It gets an id of this engine, in the order of the calls."""
        return self._enqueue([self.sequences.make(request, compiled, compile_ms)])[0]

    def abort(self, handle: RequestHandle) -> None:
        """End a request now; its output, there at once, is what has been generated."""
        with self._calls.held():
            self._calls.check_whole()
            self.core.scheduler.abort(handle.request.id)
            self.output_processor.cancel_validation(handle)
            self._publish()

    def release(self, handles: Sequence[RequestHandle]) -> None:
        """Forget requests; those that still run are aborted."""
        if not self._calls.own_process.is_here:
            return
        with self._calls.held():
            if self._calls.failure is None:
                for handle in handles:
                    self.core.scheduler.abort(handle.request.id)
                    self.output_processor.cancel_validation(handle)
                self._publish()
            for handle in handles:
                self.output_processor.remove(handle)

    def step(self) -> bool:
        """Run one step of the queued requests; False if there is nothing to do. EngineUnavailable:
        a step before it has failed."""
        with self._calls.held():
            self._calls.check_whole()
            for request_id in self.output_processor.abandoned():
                self.core.scheduler.abort(request_id)
            busy = self.core.step()
            self._publish()
            return busy

    def prepare_next(self) -> bool:
        """Use an idle moment for what later requests would wait for; False if there is no use."""
        with self._calls.held():
            return self.core.scheduler.idle and next(self._preparation)

    def _publish(self) -> None:
        """Bring the handles up to date."""
        outputs = self.core.outputs()
        for sequence, _ in outputs.runs:
            self.output_processor.push(sequence)
        for sequence in outputs.ended:
            self.output_processor.finish(sequence)
        self.output_processor.deliver_validated()

    def close(self) -> None:
        """Abort all requests and end all threads; later calls raise :class:`EngineUnavailable`."""
        self._calls.closed = True
        if not self._calls.own_process.is_here:
            return
        with self._calls.held():
            self.release(self.output_processor.open())
        self.compiler.close()
        self.core.close()

    def _enqueue(self, sequences: Sequence[SequenceState]) -> list[RequestHandle]:
        handles: list[RequestHandle] = []
        try:
            with self._calls.held():
                for sequence in sequences:
                    # Again: the engine may have been closed while the grammar was compiled.
                    self._calls.check_open()
                    handles.append(self.output_processor.add(sequence.request))
                    self.core.add(sequence)
        except BaseException:
            self.release(handles)
            raise
        return handles
