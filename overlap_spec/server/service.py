"""What the routes share: one HTTP request's way through the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from overlap_spec.async_engine import AsyncEngine, AsyncRequestHandle
from overlap_spec.engine.arguments import copies
from overlap_spec.errors import GrammarError, InvalidRequest
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.errors import GRAMMAR_ERRORS, ApiError, Json, as_api_error, cut
from overlap_spec.server.events import Events, Wire, written
from overlap_spec.server.keys import holder_of
from overlap_spec.server.metrics import Metrics
from overlap_spec.server.middleware import OWNER, BodyRoute
from overlap_spec.server.settings import ServerSettings
from overlap_spec.types import Delta, Output, Request


@dataclass(frozen=True)
class RequestGroup:
    """The engine's requests of one HTTP request.

    Attributes:
        labels: The id of each request for the client, who may abort all that share one.
        requests: One for each output.
        field: The field of the body that their grammars come from.
        id_field: The field of the body that may have named the labels.
        owner: Who may abort them.
    """

    labels: Sequence[str]
    requests: Sequence[Request]
    field: str | None = None
    id_field: str = "rid"
    owner: str = ""

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Each label once, as it is known among those of all clients."""
        return [(self.owner, label) for label in dict.fromkeys(self.labels)]


class Format(ABC):
    """How a route shows outputs, as plain data.

    Attributes:
        wire: How its streams look.
    """

    wire = Wire()

    @abstractmethod
    def whole(self, outputs: Sequence[Output]) -> Any:
        """The reply as one object."""

    @abstractmethod
    def events(self, handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[Any]:
        """The reply in pieces, as plain data or :class:`InParts`."""


# What the requests of one stream may hold for a client that reads slowly.
STREAM_BUFFER_BYTES = 2 * 2**20

# What a reply may repeat of a request, once a choice, in characters or tokens.
MOST_REPEATED = 2**22
# Of a warning, and of why an output is not valid, in characters.
LONGEST_WARNING, LONGEST_REASON = 500, 2000

# A reply with more tokens and log-probabilities is made beside the loop.
LARGE_REPLY = 4096


class ClientGone(Exception):
    """The client has closed its connection."""


@dataclass
class Service:
    """The parts of one server."""

    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    constraints: Constraints
    created: int = field(default_factory=lambda: int(time.time()))
    # Open requests by their owner and label.
    by_label: dict[tuple[str, str], list[AsyncRequestHandle]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the served model, and of its adapters."""
        return self.settings.served_model_name, *self.engine.config.adapters

    def check_model(self, model: str | None) -> str:
        """The name of the served model or of the adapter ``model``; ApiError 404 if it is
        neither."""
        if model is not None and model not in self.models:
            names = ", ".join(map(repr, self.models))
            raise ApiError(
                404, f"there is no model {model!r}: this server has {names}", "model",
                "model_not_found",
            )  # fmt: skip
        return model or self.settings.served_model_name

    def check_choices(self, count: int) -> None:
        """Raise InvalidRequest if one HTTP request asks for more than ``max_choices`` outputs.

        Called before anything is done for each of them.
        """
        most = self.settings.max_choices
        if count > most:
            raise InvalidRequest(
                f"{count} outputs in one request; {most} are allowed (max_choices)", "n"
            )

    async def start(self, group: RequestGroup) -> list[AsyncRequestHandle]:
        """Send all requests of a group and wait until all are queued; if one fails, abort the rest.

        Raises:
            InvalidRequest, QueueFull, EngineUnavailable: as :meth:`AsyncEngine.submit`.
        """
        for owner, label in group.keys:
            if (owner, label) in self.by_label:
                message = f"{label!r} is the id of a request under way"
                raise InvalidRequest(message, group.id_field)
        self.by_label |= {key: [] for key in group.keys}
        handles: list[AsyncRequestHandle] = []
        try:
            for label, request in zip(group.labels, group.requests, strict=True):
                handles.append(self.engine.send(_of(request, group.owner)))
                self.by_label[group.owner, label].append(handles[-1])
                await asyncio.sleep(0)
            for handle in handles:
                await handle.queued()
        except BaseException as error:
            self._forget(group)
            for handle in handles:
                handle.abort()
            if isinstance(error, GrammarError) and group.field is not None:
                error.param = group.field
            raise
        return handles

    def finish(self, group: RequestGroup) -> None:
        """Abort a group's requests that still run, and count all of them in the metrics."""
        for handle in self._forget(group):
            handle.abort()
            self.metrics.observe(handle)

    def _forget(self, group: RequestGroup) -> list[AsyncRequestHandle]:
        """The requests of a group, whose labels are free from now on."""
        return [handle for key in group.keys for handle in self.by_label.pop(key)]

    async def answer(
        self,
        http: HttpRequest,
        shown: Format,
        group: RequestGroup,
        *,
        stream: bool | None,
        model: str | None = None,
    ) -> Response:
        """The reply to one HTTP request, as a whole or as a stream; if the client disconnects, the
        engine's requests are aborted.

        Args:
            group: Without its owner.
            model: Whose reply it is, where it may be an adapter's.

        Raises:
            ApiError: a request failed.
        """
        requests = group.requests
        if model in self.engine.config.adapters:
            requests = [replace(request, lora=model) for request in requests]
        group = replace(group, requests=requests, owner=http.scope[OWNER])
        if stream:
            return await self._stream(http, group, shown)
        outputs: list[Output] = await self.run_until_disconnect(http, self._outputs(group))

        def make() -> Json:
            reply = Json(shown.whole(outputs))
            # Freeing hundreds of thousands of objects takes long as well.
            outputs.clear()
            return reply

        is_small = sum(map(_values, outputs)) <= LARGE_REPLY
        return make() if is_small else await asyncio.to_thread(make)

    async def _outputs(self, group: RequestGroup) -> list[Output]:
        handles = await self.start(group)
        try:
            outputs = [await handle.finish() for handle in handles]
            for handle in handles:
                check_output(handle)
            return outputs
        finally:
            self.finish(group)

    async def run_until_disconnect(self, http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``, which is cancelled if the client disconnects or time runs out.

        Raises:
            ClientGone: the client has disconnected.
            TimeoutError: ``request_timeout_s`` is over.
        """
        return await until_disconnect(http.receive, work, self.settings.request_timeout_s)

    async def _stream(self, http: HttpRequest, group: RequestGroup, shown: Format) -> Response:
        """A group's outputs as server-sent events.

        Nothing is sent before all requests are queued, so that a rejection still sets the status.
        """
        started = asyncio.get_running_loop().time()
        handles = await self.run_until_disconnect(http, self.start(group))
        for handle in handles:
            handle.limit_unread(max(STREAM_BUFFER_BYTES // len(handles), 2**16))
        deadline = started + self.settings.request_timeout_s

        async def lines() -> AsyncIterator[bytes]:
            pieces, more, wire = shown.events(handles), True, shown.wire
            while more:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(pieces)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    event, more = wire.failed(as_api_error(error)), False
                async for part in written(event, wire.named):
                    yield part
            if wire.done:
                yield wire.done

        def end(whole: bool) -> None:
            self.finish(group)
            if not whole:
                self.metrics.gone.inc()

        return Events(lines(), end)


async def _serving(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


# What a route's handler takes as its first parameter.
Serving = Annotated[Service, Depends(_serving)]
routes = partial(APIRouter, route_class=BodyRoute)
# No schema: it would describe the whole stream and not one event.
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def _of(request: Request, owner: str) -> Request:
    """A request as its owner's. What was computed for a key is for that key alone, unless the body
    names a salt."""
    salt = f"salt {request.cache_salt}" if request.cache_salt else ""
    if not salt and owner.startswith("key "):
        salt = owner
    return replace(request, holder=holder_of(owner), cache_salt=salt)


def fan_out(requests: Sequence[Request], count: int) -> list[Request]:
    """``count`` copies of each request, with consecutive seeds; the first one alone tells what they
    share: the prompt's log-probabilities, and a choice's probabilities.

    Raises:
        InvalidRequest: the probabilities that are told have long texts.
    """
    grammars = [one.grammar for one in requests if one.grammar is not None]
    told = sum(len(grammar.source) for grammar in grammars if grammar.probabilities)
    check_repeated(told, "structured_outputs.probabilities")
    return [copy for one in requests for copy in copies(one, count)]


def check_repeated(size: int, field: str) -> None:
    """Raise InvalidRequest if all choices together repeat more of a request than a reply holds."""
    if size > MOST_REPEATED:
        raise InvalidRequest(
            f"all choices together would repeat {size} characters or tokens of the request; "
            f"{MOST_REPEATED} are allowed: lower n, or send fewer prompts at once",
            field,
        )


def _values(output: Output) -> int:
    """Tokens, log-probabilities and probabilities of choices of an output."""
    entries = [e for e in (*output.logprobs, *output.prompt_logprobs) if e is not None]
    told = sum(1 + len(entry.top) for entry in entries)
    return len(output.token_ids) + told + len(output.choices)


def check_output(handle: AsyncRequestHandle) -> None:
    """Raise ApiError if the request has ended with an error."""
    output = handle.output
    assert output is not None
    if output.error is not None:
        own = handle.error_type in GRAMMAR_ERRORS
        code = "grammar_failed" if own else "generation_failed"
        raise ApiError(400 if own else 500, output.error, code=code)


async def interleaved(handles: Sequence[AsyncRequestHandle]) -> AsyncIterator[tuple[int, Delta]]:
    """The pieces of several requests in the order of their arrival, each with its handle's index.

    Raises:
        ApiError: a request has ended with an error.
    """
    if len(handles) == 1:
        async for delta in handles[0]:
            yield 0, delta
        check_output(handles[0])
        return
    queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for delta in handles[index]:
                queue.put_nowait((index, delta))
        finally:
            queue.put_nowait((index, None))

    pumps = [asyncio.ensure_future(pump(index)) for index in range(len(handles))]
    try:
        left = len(handles)
        while left:
            index, piece = await queue.get()
            if piece is not None:
                yield index, piece
                continue
            left -= 1
            await pumps[index]
            check_output(handles[index])
    finally:
        for each in pumps:
            each.cancel()


def stop_reason(output: Output, eos_ids: frozenset[int]) -> str | int | None:
    """The caller's stop string or token that ended the output, as in vLLM; None for EOS."""
    return None if output.stop_match in eos_ids else output.stop_match


def findings(ended: Output | Delta) -> dict[str, Any]:
    """What else is told of a whole output: the ``verdict`` of a validated best-effort one, the
    ``choice_probabilities`` of a choice, where they were asked for, and the ``warnings`` of a
    grammar that asks for what nothing holds."""
    found: dict[str, Any] = {}
    if ended.verdict is not None:
        found["verdict"] = asdict(ended.verdict)
        reason = ended.verdict.reason
        found["verdict"]["reason"] = None if reason is None else cut(reason, LONGEST_REASON)
    if ended.choices:
        found["choice_probabilities"] = [asdict(choice) for choice in ended.choices]
    if ended.warnings:
        found["warnings"] = [cut(warning, LONGEST_WARNING) for warning in ended.warnings]
    return found


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}{uuid.uuid4().hex}"


def usages(outputs: Sequence[Output], prompts: Sequence[Request]) -> dict[str, Any]:
    """What a chat or a text tells of its tokens: OpenAI's ``usage``, and :func:`speculation`'s.

    A prompt with several outputs counts once. Its names of predicted tokens tell of drafts, where
    any were verified. ``narrowed_tokens`` is ours: what was chosen so that outputs come to their
    end within their room, where any was.
    """
    prompt_tokens = sum(len(prompt.prompt_ids) for prompt in prompts)
    output_tokens = sum(output.stats.output_tokens for output in outputs)
    cached = sum(output.stats.cached_tokens for output in outputs)
    narrowed = sum(output.stats.narrowed_tokens for output in outputs)
    drafted = sum(output.stats.drafted_tokens for output in outputs)
    accepted = sum(output.stats.accepted_drafts for output in outputs)
    details: dict[str, int] = {}
    if drafted:
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    if narrowed:
        details["narrowed_tokens"] = narrowed
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt_tokens)},
        **({"completion_tokens_details": details} if details else {}),
    }
    return {"usage": usage} | speculation(outputs)


def speculation(outputs: Sequence[Output]) -> dict[str, Any]:
    """``metrics`` of a reply with one output, where drafts of it were verified, as vLLM names them
    (its ``--per-request-spec-decode-metrics summary``).

    Entry j of ``acceptance_histogram`` is the number of verifies that accepted j drafts;
    ``num_spec_tokens`` the most that one did, since lengths are chosen from step to step.
    """
    if len(outputs) != 1 or not outputs[0].stats.drafted_tokens:
        return {}
    stats = outputs[0].stats
    told = {
        "mean_acceptance_length": 1 + stats.accepted_drafts / stats.verifies,
        "draft_acceptance_rate": stats.accept_rate,
        "acceptance_histogram": list(stats.accept_histogram),
        "num_spec_steps": stats.verifies,
        "num_accepted_draft_tokens": stats.accepted_drafts,
        "num_draft_tokens": stats.drafted_tokens,
        "num_spec_tokens": len(stats.accept_histogram) - 1,
    }
    return {"metrics": {"speculative_decoding": told}}


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Any], limit_s: float | None = None
) -> Any:
    """The result of ``work``, which is cancelled if the client disconnects or time runs out.

    Raises:
        ClientGone: the client has disconnected.
        TimeoutError: ``limit_s`` is over.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGone
        raise TimeoutError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
