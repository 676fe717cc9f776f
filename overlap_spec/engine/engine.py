"""The engine: requests in, constrained text out. Joins input processor, core and outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any, Unpack, overload

from overlap_spec.config import EngineConfig
from overlap_spec.engine.arguments import (
    GrammarLike,
    Prompt,
    Sampling,
    as_prompts,
    copies,
    each,
    each_grammar,
    grouped,
)
from overlap_spec.engine.build import build
from overlap_spec.engine.grammar_manager import StepFigures
from overlap_spec.engine.input_processor import GenerateOptions, InputProcessor, Limits
from overlap_spec.engine.interrupts import put_off_interrupts
from overlap_spec.engine.output_processor import OutputProcessor
from overlap_spec.engine.own_process import OwnProcess
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.engine.sequences import SequenceMaker
from overlap_spec.errors import EngineUnavailable, RequestFailed
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.grammar.spec import Grammar
from overlap_spec.models.config import read_config
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.stats import Standing
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request


class Engine:
    """Generates text under grammars with tree speculation.

    Ctrl-C ends the call that it meets, after the step under way, and no more than that; a step that
    fails ends the engine. It is of use in the process that made it alone, not in a fork.

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
        self.config = EngineConfig.build(model=model, **settings)
        vocab_size = read_config(self.config.target_path).vocab_size
        self.tokenizer = Tokenizer(self.config.target_path, vocab_size)
        self.core, self.compiler, self._preparation = build(self.config, self.tokenizer)
        assert self.compiler.ceiling is not None
        self.memory_limit_bytes = self.compiler.ceiling.most_bytes
        self.context_length = self.core.worker.traits.context_length
        limits = Limits(self.context_length, self.core.scheduler.pages.longest)
        self.input_processor = InputProcessor(
            self.tokenizer, limits, self.config.additional_properties, self.config.adapters
        )
        self._own_process = OwnProcess()
        self.sequences = SequenceMaker(
            self.tokenizer, limits, self.core.budgets.widens, self.config.complete
        )
        self.output_processor = OutputProcessor(self.compiler.check)
        self._lock = threading.RLock()
        self._closed = False
        # What cut a step short.
        self._failure: BaseException | None = None

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps: this process's, and those of other ranks that
        :meth:`gather_spans` has taken."""
        return self.core.timeline

    def gather_spans(self) -> None:
        """Take the other ranks' spans since the last call into the timeline, in lanes of their own
        (``rank 1 compute``). Their clock is this process's on the same machine alone.

        Raises:
            EngineUnavailable: a rank is gone.
        """
        with self._held():
            self._check_open()
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
        with self._held():
            return self.core.standings(most)

    def flush_cache(self) -> int:
        """Forget the computed pages of earlier prompts that no request holds; how many there
        were."""
        with self._held():
            return self.core.scheduler.pages.flush()

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> Output: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        grammar: GrammarLike = None,
        sampling: Sampling = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        grammar: GrammarLike | Sequence[GrammarLike] = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Output]]: ...

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
                model, dataclass, TypedDict, Enum, compiled pattern …); one for all prompts, or
                one each.
            sampling: SamplingParams or a mapping of its fields; one for all prompts, or one each.
            n: Outputs of each prompt, at consecutive seeds; None is one, by itself.
            options: Fields of SamplingParams, which go before those of ``sampling``; and ``raw``,
                ``tools`` and ``priority``: see
                :class:`overlap_spec.engine.input_processor.PromptOptions`.

        Returns:
            Output, or a list of them in the prompts' order; with ``n`` a list of ``n`` of them in
            each one's place, also where ``n`` is 1. A request that fails while it runs has
            ``finish_reason`` ``error``; the others go on.

        Raises:
            InvalidRequest: an invalid prompt, grammar or sampling field; nothing has been
                generated.
            EngineUnavailable: the engine is closed, a step has failed, or this is a fork of the
                process that made it.
        """
        prompts, single = as_prompts(prompt)
        grammars = each_grammar(grammar, len(prompts), self.config.additional_properties)
        samplings = each("sampling", sampling, len(prompts))
        asked = zip(prompts, grammars, samplings, strict=True)
        count = 1 if n is None else n
        prepared = [self._prepare(count, *each_one, **options) for each_one in asked]
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
        request.

        Several streams may run at once, in one thread or many; they share the steps.

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
        """Queue a request. The caller runs :meth:`step` until it ends, and then :meth:`release`;
        or iterates over :meth:`pieces`, which does both. A request whose handle nobody holds any
        more is aborted.

        Raises:
            InvalidRequest, EngineUnavailable: as for :meth:`generate`.
        """
        return self._enqueue(self._prepare(1, prompt, grammar, sampling, **options))[0]

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, from the cache if it is there; blocks until it is ready.

        Raises:
            GrammarError: it cannot be compiled.
            EngineUnavailable: the engine is closed.
        """
        return self._compiled(grammar, None)

    def _compiled(self, grammar: Grammar, most_tokens: int | None) -> CompiledGrammar:
        self._check_open()
        try:
            return self.compiler.compile(grammar, most_tokens)
        except CompileFailure:
            # The engine may have been closed meanwhile.
            self._check_open()
            raise

    def admit(
        self, request: Request, compiled: CompiledGrammar | None = None, compile_ms: float = 0.0
    ) -> RequestHandle:
        """Queue a request that is already processed and compiled; otherwise as :meth:`submit`.

        Args:
            request: Gets an id of this engine, in the order of the calls.
            compiled: The compiled ``request.grammar``.
            compile_ms: How long the request waited for that, for its statistics.
        """
        return self._enqueue([self.sequences.make(request, compiled, compile_ms)])[0]

    def abort(self, handle: RequestHandle) -> None:
        """End a request now; its output, there at once, is what has been generated."""
        with self._held():
            self._check_whole()
            self._abort(handle)
            self._publish()

    def release(self, handles: Sequence[RequestHandle]) -> None:
        """Forget requests; those that still run are aborted."""
        if not self._own_process.is_here:
            return
        with self._held():
            if self._failure is None:
                for handle in handles:
                    self._abort(handle)
                self._publish()
            for handle in handles:
                self.output_processor.remove(handle)

    def _abort(self, handle: RequestHandle) -> None:
        self.core.scheduler.abort(handle.request.id)
        if (validation := self.output_processor.validation(handle)) is not None:
            validation.cancel()

    def pieces(self, handle: RequestHandle) -> Generator[Delta]:
        """The pieces of a submitted request, which is released at the end; runs its steps.

        Raises:
            RequestFailed: after the last piece, if the request ended with an error.
        """
        try:
            while True:
                while handle.deltas:
                    yield handle.deltas.popleft()
                if handle.output is not None:
                    break
                self._advance(handle)
            if handle.output.error is not None:
                raise RequestFailed(handle.output.error)
        finally:
            self.release([handle])

    def step(self) -> bool:
        """Run one step of the queued requests; False if there is nothing to do.

        Raises:
            EngineUnavailable: a step before it has failed.
        """
        with self._held():
            self._check_whole()
            for request_id in self.output_processor.abandoned():
                self.core.scheduler.abort(request_id)
            busy = self.core.step()
            self._publish()
            return busy

    def prepare_next(self) -> bool:
        """Use an idle moment for what later requests would wait for; False if there is no use."""
        with self._held():
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
        self._closed = True
        if not self._own_process.is_here:
            return
        with self._held():
            self.release(self.output_processor.open())
        self.compiler.close()
        self.core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self, count: int, *asked: Any, **options: Unpack[GenerateOptions]
    ) -> list[SequenceState]:
        """Check, tokenise and compile a request, for so many outputs: all its errors come before it
        is queued."""
        self._check_open()
        request = self.input_processor.process(*asked, **options)
        compiled, compile_ms = None, 0.0
        if request.grammar is not None:
            compile_start_ns = time.perf_counter_ns()
            compiled = self._compiled(request.grammar, self.sequences.room_tokens(request))
            compile_ms = (time.perf_counter_ns() - compile_start_ns) / 1e6
        return [self.sequences.make(each, compiled, compile_ms) for each in copies(request, count)]

    def _enqueue(self, sequences: Sequence[SequenceState]) -> list[RequestHandle]:
        handles: list[RequestHandle] = []
        try:
            with self._held():
                for sequence in sequences:
                    # Again: the engine may have been closed while the grammar was compiled.
                    self._check_open()
                    handles.append(self.output_processor.add(sequence.request))
                    self.core.add(sequence)
        except BaseException:
            self.release(handles)
            raise
        return handles

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock: Ctrl-C waits until it is free again. What fails meanwhile is a step, or
        the reading of one: nothing can be computed after it."""
        self._own_process.check()
        with put_off_interrupts(), self._lock:
            try:
                yield
            except EngineUnavailable:
                raise
            except BaseException as error:
                self._failure = error
                raise

    def _check_open(self) -> None:
        self._own_process.check()
        if self._closed:
            raise EngineUnavailable("the engine is closed: make a new one")
        self._check_whole()

    def _check_whole(self) -> None:
        if (error := self._failure) is not None:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise EngineUnavailable(
                f"a step of the engine was cut short, and the engine with it ({text}): "
                "make a new one"
            ) from error

    def _wait(self, handle: RequestHandle) -> Output:
        while handle.output is None:
            self._advance(handle)
        return handle.output

    def _advance(self, handle: RequestHandle) -> None:
        """Run a step; if there is none to run, wait for the validation of the handle's output."""
        if not self.step() and (validation := self.output_processor.validation(handle)) is not None:
            wait([validation])
