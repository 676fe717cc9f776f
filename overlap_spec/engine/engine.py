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
from overlap_spec.engine.input_processor import GenerateOptions, Generates, InputProcessor
from overlap_spec.engine.loop import EngineLoop
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import GrammarError, RequestFailed
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.scheduler.sequence import Sequence as SequenceState
from overlap_spec.types import Delta, Output


def _typed(generate: Any) -> Generates[Output, list[Output], list[list[Output]]]:
    """A method as type checkers are to see it."""
    return cast("Generates[Output, list[Output], list[list[Output]]]", generate)


class Engine(EngineLoop):
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
        super().__init__(EngineConfig.build(model=model, **settings))
        self.input_processor = InputProcessor(
            self.tokenizer, self.limits, self.config.additional_properties, self.config.adapters
        )

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
