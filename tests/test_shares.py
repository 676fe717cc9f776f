"""Who gets how much of what is shared, and whose turn it is."""

import asyncio

import pytest

from overlap_spec.shares import FairQueue, Lane, Shares


def test_one_alone_may_have_all() -> None:
    shares = Shares(10)
    shares.add("a", 10)
    assert not shares.has_room("a")


def test_one_within_its_part_waits_for_nobody() -> None:
    shares = Shares(10)
    shares.add("a", 10)
    for _ in range(5):
        assert shares.has_room("b")
        shares.add("b")
    assert not shares.has_room("b")
    assert shares.has_room("c", 3)
    assert not shares.has_room("c", 4)
    shares.add("b", -5)
    shares.add("a", -10)
    assert (shares.total, dict(shares.held)) == (0, {})


def test_all_together_have_at_most_twice_as_much() -> None:
    shares = Shares(8)
    for number in range(1000):
        while shares.has_room(str(number)):
            shares.add(str(number))
    assert 8 < shares.total <= 16


def test_holders_take_turns_and_keep_their_order() -> None:
    queue = FairQueue[str](lambda item: item[0])
    for item in ("a1", "a2", "a3", "b1"):
        queue.append(item)
    assert [queue.popleft() for _ in range(2)] == ["a1", "b1"]
    # One that comes back has had its turn.
    queue.append("b2")
    assert [queue.popleft() for _ in range(2)] == ["a2", "b2"]
    queue.append("c1")
    assert [*queue.line()] == ["c1"]
    assert [queue.popleft() for _ in range(2)] == ["c1", "a3"]
    assert (len(queue), queue.line()) == (0, ())
    with pytest.raises(IndexError):
        queue.popleft()


def test_who_may_not_have_a_turn_holds_up_nobody() -> None:
    queue = FairQueue[str](lambda item: item[0])
    for item in ("a1", "b1"):
        queue.append(item)
    assert [*queue.line(lambda holder: holder != "a")] == ["b1"]


def test_a_rank_orders_the_line_of_one_holder() -> None:
    queue = FairQueue[tuple[str, int]](lambda item: item[0], lambda item: item[1])
    for item in (("a", 3), ("a", 1), ("b", 9), ("a", 2)):
        queue.append(item)
    queue.remove(("a", 3))
    assert [queue.popleft() for _ in range(3)] == [("a", 1), ("b", 9), ("a", 2)]


async def _queued() -> tuple[list[str], list[bool]]:
    lane, order = Lane(1, 2), list[str]()

    async def one(holder: str, kind: str) -> bool:
        if not await lane.take(holder, kind):
            return False
        order.append(holder)
        await asyncio.sleep(0)
        lane.give(holder)
        return True

    # One has the place, two wait and a third may not; what is of another kind waits apart.
    asks = [("a", "x"), ("a", "x"), ("a", "x"), ("a", "x"), ("a", "y")]
    tasks = [asyncio.create_task(one(*ask)) for ask in asks]
    await asyncio.sleep(0)
    tasks[1].cancel()
    served = [task for task in tasks if not task.cancelling()]
    done = list(await asyncio.gather(*served))
    assert (lane.busy.total, len(lane)) == (0, 0)
    return order, done


def test_a_lane_is_bounded_and_what_leaves_it_takes_no_place() -> None:
    assert asyncio.run(_queued()) == (["a"] * 3, [True, True, False, True])
