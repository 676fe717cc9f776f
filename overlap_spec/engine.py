"""The engine: requests in, constrained text out. Wires scheduler, worker and grammar together."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, overload

from overlap_spec.config import EngineConfig
from overlap_spec.core import Core
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
    Sampling,
    as_prompts,
    each,
    parse_output,
)
from overlap_spec.scheduler.sequence import Sequence as Running
from overlap_spec.scheduler.stops import TextBuffer
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, Request


@dataclass
class Ticket:
    """A submitted request on its way: pieces not yet read, its end, and what ended it wrongly."""

    request: Request
    deltas: deque[Delta] = field(default_factory=deque)
    output: Output | None = None
    error: Exception | None = None
    pushed_tokens: int = 0


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
        self.core = Core(self.config)
        shape = self.core.worker.passes.target.config
        self.context_length = shape.max_position
        self.tokenizer = Tokenizer(self.config.target_path, shape.vocab_size)
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
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> list[Output]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> Output | list[Output]:
        """Generate for one prompt, or for a list of prompts at once.

        Args:
            prompt: Text (one user turn), a list of messages (a chat), token ids, or a list of
                these.
            grammar: What the output must be; one for all prompts, or one each.
            sampling: As SamplingParams or its fields; one for all prompts, or one each.
            raw: Take text as it is, without the chat template.
            tools: Tool definitions for the chat template.
            priority: Of waiting requests, the higher starts first.

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
            self._prepare(p, g, s, raw=raw, tools=tools, priority=priority)
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
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> Iterator[Delta]:
        """Generate for one prompt, piece by piece; leaving the loop aborts the request.

        Several streams may run at once, from one thread or many: they share the steps.

        Raises:
            InvalidRequest: as for :meth:`generate`, at the call.
            RequestFailed: the request ended with an error, after its last piece.
        """
        return self._pieces(
            self.submit(prompt, grammar, sampling, raw=raw, tools=tools, priority=priority)
        )

    def submit(
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Queue a request; whoever submits calls :meth:`step`, and at last :meth:`release`.

        Raises:
            InvalidRequest: as for :meth:`generate`.
        """
        more: dict[str, Any] = {"raw": raw, "tools": tools, "priority": priority}
        return self._enqueue(self._prepare(prompt, grammar, sampling, **more))

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
            self.core.scheduler.abort(ticket.request.id)
            self._publish()

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Forget requests that have ended, and abort the others."""
        with self._lock:
            for ticket in tickets:
                if ticket.output is None:
                    self.core.scheduler.abort(ticket.request.id)
            self._publish()
            for ticket in tickets:
                self._tickets.pop(ticket.request.id, None)

    def _pieces(self, ticket: Ticket) -> Iterator[Delta]:
        try:
            while True:
                while ticket.deltas:
                    yield ticket.deltas.popleft()
                if ticket.output is not None:
                    break
                self.step()
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
        news = self.core.news()
        for sequence, run in news.runs:
            self._push(sequence, run)
        for sequence in news.ended:
            self._finish(sequence)

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

    def _prepare(self, prompt: Prompt, grammar: Any, sampling: Any, **more: Any) -> Running:
        """Check and compile everything that can be wrong with a request before it is queued."""
        arrival_ns = time.perf_counter_ns()
        prepared = self.preparer.prepare(prompt, grammar, sampling, **more)
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
            self.step()
        return ticket.output

    def _push(self, sequence: Running, run: Sequence[int]) -> None:
        text = sequence.buffer.release(finished=False)
        new = slice(len(sequence.output_ids) - len(run), None)
        delta = Delta(
            text,
            tuple(run),
            tuple(sequence.logprobs[new]),
            origins=tuple(sequence.origins[new]),
            tier=sequence.tier,
        )
        ticket = self._tickets[sequence.request.id]
        ticket.deltas.append(delta)
        ticket.pushed_tokens += len(run)

    def _finish(self, sequence: Running) -> None:
        """Turn an ended sequence into its last piece and its output."""
        request, reason = sequence.request, sequence.finish_reason
        ticket = self._tickets[request.id]
        assert reason is not None
        text, parsed, error = sequence.buffer.text, None, None
        ticket.error = sequence.error
        if sequence.error is not None:
            error = str(sequence.error) or type(sequence.error).__name__
        elif reason == "stop" and request.grammar is not None:
            parsed = parse_output(request.grammar, text)
        new = slice(ticket.pushed_tokens, None)
        logprobs = tuple(sequence.logprobs)
        last = sequence.buffer.release(finished=True)
        ticket.deltas.append(
            Delta(
                last,
                tuple(sequence.output_ids[new]),
                logprobs[new],
                reason,
                tuple(sequence.origins[new]),
                sequence.tier,
            )
        )
        ticket.output = Output(
            text=text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=reason,
            stats=sequence.stats,
            parsed=parsed,
            logprobs=logprobs,
            stop_match=sequence.stop_match,
            error=error,
        )
