"""The whole engine on interpreted Triton kernels beside the same on torch's, in a process whose
Triton interprets."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels.dispatch import use
from overlap_spec.types import Output
from overlap_spec.worker import build as build_module
from overlap_spec.worker.phases import Phases
from tests.support.kernel_harness import poisoned
from tests.support.kernel_memory import LAUNCHED

# Prompts of one page and of several, which share their beginning.
PROMPTS = ["abc", "abcabc 01", "abcabc 01 hello there", "q"]
PATTERN = Grammar.regex(r"[a-f]{3}-\d{1,4}")
CHOICE = Grammar.choice(["alpha", "beta", "alphabet"])
# A request's grammar and sampling.
ASKED: list[tuple[Grammar | None, dict[str, Any]]] = [
    (None, {"temperature": 0.0, "logprobs": 2}),
    (PATTERN, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01}),
    (CHOICE, {"temperature": 0.0, "logprobs": 2}),
    (None, {"temperature": 0.7, "seed": 9, "presence_penalty": 1.0, "logit_bias": {5: 2.0}}),
]
SETTINGS: dict[str, Any] = {
    "context_length": 96,
    "max_running_requests": 4,
    "max_total_tokens": 400,
    "page_size": 4,
    "mask_deadline_ms": None,
    "lane_threads": 0,
    "adaptive": "static",
}
Said = tuple[tuple[int, ...], str | None, tuple[tuple[float, ...], ...]]


def answers(
    kernels: str, settings: dict[str, Any], requests: int, max_tokens: int, held: bool = False
) -> list[Said]:
    """What an engine says on ``kernels`` (``triton`` or ``reference``): each request's tokens, its
    error, and of each token the log-probabilities of the best two, where they are asked for.

    Args:
        requests: Of :data:`ASKED`.
        held: With recordings that have a CUDA graph's manners.
    """
    with ExitStack() as stack:
        stack.enter_context(use(kernels))
        stack.enter_context(poisoned())
        # Weights that are packed for the CPU would pass kernels by.
        stack.enter_context(patch.object(build_module, "pack", lambda _: None))
        if held:
            from tests.support.held_graphs import all_columns, held_graphs

            stack.enter_context(patch.object(build_module, "recordings_of", held_graphs))
            stack.enter_context(patch.object(Phases, "_visible", all_columns))
        engine = stack.enter_context(Engine(**{**SETTINGS, "graphs": held, **settings}))
        exempt(engine)
        stack.callback(LAUNCHED.forget)
        asked = ASKED[:requests]
        samplings = [{**sampling, "max_tokens": max_tokens} for _, sampling in asked]
        outputs = engine.generate(PROMPTS[:requests], [g for g, _ in asked], samplings)
        return [said(output) for output in outputs]


def said(output: Output) -> Said:
    best = tuple(tuple(p for _, p in token.top[:2]) for token in output.logprobs)
    return output.token_ids, None if output.error is None else str(output.error), best


def exempt(engine: Engine) -> None:
    """Padding's memory, where any of several writes may win: page 0."""
    runner = engine.core.worker.runner
    for pool in (runner.pool, *runner.draft_pools):
        for cache in (pool.k, pool.v):
            LAUNCHED.exempt(cache[:, 0])


def launches() -> int:
    """Kernels that have been launched and checked in this process."""
    return LAUNCHED.launches
