"""The engine: requests in, constrained text out. Wires scheduler, worker and grammar together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Unpack, overload

from overlap_spec.config import EngineConfig
from overlap_spec.core import EngineCore
from overlap_spec.errors import RequestFailed
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.compile import GrammarCompiler
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileLimits
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar_lane import StepFigures
from overlap_spec.prepare import (
    Limits,
    Prepared,
    Preparer,
    Prompt,
    PromptOptions,
    Sampling,
    as_prompts,
    each,
)
from overlap_spec.scheduler.sequence import Sequence as Running
from overlap_spec.scheduler.stops import TextBuffer
from overlap_spec.ticket import Ticket
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request


class Engine:
    """Generates text under grammars with tree speculation.

    Args:
        model: Folder of a checkpoint; None is the embedded model and its draft head.
        settings: Fields of :class:`overlap_spec.config.EngineConfig`.

    Raises:
        ConfigError: a setting that cannot be.
        CheckpointError: a checkpoint that cannot be loaded exactly.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = EngineConfig.build(model=model, **settings)
        self.core = EngineCore(self.config)
        self.context_length = self.core.context_length
        self.tokenizer = Tokenizer(self.config.target_path, self.core.vocab_size)
        limits = Limits(self.context_length, self.core.scheduler.longest)
        self.preparer = Preparer(self.tokenizer, limits)
        backend = load(self.config.grammar_backend)
        self.compiler = GrammarCompiler(
            backend(self.tokenizer.vocabulary),
            self.config.grammar_cache_bytes,
            isolated=self.config.grammar_isolated,
            limits=CompileLimits(
                time_s=self.config.grammar_compile_timeout_s,
                memory_bytes=self.config.grammar_compile_memory_bytes,
            ),
        )
        self._ids = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._checking: list[Ticket] = []
        self._lock = threading.RLock()

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps."""
        return self.core.timeline

    @property
    def figures(self) -> StepFigures:
        """What the grammar cost so far, and how much of it was hidden."""
        return self.core.figures

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, pages, requests, grammar time."""
        return self.core.snapshot()

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        **options: Unpack[PromptOptions],
    ) -> list[Output]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        **options: Unpack[PromptOptions],
    ) -> Output | list[Output]:
        """Generate for one prompt, or for a list of prompts at once.

        Args:
            prompt: Text (one user turn), a list of messages (a chat), token ids, or a list of
                these.
            grammar: What the output must be; one for all prompts, or one each.
            sampling: As SamplingParams or its fields; one for all prompts, or one each.
            options: See :class:`overlap_spec.prepare.PromptOptions`.

        Returns:
            Output, or a list of them in the prompts' order. A request that fails in the middle
            has ``finish_reason`` ``error``; the others are not touched.

        Raises:
            InvalidRequest: a prompt, grammar or sampling field that cannot be served; nothing
                has been generated then.
        """
        prompts, single = as_prompts(prompt)
        grammars = each("grammar", grammar, len(prompts))
        samplings = each("sampling", sampling, len(prompts))
        prepared = [
            self._prepare(p, g, s, **options)
            for p, g, s in zip(prompts, grammars, samplings, strict=True)
        ]
        tickets = [self._enqueue(sequence) for sequence in prepared]
        try:
            outputs = [self._wait(ticket) for ticket in tickets]
        finally:
            self.release(tickets)
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> Iterator[Delta]:
        """Generate for one prompt, piece by piece; leaving the loop aborts the request.

        Several streams may run at once, from one thread or many: they share the steps.

        Raises:
            InvalidRequest: as for :meth:`generate`, at the call.
            RequestFailed: the request ended with an error, after its last piece.
        """
        return self._pieces(self.submit(prompt, grammar, sampling, **options))

    def submit(
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        **options: Unpack[PromptOptions],
    ) -> Ticket:
        """Queue a request; whoever submits calls :meth:`step`, and at last :meth:`release`.

        Raises:
            InvalidRequest: as for :meth:`generate`.
        """
        return self._enqueue(self._prepare(prompt, grammar, sampling, **options))

    def admit(
        self,
        prepared: Prepared,
        arrival_ns: int,
        compiled: CompiledGrammar | None = None,
        compile_ms: float = 0.0,
    ) -> Ticket:
        """Queue a request that was prepared and compiled elsewhere; otherwise as :meth:`submit`.

        Args:
            arrival_ns: When it came, on ``time.perf_counter_ns()``'s clock.
            compiled: Of ``prepared.grammar``.
        """
        return self._enqueue(self._sequence(prepared, arrival_ns, compiled, compile_ms))

    def abort(self, ticket: Ticket) -> None:
        """End a request now; what it has so far is its output, at once."""
        with self._lock:
            self._abort(ticket)
            self._publish()

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Forget requests that have ended, and abort the others."""
        with self._lock:
            for ticket in tickets:
                self._abort(ticket)
            self._publish()
            for ticket in tickets:
                self._tickets.pop(ticket.request.id, None)

    def _abort(self, ticket: Ticket) -> None:
        self.core.scheduler.abort(ticket.request.id)
        if ticket.check is not None:
            ticket.check.cancel()

    def _pieces(self, ticket: Ticket) -> Iterator[Delta]:
        try:
            while True:
                while ticket.deltas:
                    yield ticket.deltas.popleft()
                if ticket.output is not None:
                    break
                self._advance(ticket)
            if ticket.output.error is not None:
                raise RequestFailed(ticket.output.error)
        finally:
            self.release([ticket])

    def step(self) -> bool:
        """Run one step of whatever is queued; False when there is nothing to do."""
        with self._lock:
            busy = self.core.step()
            self._publish()
            return busy

    def _publish(self) -> None:
        """Hand out what has happened to those who wait for it."""
        news = self.core.outputs()
        for sequence, run in news.runs:
            self._tickets[sequence.request.id].push(sequence, run)
        for sequence in news.ended:
            ticket = self._tickets[sequence.request.id]
            ticket.finish(sequence, self.compiler.check)
            if ticket.check is not None:
                self._checking.append(ticket)
        for ticket in [t for t in self._checking if t.check is not None and t.check.done()]:
            self._checking.remove(ticket)
            ticket.deliver()

    def close(self) -> None:
        """Abort what runs and end the lane's threads."""
        with self._lock:
            self.release(list(self._tickets.values()))
        self.compiler.close()
        self.core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(
        self, prompt: Prompt, grammar: Any, sampling: Any, **options: Unpack[PromptOptions]
    ) -> Running:
        """Check and compile everything that can be wrong with a request before it is queued."""
        arrival_ns = time.perf_counter_ns()
        prepared = self.preparer.prepare(prompt, grammar, sampling, **options)
        if prepared.grammar is None:
            return self._sequence(prepared, arrival_ns, None, 0.0)
        compile_start_ns = time.perf_counter_ns()
        compiled = self.compiler.compile(prepared.grammar)
        compile_ms = (time.perf_counter_ns() - compile_start_ns) / 1e6
        return self._sequence(prepared, arrival_ns, compiled, compile_ms)

    def _sequence(
        self,
        prepared: Prepared,
        arrival_ns: int,
        compiled: CompiledGrammar | None,
        compile_ms: float,
    ) -> Running:
        request = Request(
            id=next(self._ids),
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            grammar=prepared.grammar,
            max_tokens=prepared.max_tokens,
            stop_ids=prepared.stop_ids,
            seed=prepared.seed,
            arrival_ns=arrival_ns,
            priority=prepared.priority,
        )
        buffer = TextBuffer(self.tokenizer.detokenizer(), tuple(prepared.sampling.stop))
        sequence = Running(request, buffer, compiled.matcher() if compiled else None)
        sequence.stats.prompt_tokens = len(prepared.prompt_ids)
        sequence.stats.grammar_compile_ms = compile_ms
        return sequence

    def _enqueue(self, sequence: Running) -> Ticket:
        ticket = Ticket(sequence.request)
        with self._lock:
            self._tickets[sequence.request.id] = ticket
            self.core.add(sequence)
        return ticket

    def _wait(self, ticket: Ticket) -> Output:
        while ticket.output is None:
            self._advance(ticket)
        return ticket.output

    def _advance(self, ticket: Ticket) -> None:
        """Run a step; where there is none to run, the ticket's check is what is waited for."""
        if not self.step() and ticket.check is not None:
            wait([ticket.check])
