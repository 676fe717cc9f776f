"""The router as Ray Serve calls it, with replicas that only have a name."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_spec.cluster.calls import HttpCall

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
from overlap_spec.cluster.router import Router

pytestmark = pytest.mark.ci
NAMES = ("a", "b", "c")


class Lengths:
    """Queue lengths that replicas have told."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}

    def get(self, replica_id: Any) -> int | None:
        return self.told.get(replica_id.unique_id)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router whose base does nothing: what is tested is what this class adds."""
    base = ("on_send_request", "on_request_routed", "on_request_completed", "update_replicas")
    for name in base:
        monkeypatch.setattr(Router.__mro__[1], name, lambda *_: None)
    made: Any = Router.__new__(Router)
    made._replica_queue_len_cache = Lengths()
    made.initialize_state("prefix", slack=2)
    return made


def replica(name: str, **stats: int) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(**fields: Any) -> Any:
    call = HttpCall({}, **fields)
    return SimpleNamespace(args=[call], routing_context=SimpleNamespace(should_backoff=False))


def chosen(router: Any, request: Any, names: tuple[str, ...] = NAMES) -> list[str]:
    ranks = asyncio.run(router.choose_replicas([replica(name) for name in names], request))
    assert all(len(rank) == 1 for rank in ranks)
    assert request is None or request.routing_context.should_backoff
    return [rank[0].replica_id.unique_id for rank in ranks]


def test_a_prompt_goes_where_its_prefix_went(router: Any) -> None:
    first = chosen(router, pending(blocks=(1, 2)))
    assert sorted(first) == list(NAMES)
    for _ in range(3):
        assert chosen(router, pending(blocks=(1, 2, 9)))[0] == first[0]
    # Another replica took it: it is known there too.
    other = first[1]
    router.on_request_routed(pending(blocks=(5, 6, 7)), SimpleNamespace(unique_id=other), None)
    assert chosen(router, pending(blocks=(5, 6, 7)))[0] == other


def test_open_requests_are_counted_and_outweigh_a_prefix(router: Any) -> None:
    best = chosen(router, pending(blocks=(1,)))[0]
    name = SimpleNamespace(unique_id=best)
    for _ in range(3):
        router.on_send_request(name)
    assert chosen(router, pending(blocks=(1,)))[0] != best
    for _ in range(5):
        router.on_request_completed(name, "request")
    router.on_send_request(name)
    assert router._open[best] == 1
    # What replicas tell counts too: other fronts send them requests.
    quiet = next(n for n in NAMES if n != best)
    router._replica_queue_len_cache.told = {n: 9 for n in NAMES if n != quiet}
    assert chosen(router, pending(blocks=(8,)))[0] == quiet


def test_a_replica_that_failed_is_the_last_choice(router: Any) -> None:
    best = chosen(router, pending(blocks=(1,)))[0]
    assert chosen(router, pending(blocks=(1,), avoid=frozenset({best})))[-1] == best


def test_replicas_that_are_gone_are_forgotten(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router.__mro__[1], "update_replicas", lambda *_: None)
    best = chosen(router, pending(blocks=(1,)))[0]
    router.on_send_request(SimpleNamespace(unique_id=best))
    left = tuple(name for name in NAMES if name != best)
    router.update_replicas([replica(name) for name in left])
    assert best not in router._open
    assert set(chosen(router, pending(blocks=(1,)), left)) == set(left)
    assert chosen(router, pending(blocks=(1,)), ()) == []


def test_the_other_ways(router: Any) -> None:
    router.initialize_state("round-robin", slack=1)
    assert [chosen(router, pending(blocks=(1,)))[0] for _ in range(5)] == ["a", "b", "c", "a", "b"]
    router.initialize_state("load", slack=1)
    router._replica_queue_len_cache.told = {"a": 3, "b": 2, "c": 0}
    assert chosen(router, pending(blocks=(1,))) == ["c", "b", "a"]
    assert chosen(router, None) == ["c", "b", "a"]


def test_what_a_replica_tells_of_its_cache_bounds_what_it_is_known_for(router: Any) -> None:
    router.update_replicas([replica("a"), replica("b")])
    name = SimpleNamespace(unique_id="a")
    router.on_request_routed(pending(blocks=(1, 2, 3)), name, None)
    assert router.prefixes.matched("a", (1, 2, 3)) == 3
    router.update_replicas([replica("a", blocks=2), replica("b")])
    assert router.prefixes.matched("a", (1, 2, 3)) == 2
    router.update_replicas([replica("b")])
    assert router.prefixes.matched("a", (1, 2, 3)) == 0
