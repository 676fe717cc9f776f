"""What the router knows of prompts, without Ray."""

import json
from random import Random

import pytest

from overlap_spec.cluster.prefixes import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    SAMPLE,
    USUAL_BLOCKS,
    PrefixMap,
    blocks_of,
    capacity_of,
    prompt_bytes,
)

SYSTEM = {"role": "system", "content": "You are a careful clerk. " * 20}


def chat(*turns: str, **more: object) -> bytes:
    messages = [SYSTEM, *({"role": "user", "content": turn} for turn in turns)]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def blocks(body: bytes) -> tuple[int, ...]:
    return blocks_of(prompt_bytes(body))


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def test_blocks_agree_as_far_as_prompts_do() -> None:
    first, second = blocks(chat("Who is Ada?" * 30)), blocks(chat("Where is Rome?" * 30))
    # The system text is 500 bytes, and what is around it some dozens.
    assert 500 // BLOCK_BYTES <= shared(first, second) < len(first)
    # A conversation that goes on begins with what it was.
    longer = blocks(chat("Who is Ada?" * 30, "And then?"))
    assert shared(first, longer) >= len(first) - 1


def test_what_is_no_prompt_does_not_count() -> None:
    plain = blocks(chat("Who?"))
    assert blocks(chat("Who?", temperature=1.0, max_tokens=7, stream=True)) == plain
    for changed in ({"cache_salt": "mine"}, {"tools": [{"type": "function"}]}):
        assert shared(blocks(chat("Who?", **changed)), plain) == 0


def test_a_block_holds_all_before_it() -> None:
    text = bytes(range(256)) * 2
    moved = b"x" + text[1:]
    assert not set(blocks_of(text)) & set(blocks_of(moved))
    assert blocks_of(text)[:3] == blocks_of(text[: 3 * BLOCK_BYTES + 5])


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_body_that_is_no_object_has_no_blocks(body: bytes) -> None:
    assert blocks(body) == ()


def test_long_prompts_are_looked_at_up_to_a_bound() -> None:
    assert len(blocks_of(b"a" * BLOCK_BYTES * (MOST_BLOCKS + 9))) == MOST_BLOCKS
    # Four bytes a token, then two; a quarter of the cache is for answers.
    assert capacity_of(1600, len(SAMPLE) // 4) == pytest.approx(75, abs=1)
    assert capacity_of(1600, len(SAMPLE) // 2) == pytest.approx(37, abs=1)
    assert USUAL_BLOCKS > MOST_BLOCKS


def test_the_longest_prefix_wins_and_load_breaks_ties() -> None:
    known = PrefixMap(capacity=100, slack=2)
    known.insert("a", (1, 2, 3))
    known.insert("b", (1, 2))
    idle = {"a": 0, "b": 0, "c": 0}
    ranked = known.rank((1, 2, 3, 4), idle)
    assert [(choice.replica, choice.matched) for choice in ranked] == [("a", 3), ("b", 2), ("c", 0)]
    assert known.rank((9,), {"a": 1, "b": 0, "c": 2})[0].replica == "b"
    # Within the slack a prefix is worth more than a shorter queue, and past it is not.
    assert known.rank((1, 2, 3), {"a": 2, "b": 0, "c": 0})[0].replica == "a"
    assert known.rank((1, 2, 3), {"a": 3, "b": 0, "c": 0})[0].replica == "b"
    assert known.rank((1, 2, 3), {"a": 3, "b": 0, "c": 0})[-1].replica == "a"
    assert known.rank((1,), {}) == []


def test_two_routers_send_a_new_prompt_alike_and_prompts_evenly() -> None:
    names = [f"replica {i}" for i in range(8)]
    loads = dict.fromkeys(names, 0)
    one, other = PrefixMap(10, 2), PrefixMap(10, 2)
    counts = dict.fromkeys(names, 0)
    for block in range(4000):
        best = one.rank((block,), loads)[0].replica
        assert other.rank((block,), dict(reversed(loads.items())))[0].replica == best
        counts[best] += 1
    # Binomial, 500 ± 21: 6 deviations.
    assert all(abs(count - 500) < 126 for count in counts.values())


def test_routers_without_a_prompt_to_go_by_do_not_agree() -> None:
    idle = dict.fromkeys((f"replica {i}" for i in range(4)), 0)
    chosen = [PrefixMap(10, 2, seed).rank((), idle)[0].replica for seed in range(64)]
    assert all(chosen.count(name) < 40 for name in idle)


def test_new_prompts_go_where_there_is_room() -> None:
    known, idle = PrefixMap(capacity=80, slack=2), {"a": 0, "b": 0}
    for prompt in range(8):
        blocks = tuple(range(prompt * 10, prompt * 10 + 10))
        known.insert(known.rank(blocks, idle)[0].replica, blocks)
    held = [known.matched(name, (p * 10,)) for name in idle for p in range(8)]
    assert sum(held[:8]) == sum(held[8:]) == 4


def test_a_replicas_blocks_are_bounded_and_its_beginnings_last() -> None:
    known = PrefixMap(capacity=4, slack=2)
    known.insert("a", (1, 2, 3))
    known.insert("a", (1, 7, 8))
    # 3 was the end of what was used longest ago.
    assert known.matched("a", (1, 2, 3)) in (1, 2)
    assert known.matched("a", (1, 7, 8)) == 3
    known.insert("a", (20, 21, 22, 23, 24))
    assert known.matched("a", (20, 21, 22, 23, 24)) == 4
    known.keep({"b": None})
    assert known.matched("a", (20,)) == 0


def test_a_replica_that_tells_what_it_holds_is_known_for_no_more() -> None:
    known = PrefixMap(capacity=100, slack=2)
    known.insert("a", (1, 2, 3, 4))
    known.insert("a", (7, 8))
    known.keep({"a": 3, "b": None})
    # At once, the longest ago first; the one that has not told keeps as many as before.
    assert known.matched("a", (1, 2, 3, 4)) == 1
    assert known.matched("a", (7, 8)) == 2
    known.insert("a", (10, 11, 12, 13))
    assert known.matched("a", (10, 11, 12, 13)) == 3
    known.insert("b", (10, 11, 12, 13))
    assert known.matched("b", (10, 11, 12, 13)) == 4
    # It is as full as it can be: a new prompt goes to the other one.
    assert known.rank((50,), {"a": 0, "b": 0})[0].replica == "b"


def test_matched_never_exceeds_what_was_inserted() -> None:
    rng = Random(3)
    known, sent = PrefixMap(capacity=64, slack=2), set[tuple[int, ...]]()
    for _ in range(500):
        text = bytes(rng.choice(b"ab") for _ in range(BLOCK_BYTES // 8)) * rng.randint(1, 40)
        found = blocks_of(text)
        matched = known.matched("a", found)
        best = max((shared(found, before) for before in sent), default=0)
        assert matched <= best
        known.insert("a", found)
        assert known.matched("a", found) == min(len(found), 64)
        sent.add(found)
