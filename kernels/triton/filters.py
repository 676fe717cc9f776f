"""Top-k, top-p and min-p of one row by one program, without a sort.

All three keep the head of a row's ranking by (probability descending, id ascending). Its end is a
logit's key, found by bisection, and how many of the tokens that have it are kept, the first ones.

A ``line`` is a row as these see it: where its logits and its chunks' maxima start, its length, its
best logit, its temperature, and the number of its chunks, 0 where nothing is to be drawn. ``LOW``
bits of a key are never set in the logits' type.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs
# A kernel's arguments are pointers and numbers, typed by Triton; its constants are upper case.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(value, LOW: tl.constexpr):
    """An int32 that orders as float32 does, less ``LOW`` last bits."""
    # The sum makes one of both zeros.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW


@triton.jit
def value_of(key, LOW: tl.constexpr):
    """The float32 that has the key, an integer of any width."""
    bits = key.to(tl.int32) << LOW
    bits = tl.where(bits < 0, (bits ^ 0x7FFFFFFF) & -(1 << LOW), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _read(line, chunk, SIZE: tl.constexpr):
    """A chunk's logits and weights; the best logit's weight is 1."""
    start, _, vocab, best, heat, _ = line
    token = chunk * SIZE + tl.arange(0, SIZE)
    value = tl.load(start + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return value, tl.exp((value - best) / heat)


@triton.jit
def _reached(line, first, second, third, WEIGHED: tl.constexpr, SIZE: tl.constexpr):
    """How many logits are at least each of three ascending values, or what they weigh."""
    _, peaks, _, _, _, chunks = line
    a = tl.zeros([SIZE], tl.float32)
    b = tl.zeros([SIZE], tl.float32)
    c = tl.zeros([SIZE], tl.float32)
    for chunk in range(chunks):
        # Most chunks soon hold nothing so high, and are not read again.
        if tl.load(peaks + chunk) >= first:
            value, weight = _read(line, chunk, SIZE)
            size = weight if WEIGHED else 1.0
            a += tl.where(value >= first, size, 0.0)
            b += tl.where(value >= second, size, 0.0)
            c += tl.where(value >= third, size, 0.0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _end(line, goal, low, high, WEIGHED: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr):
    """The highest key in ``[low, high)`` down to which logits reach the goal, ``low`` if none.

    And what those above it reach. A round settles two bits, and no rounding misleads it: sums in
    one order never rise where a higher key drops terms.
    """
    above = 0.0
    while high - low > 1:
        gap = high - low
        x, y, z = low + tl.maximum(gap // 4, 1), low + gap // 2, low + gap * 3 // 4
        a, b, c = _reached(
            line, value_of(x, LOW), value_of(y, LOW), value_of(z, LOW), WEIGHED, SIZE
        )
        a_does, b_does, c_does = a >= goal, b >= goal, c >= goal
        above = tl.where(a_does, tl.where(b_does, tl.where(c_does, above, c), b), a)
        high = tl.where(a_does, tl.where(b_does, tl.where(c_does, high, z), y), x)
        low = tl.where(c_does, z, tl.where(b_does, y, tl.where(a_does, x, low)))
    return low, above


@triton.jit
def cut_of(line, top_k, top_p, LOW: tl.constexpr, SIZE: tl.constexpr):
    """Where top-k and top-p end the ranking.

    Returns the last logit kept and its weight. Of the tokens that have it those are kept whose rank
    among them is below the third value, and times the weight below the fourth.
    """
    _, _, vocab, best, heat, chunks = line
    least = key_of(tl.full((), -float("inf"), tl.float32), LOW).to(tl.int64)
    most = tl.where(chunks > 0, key_of(best, LOW).to(tl.int64) + 1, least)
    count = top_k.to(tl.float32)
    # Where a filter is off its range is empty, and nothing is searched.
    high = tl.where(top_k < vocab, most, least)
    last, above = _end(line, count, least, high, False, LOW, SIZE)
    ties = count - above
    better = value_of(last + 1, LOW)
    mass, _, _ = _reached(line, better, better, better, True, SIZE)
    mass += ties * tl.exp((value_of(last, LOW) - best) / heat)
    goal = top_p * mass
    key, above = _end(line, goal, last, tl.where(goal <= mass, most, last), True, LOW, SIZE)
    ties = tl.where(key == last, ties, float("inf"))
    value = value_of(key, LOW)
    return value, tl.exp((value - best) / heat), ties, goal - above


@triton.jit
def kept(line, cut, min_p, chunk, before, SIZE: tl.constexpr):
    """Weights of a chunk's tokens, 0 where they are dropped; and how many have the last logit kept.

    ``before``: how many in the chunks before have it.
    """
    last, weight_of_last, ties, room = cut
    value, weight = _read(line, chunk, SIZE)
    tie = (value == last).to(tl.float32)
    rank = before + tl.cumsum(tie, 0) - tie
    keep = (value > last) | ((value == last) & (rank < ties) & (rank * weight_of_last < room))
    return tl.where(keep & (weight >= min_p), weight, 0.0), tl.sum(tie, 0)
