"""The engine: requests in, constrained text out. Wires scheduler, worker and grammar together."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast, overload

from overlap_spec.config import EngineConfig
from overlap_spec.core import Core
from overlap_spec.errors import GrammarError, InvalidRequest, RequestFailed
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.compile import GrammarCompiler
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar_lane import StepFigures
from overlap_spec.scheduler.sequence import Sequence as Running
from overlap_spec.scheduler.stops import TextBuffer
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Message, Tokenizer
from overlap_spec.types import Delta, Output, Request, SamplingParams

Prompt = str | Sequence[Message]
Sampling = SamplingParams | Mapping[str, Any] | None


@dataclass
class Ticket:
    """A submitted request on its way: pieces not yet read, and its end."""

    request: Request
    deltas: deque[Delta] = field(default_factory=deque)
    output: Output | None = None
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
        backend = load(self.config.grammar_backend)
        self.compiler = GrammarCompiler(backend(self.tokenizer.vocabulary))
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
            prompt: Text (one user turn), a list of messages (a chat), or a list of either.
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
        prompts, single = _as_prompts(prompt)
        grammars = _each("grammar", grammar, len(prompts))
        samplings = _each("sampling", sampling, len(prompts))
        prepared = [
            self._prepare(p, cast("Grammar | None", g), cast("Sampling", s), raw, tools, priority)
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
        return self._enqueue(self._prepare(prompt, grammar, sampling, raw, tools, priority))

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
        self,
        prompt: Prompt,
        grammar: Grammar | None,
        sampling: Sampling,
        raw: bool,
        tools: Sequence[Any] | None,
        priority: int,
    ) -> Running:
        """Check and compile everything that can be wrong with a request before it is queued."""
        arrival_ns = time.perf_counter_ns()
        params = self._sampling(sampling)
        ids = self._prompt_ids(prompt, raw, tools)
        max_tokens = self._max_tokens(params, len(ids))
        if grammar is not None and not isinstance(grammar, Grammar):
            raise GrammarError(
                f"grammar must be made by Grammar.json_schema() and its like: {grammar!r}",
                "grammar",
            )
        compile_start_ns = time.perf_counter_ns()
        compiled = self.compiler.compile(grammar) if grammar is not None else None
        compile_ms = (time.perf_counter_ns() - compile_start_ns) / 1e6
        # Under a grammar an end-of-text token is allowed where the grammar may end, and ends it.
        ignore = params.ignore_eos and grammar is None
        eos = frozenset() if ignore else self.tokenizer.eos_ids
        request = Request(
            id=next(self._ids),
            prompt_ids=tuple(ids),
            sampling=params,
            grammar=grammar,
            max_tokens=max_tokens,
            stop_ids=eos | frozenset(params.stop_token_ids),
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            arrival_ns=arrival_ns,
            priority=priority,
        )
        buffer = TextBuffer(self.tokenizer.detokenizer(), tuple(params.stop))
        sequence = Running(request, buffer, compiled.matcher() if compiled else None)
        sequence.stats.prompt_tokens = len(ids)
        sequence.stats.grammar_compile_ms = compile_ms if compiled else 0.0
        return sequence

    def _max_tokens(self, params: SamplingParams, prompt_tokens: int) -> int:
        """Output tokens that a request may have; InvalidRequest where there is no room for it."""
        room = self.context_length - prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; the context of {self.context_length} "
                "leaves no room for output: shorten the prompt",
                "prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} and the prompt's {prompt_tokens} tokens "
                f"exceed the context of {self.context_length}",
                "max_tokens",
            )
        space = self.core.scheduler.longest - prompt_tokens
        max_tokens = params.max_tokens if params.max_tokens is not None else min(room, space)
        if max_tokens < 1 or max_tokens > space:
            raise InvalidRequest(
                f"{prompt_tokens + max(max_tokens, 1)} tokens of prompt and output exceed the "
                "whole KV cache: lower max_tokens, or raise mem_fraction_static or "
                "max_total_tokens",
                "max_tokens",
            )
        return max_tokens

    def _sampling(self, sampling: Sampling) -> SamplingParams:
        if sampling is None:
            sampling = SamplingParams()
        elif isinstance(sampling, Mapping):
            sampling = SamplingParams.from_mapping(sampling)
        elif not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling must be SamplingParams: {sampling!r}", "sampling")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(sampling, name):
                if token >= self.tokenizer.vocab_size:
                    raise InvalidRequest(
                        f"{name}: token {token} is outside the vocabulary of "
                        f"{self.tokenizer.vocab_size}",
                        name,
                    )
        return self.tokenizer.sampling_defaults(sampling)

    def _prompt_ids(self, prompt: Prompt, raw: bool, tools: Sequence[Any] | None) -> list[int]:
        if isinstance(prompt, str):
            if raw:
                ids = self.tokenizer.encode(prompt, special=True)
            else:
                ids = self.tokenizer.chat([{"role": "user", "content": prompt}], tools)
        else:
            ids = self.tokenizer.chat(prompt, tools)
        if not ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        return ids

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
        logprobs = tuple(sequence.logprobs[len(sequence.logprobs) - len(run) :])
        delta = Delta(text, tuple(run), logprobs if sequence.logprobs else ())
        ticket = self._tickets[sequence.request.id]
        ticket.deltas.append(delta)
        ticket.pushed_tokens += len(run)

    def _finish(self, sequence: Running) -> None:
        """Turn an ended sequence into its last piece and its output."""
        request, reason = sequence.request, sequence.finish_reason
        ticket = self._tickets[request.id]
        assert reason is not None
        text, parsed, error = sequence.buffer.text, None, None
        if sequence.error is not None:
            error = str(sequence.error) or type(sequence.error).__name__
        elif reason == "stop" and request.grammar is not None:
            parsed = _parse(request.grammar, text)
        new = slice(ticket.pushed_tokens, None)
        logprobs = tuple(sequence.logprobs)
        last = sequence.buffer.release(finished=True)
        ticket.deltas.append(Delta(last, tuple(sequence.output_ids[new]), logprobs[new], reason))
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


def _as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts of a call, and whether it was a single one."""
    if isinstance(prompt, str):
        return [prompt], True
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt must be text, messages, or a list: {prompt!r}", "prompt")
    if prompt and all(isinstance(part, Mapping) for part in prompt):
        return [cast("Sequence[Message]", prompt)], True
    for part in prompt:
        if not isinstance(part, str) and not (
            isinstance(part, Sequence) and part and all(isinstance(m, Mapping) for m in part)
        ):
            raise InvalidRequest(f"a prompt must be text or a list of messages: {part!r}", "prompt")
    return [cast("Prompt", part) for part in prompt], False


def _each(name: str, value: Any, count: int) -> list[Any]:
    """``value`` for each of ``count`` prompts, or the values if it is a list of them."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidRequest(f"{len(value)} values of {name} for {count} prompts", name)
        return list(value)
    return [value] * count


def _parse(grammar: Grammar, text: str) -> Any:
    """The parsed output; None where a stop string of the caller's cut it short."""
    try:
        return grammar.parse(text)
    except ValueError:
        return None
