"""What law 8 is shown on: greedy requests, half of them under schemas."""

from overlap_spec.grammar.spec import Grammar
from overlap_spec.load.asks import OWN_SCHEMAS, mixed_asks, read_samples
from overlap_spec.types import SamplingParams

GREEDY = SamplingParams(max_tokens=48, temperature=0.0, complete=False)


def work(count: int) -> list[tuple[str, Grammar | None]]:
    """So many requests, every other one under a schema, no two with the same prompt."""
    asks = mixed_asks(read_samples(OWN_SCHEMAS), count, GREEDY.max_tokens or 0)
    return [(f"{number}. {ask.prompt}", ask.grammar) for number, ask in enumerate(asks)]
