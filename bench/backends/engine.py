"""overlap-spec in this process: ``submit`` and ``step``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

from bench.backends.base import Batch, Reply, Task
from bench.measure import GREEDY, since
from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.spec import AdditionalProperties, Grammar
from overlap_spec.timeline import Span, union_ms


class EngineSystem:
    """An engine that keeps up to ``parallel`` requests on their way.

    Args:
        engine: Closed by :meth:`close`.
        how: See :class:`bench.backends.base.System`.
    """

    def __init__(self, engine: Engine, how: str) -> None:
        self.engine, self.how = engine, how

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """See :class:`bench.backends.base.System`. Grammars should have been compiled before."""
        waiting = deque(enumerate(tasks))
        open_tickets: dict[int, RequestHandle] = {}
        replies = [Reply() for _ in tasks]
        before, start_ns = copy(self.engine.figures), time.perf_counter_ns()
        while waiting or open_tickets:
            while waiting and len(open_tickets) < parallel:
                number, task = waiting.popleft()
                open_tickets[number] = self._submit(task)
            self.engine.step()
            for number, ticket in list(open_tickets.items()):
                if ticket.output is not None:
                    self.engine.release([open_tickets.pop(number)])
                    replies[number] = _reply(ticket)
        seconds = (time.perf_counter_ns() - start_ns) / 1e9
        return Batch(seconds, replies, self._more(before, start_ns))

    def compile_ms(self, schema: dict[str, Any]) -> float:
        """Time to the compiled grammar; next to nothing where it is cached.

        Raises:
            GrammarError: the engine's backend does not take the schema.
        """
        start = time.perf_counter()
        self.engine.compiler.compile(self._grammar(schema))
        return (time.perf_counter() - start) * 1e3

    def close(self) -> None:
        """See :class:`bench.backends.base.System`."""
        self.engine.close()

    def _grammar(self, schema: dict[str, Any]) -> Grammar:
        additional = cast("AdditionalProperties", self.engine.config.additional_properties)
        return Grammar.json_schema(schema, additional_properties=additional)

    def _submit(self, task: Task) -> RequestHandle:
        grammar = None if task.schema is None else self._grammar(task.schema)
        sampling = {"max_tokens": task.max_tokens, "stop": task.stop, **GREEDY}
        return self.engine.submit(task.prompt, grammar, sampling, raw=task.raw)

    def _more(self, before: Any, start_ns: int) -> dict[str, Any]:
        """What the grammar cost, and where the time went: busy time by span, in ms."""
        grown = since(self.engine, before)
        return {
            "steps": grown.steps,
            "grammar_ms": grown.grammar_ms,
            "exposed_ms": grown.exposed_ms,
            "hidden_fraction": grown.hidden_fraction,
            "busy_ms": busy_ms(self.engine, start_ns),
        }


def busy_ms(engine: Engine, start_ns: int) -> dict[str, float]:
    """Busy time of each stream and span since ``start_ns``, in ms, as far as the timeline goes."""
    spans: dict[str, list[Span]] = {}
    for span in engine.timeline.spans():
        if span.start_ns >= start_ns:
            spans.setdefault(f"{span.lane}: {span.name}", []).append(span)
    return {name: union_ms(found) for name, found in sorted(spans.items())}


def takes(system: EngineSystem, schema: dict[str, Any]) -> tuple[float | None, str | None]:
    """(compile time in ms, None), or (None, why the backend does not take the schema)."""
    try:
        return system.compile_ms(schema), None
    except GrammarError as error:
        return None, str(error)


def _reply(ticket: RequestHandle) -> Reply:
    output = ticket.output
    assert output is not None
    stats = output.stats
    return Reply(
        text=output.text,
        tokens=stats.output_tokens,
        finish_reason=output.finish_reason,
        ttft_ms=stats.ttft_ms if stats.output_tokens else None,
        end_to_end_ms=stats.end_to_end_ms,
        verifies=stats.verifies if stats.drafted_tokens else None,
        verified_tokens=stats.verified_tokens if stats.drafted_tokens else None,
        error=output.error,
        token_ids=output.token_ids,
    )
