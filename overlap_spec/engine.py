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
from overlap_spec.errors import GrammarError, InvalidRequest, NumericFault, RequestFailed
from overlap_spec.grammar.lane import Lane as LanePool
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar_lane import GrammarLane, StepFigures
from overlap_spec.scheduler.scheduler import Scheduler
from overlap_spec.scheduler.sequence import Sequence as Running
from overlap_spec.scheduler.stops import TextBuffer
from overlap_spec.speculation.presets import load_policy
from overlap_spec.speculation.static import StaticPolicy, static_tier
from overlap_spec.timeline import Timeline
from overlap_spec.tokenizer import Message, Tokenizer
from overlap_spec.types import (
    Delta,
    Output,
    Request,
    SamplingParams,
    StepResult,
)
from overlap_spec.worker.build import build_streams, build_worker
from overlap_spec.worker.worker import Flight

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
        from overlap_spec.grammar.backends import load
        from overlap_spec.grammar.compile import GrammarCompiler

        self.config = EngineConfig.build(model=model, **settings)
        config = self.config
        drafting = config.draft_path is not None
        self.policy = (
            load_policy(
                config.adaptive, config.num_steps, config.eagle_topk, config.num_draft_tokens
            )
            if drafting
            else StaticPolicy(static_tier(0, 1, None))
        )
        self.timeline = Timeline()
        record = self.timeline.record
        tiers = self.policy.tiers
        reserve = reserve_tokens(max(tier.window_tokens for tier in tiers))
        self.worker = build_worker(config, tiers, reserve, build_streams(config, record), record)
        self.context_length = self.worker.passes.target.config.max_position
        self.tokenizer = Tokenizer(config.target_path, self.worker.passes.target.config.vocab_size)
        self.compiler = GrammarCompiler(load(config.grammar_backend)(self.tokenizer.vocabulary))
        self.lane = GrammarLane(
            LanePool(config.lanes, config.mask_deadline_ms), self._settle, record
        )
        self.scheduler = Scheduler(
            pages=self.worker.pool.k.shape[1],
            page_size=config.page_size,
            max_rows=config.max_running_requests,
            chunk_tokens=config.chunked_prefill_size,
            reserve_tokens=reserve,
            assign=lambda s: self.worker.assign(s.row, s.request, s.output_ids),
            reuse=config.prefix_cache,
        )
        self._flight: Flight | None = None
        self._news: list[tuple[Running, tuple[int, ...]]] = []
        self._ids = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._lock = threading.RLock()

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
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
    ) -> list[Output]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> Output | list[Output]:
        """Generate for one prompt, or for a list of prompts at once.

        Args:
            prompt: Text (one user turn), a list of messages (a chat), or a list of either.
            grammar: What the output must be; one for all prompts, or one each.
            sampling: As SamplingParams or its fields; one for all prompts, or one each.
            raw: Take text as it is, without the chat template.
            tools: Tool definitions for the chat template.

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
            self._prepare(p, cast("Grammar | None", g), cast("Sampling", s), raw, tools)
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
    ) -> Iterator[Delta]:
        """Generate for one prompt, piece by piece; leaving the loop aborts the request.

        Several streams may run at once, from one thread or many: they share the steps.

        Raises:
            InvalidRequest: as for :meth:`generate`, at the call.
            RequestFailed: the request ended with an error, after its last piece.
        """
        return self._pieces(self.submit(prompt, grammar, sampling, raw=raw, tools=tools))

    def submit(
        self,
        prompt: Prompt,
        grammar: Grammar | None = None,
        sampling: Sampling = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> Ticket:
        """Queue a request; whoever submits calls :meth:`step`, and at last :meth:`release`.

        Raises:
            InvalidRequest: as for :meth:`generate`.
        """
        return self._enqueue(self._prepare(prompt, grammar, sampling, raw, tools))

    def abort(self, ticket: Ticket) -> None:
        """End a request now; what it has so far is its output, at once."""
        with self._lock:
            self.scheduler.abort(ticket.request.id)
            self._quiesce()

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Forget requests that have ended, and abort the others."""
        with self._lock:
            for ticket in tickets:
                if ticket.output is None:
                    self.scheduler.abort(ticket.request.id)
            self._quiesce()
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
        """Run one step of whatever is queued; False when there is nothing to do.

        Results are read one step late, under the next step's verify; where there is no next
        step, or the mode is serial, at once.
        """
        with self._lock:
            start = time.perf_counter_ns()
            plan = self.scheduler.plan(self.policy.choose)
            flight = None
            if plan is not None:
                self.lane.step = plan.index
                self.timeline.record("host", "plan", start, time.perf_counter_ns(), plan.index)
                flight = self.worker.step(plan, self.lane)
            busy = flight is not None or self._flight is not None
            self._settle()
            self._flight = flight
            if self.config.overlap == "none":
                self._settle()
            self._quiesce()
            return busy

    @property
    def figures(self) -> StepFigures:
        """What the grammar cost so far, and how much of it was hidden."""
        return self.lane.figures

    def snapshot(self) -> dict[str, Any]:
        """State as plain data: length policy, pages, requests, grammar time."""
        allocator, figures = self.scheduler.allocator, self.figures
        return {
            "overlap": self.config.overlap,
            "speculation": self.policy.snapshot(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "pages_in_use": allocator.in_use,
            "pages": allocator.total,
            "preemptions": self.scheduler.preemptions,
            "steps": figures.steps,
            "grammar_ms": figures.grammar_ms,
            "exposed_ms": figures.exposed_ms,
            "hidden_fraction": figures.hidden_fraction,
        }

    def _all_ended(self) -> bool:
        return all(s.finish_reason is not None for s in self.scheduler.running)

    def _settle(self) -> None:
        """Read the step under way, cut its runs by the stop rules, and feed the matchers."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        result = self.worker.collect(flight)
        serial = self.config.overlap == "none"
        if not serial:
            self._account(result, 0.0)
        self._fail_failed()
        kept = self.scheduler.commit(result)
        start = time.perf_counter_ns()
        self.lane.accept({s.request.id: run for s, run in kept})
        if serial:
            # Nothing runs beside these accepts: compute stands idle for them too.
            self._account(result, (time.perf_counter_ns() - start) / 1e6 if kept else 0.0)
        self._news += kept
        self._observe(result)
        self._fail_failed()
        for sequence in self.scheduler.running:
            if isinstance(sequence.error, NumericFault):
                self.scheduler.spoil(sequence)
                self.worker.clear(sequence.pages)
            if sequence.finish_reason is not None:
                self.lane.drop(sequence.request.id)

    def _account(self, result: StepResult, late_ms: float) -> None:
        shares = self.lane.account(result.plan.index, result.exposed_ms + late_ms)
        for sequence in self.scheduler.running:
            grammar_ms, exposed_ms = shares.get(sequence.request.id, (0.0, 0.0))
            sequence.stats.grammar_ms += grammar_ms
            sequence.stats.exposed_ms += exposed_ms

    def _observe(self, result: StepResult) -> None:
        """Tell the length policy what the step's trees got."""
        trees = len(result.plan.decode_rows)
        self.policy.observe(
            trees, result.plan.tier, [r.accepted for r in result.rows[:trees] if r.tokens]
        )

    def _fail_failed(self) -> None:
        """End the requests whose matcher failed."""
        failed, self.lane.failed = self.lane.failed, {}
        for sequence in self.scheduler.running:
            error = failed.get(sequence.request.id)
            if error is not None and sequence.finish_reason is None:
                sequence.fail(error)

    def _publish(self) -> None:
        """Hand out what was settled, and the outputs of requests that have ended."""
        news, self._news = self._news, []
        for sequence, run in news:
            if sequence.finish_reason is None and run:
                self._push(sequence, run)
        for sequence in self.scheduler.running:
            if sequence.finish_reason is not None:
                self._finish(sequence)
        for sequence in self.scheduler.retire():
            self._finish(sequence)

    def close(self) -> None:
        """Abort what runs and end the lane's threads."""
        with self._lock:
            self.release(list(self._tickets.values()))
        self.lane.pool.close()
        self.worker.close()

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
    ) -> Running:
        """Check and compile everything that can be wrong with a request before it is queued."""
        arrival_ns = time.perf_counter_ns()
        params = self._sampling(sampling)
        ids = self._prompt_ids(prompt, raw, tools)
        room = self.context_length - len(ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the context of {self.context_length} leaves "
                "no room for output: shorten the prompt",
                "prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} and the prompt's {len(ids)} tokens exceed the "
                f"context of {self.context_length}",
                "max_tokens",
            )
        max_tokens = params.max_tokens if params.max_tokens is not None else room
        if not self.scheduler.fits(len(ids) + max_tokens):
            raise InvalidRequest(
                f"{len(ids) + max_tokens} tokens of prompt and output exceed the whole KV cache: "
                "lower max_tokens, or raise mem_fraction_static or max_total_tokens",
                "max_tokens",
            )
        if grammar is not None and not isinstance(grammar, Grammar):
            raise GrammarError(
                f"grammar must be made by Grammar.json_schema() and its like: {grammar!r}",
                "grammar",
            )
        compiled = self.compiler.compile(grammar) if grammar is not None else None
        compile_ms = (time.perf_counter_ns() - arrival_ns) / 1e6
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        request = Request(
            id=next(self._ids),
            prompt_ids=tuple(ids),
            sampling=params,
            grammar=grammar,
            max_tokens=max_tokens,
            stop_ids=eos | frozenset(params.stop_token_ids),
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            arrival_ns=arrival_ns,
        )
        buffer = TextBuffer(self.tokenizer.detokenizer(), tuple(params.stop))
        sequence = Running(request, buffer, compiled.matcher() if compiled else None)
        sequence.stats.prompt_tokens = len(ids)
        sequence.stats.grammar_compile_ms = compile_ms if compiled else 0.0
        return sequence

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
            if sequence.matcher is not None:
                self.lane.matchers[sequence.request.id] = sequence.matcher
            self.scheduler.add(sequence)
        return ticket

    def _wait(self, ticket: Ticket) -> Output:
        while ticket.output is None:
            self.step()
        return ticket.output

    def _quiesce(self) -> None:
        """Publish; where nobody is left, read the step under way at once, so that it frees all."""
        if self._all_ended():
            self._settle()
        self._publish()

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
        ticket = self._tickets.get(request.id)
        if ticket is None or ticket.output is not None or reason is None:
            return
        self.lane.drop(request.id)
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


def reserve_tokens(window_tokens: int) -> int:
    """Slots that a running sequence owns behind its committed length.

    Twice the draft window, since the host may be one step behind, and one for the draft cache's
    slot of the newest token.
    """
    return 2 * window_tokens + 1
