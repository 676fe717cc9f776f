"""The contract of streams and events, on every kind that this machine has."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overlap_spec.worker.cuda import CudaStreams
from overlap_spec.worker.streams import (
    CpuStreams,
    InlineStreams,
    Streams,
    ThreadStream,
    Value,
    get_pass_threads,
)
from tests.support.streams import ChaosStream, ThreadStreams

KINDS = ["inline", "threads", "cpu", "chaos", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    kind = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made: Streams
    if kind == "inline":
        made = InlineStreams()
    elif kind == "threads":
        made = ThreadStreams(ThreadStream)
    elif kind == "cpu":
        made = CpuStreams()
    elif kind == "chaos":
        made = ThreadStreams(lambda name: ChaosStream(name, seed=3))
    else:
        made = CudaStreams(torch.device("cuda"), lambda *_: None)
    yield made
    made.close()


def test_waiting_on_an_event_that_was_never_recorded_raises(streams: Streams) -> None:
    event = streams.event()
    with pytest.raises(RuntimeError, match="never recorded"):
        streams.compute.wait(event)
    with pytest.raises(RuntimeError, match="never recorded"):
        event.synchronize()


def test_work_runs_in_order_and_values_arrive(streams: Streams) -> None:
    seen: list[int] = []

    def add(last: Value[int] | None) -> int:
        seen.append(last.get() if last is not None else 0)
        return seen[-1] + 1

    value = streams.compute.run("first", add, None)
    for _ in range(5):
        value = streams.compute.run("next", add, value)
    event = streams.event()
    streams.compute.record(event)
    event.synchronize()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert value.get() == 6


def test_an_event_orders_two_streams(streams: Streams) -> None:
    for _ in range(10):
        box: list[int] = []
        event, done = streams.event(), streams.event()
        streams.compute.run("slow", lambda box=box: (time.sleep(0.003), box.append(1)))
        streams.compute.record(event)
        streams.copy.wait(event)
        length = streams.copy.run("read", lambda box=box: len(box))
        streams.copy.record(done)
        done.synchronize()
        assert length.get() == 1
        assert event.elapsed_ms(done) >= 0
        assert done.elapsed_ms(event) <= 0


def test_a_wait_captures_the_latest_record_at_its_call() -> None:
    made = ThreadStreams(ThreadStream)
    gate, event, done = threading.Event(), made.event(), made.event()
    made.compute.record(event)
    made.copy.wait(event)
    made.copy.record(done)
    made.compute.run("blocked", gate.wait)
    made.compute.record(event)
    # The second record is blocked; the wait that came before it is not.
    done.synchronize()
    gate.set()
    event.synchronize()
    made.close()


def test_an_error_reaches_the_host_through_every_stream_behind_it() -> None:
    made = ThreadStreams(ThreadStream)
    event, done, ran = made.event(), made.event(), []

    def broken() -> None:
        raise ValueError("broken work")

    made.compute.run("broken", broken)
    made.compute.run("skipped", ran.append, 1)
    made.compute.record(event)
    made.copy.wait(event)
    made.copy.run("skipped", ran.append, 2)
    made.copy.record(done)
    with pytest.raises(ValueError, match="broken work"):
        done.synchronize()
    assert ran == []
    made.close()


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_what_is_run_has_threads_of_its_own(kind: str) -> None:
    """From the first product on, whatever the caller and other threads are told meanwhile."""
    before = torch.get_num_threads()
    try:
        for own, caller in ((2, 1), (1, 2)):
            torch.set_num_threads(caller)
            made: Streams
            if kind == "inline":
                made = InlineStreams(threads=own)
            else:
                made = ThreadStreams(lambda name, n=own: ThreadStream(name, threads=n))  # type: ignore[misc]
            assert torch.get_num_threads() == caller
            torch.set_num_threads(caller)
            passed = made.event()
            # Large enough for a team, which is when torch looks the number up.
            product = made.compute.run("add", torch.randn(1 << 17).add, 1)
            count = made.compute.run("count", get_pass_threads)
            made.compute.record(passed)
            passed.synchronize()
            assert product.get().shape == (1 << 17,)
            assert count.get() == own
            assert torch.get_num_threads() == caller
            found: list[int] = []
            fresh = threading.Thread(target=lambda f=found: f.append(torch.get_num_threads()))  # type: ignore[misc]
            fresh.start()
            fresh.join()
            assert found == [caller]
            made.close()
            assert torch.get_num_threads() == caller
    finally:
        torch.set_num_threads(before)


def test_close_leaves_no_thread() -> None:
    # Threads of earlier tests may still be ending: only new ones count.
    before = set(threading.enumerate())

    def new() -> int:
        return len(set(threading.enumerate()) - before)

    made = ThreadStreams(ThreadStream)
    assert new() == 4
    made.close()
    assert new() == 0
    for prefill, threads in ((True, 2), (False, 1)):
        few = CpuStreams(prefill=prefill)
        assert new() == threads
        assert (few.prefill is few.compute) is not prefill
        few.close()
        assert new() == 0


def test_short_work_is_done_where_it_is_handed_over_or_by_compute() -> None:
    spans: list[tuple[str, str, int]] = []
    made = CpuStreams(lambda lane, name, *times: spans.append((lane, name, times[-1])))
    made.begin(7)
    packed = made.plan.run("upload", threading.get_ident)
    assert packed.get() == threading.get_ident()
    first = made.compute.run("draft", threading.get_ident)
    ready, done = made.event(), made.event()
    made.compute.record(ready)
    made.copy.wait(ready)
    copied = made.copy.run("tree", threading.get_ident)
    made.copy.record(done)
    done.synchronize()
    made.close()
    assert first.get() == copied.get() != threading.get_ident()
    assert spans == [("plan", "upload", 7), ("compute", "draft", 7), ("copy", "tree", 7)]


def test_a_reset_event_was_never_recorded(streams: Streams) -> None:
    event = streams.event()
    streams.compute.record(event)
    event.synchronize()
    event.reset()
    with pytest.raises(RuntimeError, match="never recorded"):
        event.synchronize()


@pytest.mark.clock
def test_idle_time_is_what_no_work_filled(streams: Streams) -> None:
    if isinstance(streams.compute, ChaosStream):
        pytest.skip("its delays are idle time too")
    first, second, third = (streams.event() for _ in range(3))
    streams.compute.record(first)
    first.synchronize()
    time.sleep(0.02)
    streams.compute.run("work", time.sleep, 0.01)
    streams.compute.record(second)
    second.synchronize()
    streams.compute.run("work", time.sleep, 0.01)
    streams.compute.record(third)
    third.synchronize()
    assert 20 <= first.idle_ms(second) <= first.elapsed_ms(second) - 9
    assert second.idle_ms(third) < second.elapsed_ms(third) - 9
    assert second.idle_ms(second) == 0
