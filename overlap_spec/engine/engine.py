"""The engine: requests in, constrained text out."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, Self, Unpack, cast

from overlap_spec.config import EngineConfig
from overlap_spec.engine.arguments import (
    GrammarLike,
    Prompt,
    Sampling,
    as_grammar,
    copies,
    each_call,
    grouped,
)
from overlap_spec.engine.build import build
from overlap_spec.engine.calls import Calls
from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.engine.input_processor import GenerateOptions, Generates, InputProcessor, Limits
from overlap_spec.engine.output_processor import OutputProcessor
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.engine.sequences import SequenceMaker
from overlap_spec.errors import GrammarError, RequestFailed
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.stats import Standing
from overlap_spec.timeline import Timeline
from overlap_spec.types import Delta, Output, Request


def _typed(generate: Any) -> Generates[Output, list[Output], list[list[Output]]]:
    """A method as type checkers are to see it."""
    return cast("Generates[Output, list[Output], list[list[Output]]]", generate)


class Engine:
    """Generates text under grammars with tree speculation.

    Threads may share it. Ctrl-C ends the call that it meets, after the step under way, and no more
    than that; a step that fails ends the engine. It is of use in the process that made it alone,
    not in a fork.

    Args:
        model: Folder of a checkpoint; None is the embedded model and its draft head.
        settings: Fields of :class:`overlap_spec.config.EngineConfig`.

    Attributes:
        memory_limit_bytes: Resident memory of this process above which no grammar is compiled.

    Raises:
        ConfigError: an invalid setting.
        CheckpointError: a checkpoint that does not fit exactly.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = config = EngineConfig.build(model=model, **settings)
        self.tokenizer, self.core, self.compiler, self._preparation = build(config)
        assert self.compiler.ceiling is not None
        self.memory_limit_bytes = self.compiler.ceiling.most_bytes
        self.context_length = self.core.worker.traits.context_length
        self.limits = Limits(self.context_length, self.core.scheduler.allocator.longest)
        known = self.tokenizer, self.limits
        self.input_processor = InputProcessor(*known, config.additional_properties, config.adapters)
        tries, has_states = self.core.budgets.widens, self.core.worker.traits.state_bytes > 0
        self.sequences = SequenceMaker(*known, tries, config.complete, has_states)
        self.output_processor = OutputProcessor(self.compiler.check)
        self._calls = Calls()

    @_typed
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Output | list[Output] | list[list[Output]]:
        """Generate for one prompt, or for a list of prompts at once.

        Args:
            prompt: Text (one user turn), a list of messages (a chat), token ids, or a list of
                these.
            grammar: Constrains the output: a Grammar, a schema as a dict, or a type (a pydantic
                model, dataclass, TypedDict, Enum, compiled pattern …); one for all, or one each.
            sampling: SamplingParams or a mapping of its fields; one for all, or one each.
            n: Outputs of each prompt, at consecutive seeds; None is one, by itself.
            options: Fields of SamplingParams, which go before those of ``sampling``, and of
                :class:`overlap_spec.engine.input_processor.PromptOptions`.

        Returns:
            Output, or a list of them in the prompts' order; with ``n`` a list of ``n`` of them in
            each one's place, also where ``n`` is 1. A request that fails while it runs has
            ``finish_reason`` ``error``; the others go on.

        Raises:
            InvalidRequest: an invalid prompt, grammar or sampling field; nothing was generated.
            EngineUnavailable: the engine is closed, a step has failed, or this is a fork.
        """
        calls, single = each_call(prompt, grammar, sampling, self.config.additional_properties)
        count = 1 if n is None else n
        prepared = [self._prepare(count, *call, **options) for call in calls]
        handles = self._enqueue([sequence for group in prepared for sequence in group])
        try:
            outputs = [self._wait(handle) for handle in handles]
        finally:
            self.release(handles)
        return grouped(outputs, n, single)

    def stream(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Delta]:
        """Generate for one prompt, piece by piece; closing the iterator, or dropping it, aborts the
        request. Several streams, in one thread or many, share the steps.

        Raises:
            InvalidRequest, EngineUnavailable: as for :meth:`generate`, at the call.
            RequestFailed: after the last piece, if the request ended with an error.
        """
        return self.pieces(self.submit(prompt, grammar, sampling, **options))

    def submit(
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestHandle:
        """Queue a request; raises as :meth:`generate`. The caller runs :meth:`step` until it ends,
        and then :meth:`release`; or iterates over :meth:`pieces`, which does both. A request whose
        handle nobody holds any more is aborted."""
        return self._enqueue(self._prepare(1, prompt, grammar, sampling, **options))[0]

    def pieces(self, handle: RequestHandle) -> Generator[Delta]:
        """The pieces of a submitted request, which is released at the end; runs its steps.
        RequestFailed: after the last piece, if the request ended with an error."""
        try:
            while handle.output is None or handle.deltas:
                if handle.deltas:
                    yield handle.deltas.popleft()
                else:
                    self._advance(handle)
            if handle.output.error is not None:
                raise RequestFailed(handle.output.error)
        finally:
            self.release([handle])

    def compile(self, grammar: GrammarLike, most_tokens: int | None = None) -> CompiledGrammar:
        """The compiled grammar, from the cache if it is there; blocks until it is ready.

        Args:
            grammar: As for :meth:`generate`, which finds it in the cache afterwards.
            most_tokens: As for :meth:`GrammarCompiler.submit`.

        Raises:
            GrammarError: it cannot be compiled, or is free text.
            EngineUnavailable: the engine is closed.
        """
        made = as_grammar(grammar, self.config.additional_properties)
        if made is None:
            raise GrammarError("free text has no grammar to compile", "grammar")
        self._calls.check_open()
        try:
            return self.compiler.compile(made, most_tokens)
        except CompileFailure:
            # The engine may have been closed meanwhile.
            self._calls.check_open()
            raise

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

    def close(self) -> None:
        """Abort all requests and end all threads; later calls raise :class:`EngineUnavailable`."""
        self._calls.closed = True
        if not self._calls.own_process.is_here:
            return
        with self._calls.held():
            self.release(self.output_processor.open())
        self.compiler.close()
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self, count: int, *asked: Any, **options: Unpack[GenerateOptions]
    ) -> list[SequenceState]:
        """Check, tokenise and compile a request, for so many outputs: all its errors come before it
        is queued."""
        self._calls.check_open()
        request = self.input_processor.process(*asked, **options)
        compiled, compile_ms = None, 0.0
        if request.grammar is not None:
            compile_start_ns = time.perf_counter_ns()
            compiled = self.compile(request.grammar, self.sequences.room_tokens(request))
            compile_ms = (time.perf_counter_ns() - compile_start_ns) / 1e6
        return [self.sequences.make(each, compiled, compile_ms) for each in copies(request, count)]

    def _wait(self, handle: RequestHandle) -> Output:
        while handle.output is None:
            self._advance(handle)
        return handle.output

    def _advance(self, handle: RequestHandle) -> None:
        """Run a step; if there is none to run, wait for the validation of the handle's output."""
        if not self.step() and (validation := self.output_processor.validation(handle)) is not None:
            wait([validation])

    def _publish(self) -> None:
        """Bring the handles up to date."""
        outputs = self.core.outputs()
        for sequence, _ in outputs.runs:
            self.output_processor.push(sequence)
        for sequence in outputs.ended:
            self.output_processor.finish(sequence)
        self.output_processor.deliver_validated()

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
