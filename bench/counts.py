"""What a step and a text cost, in counts that do not depend on the machine's speed.

``python -m bench.counts [--json PATH]`` takes some ten seconds on the embedded model, and has no
samples: everything is counted once. ``bench.check`` holds the record to ``bench/expected.json``.

Fields of the record:
    step: By case and batch size, of one decode step in the serial mode, whose passes are replayed:
        ``operations`` of the step's own code that are no views, and among them ``copies``, and
        those that make ``allocations``, of ``allocated_bytes``; ``replays`` of recorded passes; and
        ``uploaded_bytes`` of the plan.
    text: By drafter, of 4 texts that their grammars fix: ``steps``, ``verifies``, and by the
        grammar's backend the ``calls`` of its matchers, for all of them.
    waits: By overlap mode, for these texts: ``host``, how often the host waited for an event, and
        ``streams``, how often a stream was told to.
    recordings: By drafter, once ready and after the texts: recorded passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bench.common import Run, flags
from bench.step_cost import SETTINGS
from overlap_spec import Engine, Grammar
from overlap_spec.grammar.contract import Matcher
from overlap_spec.worker.batch import Staging
from overlap_spec.worker.chains import Chain
from overlap_spec.worker.graphs import TracedGraph
from overlap_spec.worker.streams import Event, Stream

# Views and numpy's way in and out do no work; what is left computes, copies or allocates.
FREE = ("view", "slice", "detach", "alias", "resolve_", "lift_fresh", "split", "expand", "select")
COPIES = ("copy_", "_to_copy", "clone")
DIGITS = Grammar.regex(r"[a-f]{3}-\d{90}")
CASES: dict[str, tuple[Grammar | None, dict[str, Any]]] = {
    "free": (None, {"temperature": 0.0}),
    "constrained": (DIGITS, {"temperature": 0.0}),
    "sampled": (DIGITS, {"temperature": 0.8, "seed": 1, "top_p": 0.9}),
}
BATCHES = (1, 7)
# Before the step that is counted: prompts, and what is made once.
STEPS_BEFORE = 3
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"algorithm": "none"},
    "grammar": {"algorithm": "grammar", "num_steps": 5},
    "ngram": {"algorithm": "ngram", "num_steps": 5},
}
TEXTS = (
    '{"name": "Ada Brandt", "city": "Zurich", "name": "Ada Brandt", "city": "Zurich"}',
    "the quick brown fox jumps over the lazy dog and the quick brown fox jumps again",
    "2024-11-05, 2024-11-06, 2024-11-07, 2024-11-08",
    "ab",
)
BACKENDS = ("xgrammar", "llguidance")
MATCHER_CALLS = ("accept", "rollback", "fill", "fill_tree", "forced_bytes", "fork")
MODES = ("none", "double-sync", "once-sync")


class Operations(TorchDispatchMode):
    """Counts the operations that run within it, but for those of recorded passes.

    Attributes:
        counts: By name; ``replay`` has the recorded passes.
        allocations, allocated_bytes: Of results that share no memory with what they are made of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.allocations = self.allocated_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        made = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _storage(tensor) not in given:
                self.allocations += 1
                self.allocated_bytes += tensor.untyped_storage().nbytes()
        return made

    def replaying(self) -> ExitStack:
        """While it is open, a recorded pass counts as a replay and not by its operations."""
        stack = ExitStack()
        for owner, name in ((TracedGraph, "__call__"), (Chain, "draft")):
            stack.enter_context(patch.object(owner, name, self._once(getattr(owner, name))))
        return stack

    def _once(self, replay: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.counts["replay"] += 1
            with _disable_current_modes():
                return replay(*args)

        return counted

    def figures(self) -> dict[str, int]:
        """The record's."""
        work = {n: c for n, c in self.counts.items() if not n.startswith((*FREE, "replay"))}
        return {
            "operations": sum(work.values()),
            "copies": sum(work.get(name, 0) for name in COPIES),
            "allocations": self.allocations,
            "allocated_bytes": self.allocated_bytes,
            "replays": self.counts["replay"],
        }


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


@contextmanager
def calls_counted(owners: Sequence[type], *names: str) -> Iterator[Counter[str]]:
    """How often methods that these classes define are called, by name."""
    counts: Counter[str] = Counter()

    def counting(name: str, method: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        return counted

    with ExitStack() as stack:
        for owner in owners:
            for name in names:
                if name in vars(owner):
                    method = counting(name, vars(owner)[name])
                    stack.enter_context(patch.object(owner, name, method))
        yield counts


def settings_of(drafter: str, overlap: str = "none", **more: Any) -> dict[str, Any]:
    """The engine's; nothing may go by the clock, and grammars compile in its process."""
    own = {"overlap": overlap, "grammar_isolated": False, "device": "cpu", "threads": 1}
    return {**SETTINGS, **own, **DRAFTERS.get(drafter, {}), **more}


def step_counts(engine: Engine, case: str, batch: int) -> dict[str, int]:
    """One step's counts, of requests that all decode."""
    grammar, sampling = CASES[case]
    asked = {**sampling, "max_tokens": 60, "complete": False, "ignore_eos": True}
    handles = [engine.submit(f"abc {n}", grammar, asked) for n in range(batch)]
    operations = Operations()
    try:
        for _ in range(STEPS_BEFORE):
            engine.step()
        uploaded = 0
        upload = Staging.upload

        def noted(staging: Staging, numbers: Any, *rest: Any) -> Tensor:
            nonlocal uploaded
            uploaded += numbers.nbytes
            return upload(staging, numbers, *rest)

        with patch.object(Staging, "upload", noted), operations.replaying(), operations:
            engine.step()
    finally:
        engine.release(handles)
        while engine.step():
            pass
    return {**operations.figures(), "uploaded_bytes": uploaded}


def answer_texts(engine: Engine) -> dict[str, int]:
    """Answer what can be answered in one way alone."""
    grammars = [Grammar.choice([text]) for text in TEXTS]
    steps = engine.figures.steps
    outputs = engine.generate(
        ["Repeat."] * len(TEXTS), grammars, {"max_tokens": 96, "complete": False}
    )
    assert [output.text for output in outputs] == list(TEXTS)
    verifies = sum(output.stats.verifies for output in outputs)
    return {"steps": engine.figures.steps - steps, "verifies": verifies}


def text_counts(drafter: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The record's ``text`` and ``recordings`` of a drafter."""
    found: dict[str, Any] = {"calls": {}}
    recordings: dict[str, int] = {}
    for backend in BACKENDS:
        with Engine(**settings_of(drafter, grammar_backend=backend)) as engine:
            while engine.prepare_next():
                pass
            ready = engine.core.worker.recordings.count
            with calls_counted(list(_subclasses(Matcher)), *MATCHER_CALLS) as calls:
                found |= answer_texts(engine)
            found["calls"][backend] = dict(sorted(calls.items()))
            recordings = {"ready": ready, "after": engine.core.worker.recordings.count}
    return found, recordings


def _subclasses(base: type) -> Iterator[type]:
    found: list[type] = base.__subclasses__()
    for one in found:
        yield one
        yield from _subclasses(one)


def wait_counts(overlap: str) -> dict[str, int]:
    """How often the texts made the host and the streams wait."""
    with (
        Engine(**settings_of("grammar", overlap)) as engine,
        calls_counted(list(_subclasses(Event)), "synchronize") as host,
        calls_counted(list(_subclasses(Stream)), "wait") as streams,
    ):
        answer_texts(engine)
        return {"host": host["synchronize"], "streams": streams["wait"]}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The command line; returns the record."""
    run = Run("counts", flags("counts", "Costs in counts.").parse_args(arguments), arguments)
    torch.set_num_threads(1)
    step: dict[str, dict[str, int]] = {}
    with Engine(**settings_of("chain", num_steps=3)) as engine:
        for case in CASES:
            for batch in BATCHES:
                step[f"{case}, batch {batch}"] = step_counts(engine, case, batch)
    text, recordings = {}, {}
    for drafter in DRAFTERS:
        text[drafter], recordings[drafter] = text_counts(drafter)
    waits = {overlap: wait_counts(overlap) for overlap in MODES}
    return run.finish(1, step=step, text=text, waits=waits, recordings=recordings)


if __name__ == "__main__":
    main()
