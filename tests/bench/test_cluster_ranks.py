"""What `bench.cluster_ranks` reads from a timeline."""

from __future__ import annotations

from bench.cluster_ranks import waits
from overlap_spec.timeline import Span

MS = 1_000_000


def step(number: int, sent: float, taken: float, verified: float) -> list[Span]:
    """A step of 100 ms, whose verify takes from 10 ms to ``verified`` on rank 1."""

    def span(lane: str, name: str, start_ms: float, end_ms: float) -> Span:
        times = [int((100 * number + each) * MS) for each in (start_ms, end_ms)]
        return Span(lane, name, times[0], times[1], number, {})

    return [
        span("tell", "decision", sent, taken),
        span("rank 1 told", "decision", 5, taken),
        span("rank 1 compute", "verify", 10, verified),
    ]


def test_a_decision_is_exposed_from_the_end_of_the_verify_on() -> None:
    spans = step(0, 20, 21, 50) + step(1, 20, 21, 50) + step(2, 45, 53, 50) + step(3, 60, 62, 50)
    # Its verify was dropped before it ran.
    spans += step(4, 20, 21, 50)[:2]
    found = waits(spans)
    # The first one has no step before it; what rank 0 had not sent yet is no broadcast's time.
    assert [each["exposed_ms"] for each in found] == [0.0, 3.0, 2.0]
    assert [each["decision_ms"] for each in found] == [1.0, 8.0, 2.0]
    assert [each["verify_ms"] for each in found] == [40.0, 40.0, 40.0]
    assert [each["step_ms"] for each in found] == [100.0, 132.0, 109.0]
