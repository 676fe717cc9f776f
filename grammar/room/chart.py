"""Places in a grammar's texts, and the shortest rest behind each: an Earley recogniser over bytes.

A place is a set of positions in rules, each with the place where its rule began; equal sets are one
place, so what is known of a place is known wherever a text comes to it. Behind each place stands
one fixed shortest rest: of the bytes that lead on in fewest bytes, the first. What follows its
first byte is the fixed rest of the place there. So the fewest tokens that spell it never grow by
more than a token is worth: who follows them comes to the end.

J. Earley, "An efficient context-free parsing algorithm", 1970; nullable rules as in J. Aycock and
R. N. Horspool, "Practical Earley parsing", 2002.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.room.rules import ENDLESS, RoomRules
from overlap_spec.grammar.room.trie import TokenTrie

# Positions of a place; one with more is not followed: as if no text went on there.
MOST_ITEMS = 4000
# What counting the fewest tokens exactly may take: places, and nodes of the tree of tokens that are
# looked at for them all.
EXACT_PLACES, EXACT_NODES = 400, 100_000
# Bytes of what tokens can do at places that are kept, by chart.
STEP_BYTES = 16 * 2**20
UNKNOWN, NOWHERE = -2, -1
# Tokens of a step that are kept in the order of what they need.
NEAR_TOKENS = 2048
# How often the rules that wait at a place are looked at, to see how long their rests are at most.
MOST_ROUNDS = 8


class Place:
    """A place in the texts of a grammar.

    Attributes:
        number: Its number in its chart.
        rest: Bytes of the shortest rest; 0: the text may end here.
        byte: The first of these.
        most: Bytes of the longest of the shortest rests of the ways in which the text may be read.
        tokens: What `Chart.tokens` tells, -1 until it is asked for.
        ahead: The first bytes of that rest, as many as a token can have.
    """

    __slots__ = (
        "ahead",
        "byte",
        "most",
        "most_returns",
        "moves",
        "number",
        "rest",
        "returns",
        "scans",
        "step",
        "tokens",
        "waiting",
    )

    def __init__(self, number: int) -> None:
        self.number, self.rest, self.byte, self.tokens = number, ENDLESS, -1, -1
        self.ahead: bytes | None = None
        self.waiting: dict[int, list[tuple[int, Place]]] = {}
        self.returns: dict[int, int] = {}
        self.most_returns: dict[int, int] = {}
        self.most = 0
        self.scans: list[tuple[int, int, int, Place]] = []
        self.moves: dict[int, Place | None] = {}
        self.step: Step | None = None


class Step:
    """What one token can do at a place.

    Attributes:
        places: The places that tokens lead to, by their numbers here.
        after: int32 `(size,)`: of each token, the number of the place behind it; -1: none.
        longest: The longest of their rests, in bytes.
    """

    def __init__(self, places: list[Place], after: npt.NDArray[np.int32]) -> None:
        self.places, self.after = places, after
        self.longest = max((place.rest for place in places), default=0)
        self._near: npt.NDArray[np.int64] | None = None

    def nearest(
        self, row: npt.NDArray[np.int32], needs: npt.NDArray[np.int64], count: int
    ) -> list[int]:
        """The tokens of a mask row behind which fewest are needed, of equal ones the first.

        Args:
            row: int32 `(words,)`, of tokens that lead to a place.
            needs: int64 `(places,)`: tokens that are enough behind each.
        """
        if self._near is None:
            away = np.append(needs, ENDLESS)[self.after]
            self._near = np.argsort(away, kind="stable")[:NEAR_TOKENS]
        for tokens in (self._near, None):
            if tokens is None:
                tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                tokens = tokens[np.argsort(needs[self.after[tokens]], kind="stable")]
            there = tokens[(row[tokens >> 5] >> (tokens & 31)) & 1 == 1][:count]
            if len(there) == count:
                break
        found: list[int] = there.tolist()
        return found


class _Rows(dict[int, list[tuple[int, ...]]]):
    """What leads on from each node, read when it is asked for.

    Args:
        part: int32 `(n, width)`, by the node in the first column, which is left out.
        nodes: How many there are.
    """

    def __init__(self, part: npt.NDArray[np.int32], nodes: int) -> None:
        super().__init__()
        self._part = part
        self._bounds: list[int] = np.searchsorted(part[:, 0], np.arange(nodes + 1)).tolist()

    def __missing__(self, node: int) -> list[tuple[int, ...]]:
        first, end = self._bounds[node : node + 2]
        found = self[node] = [tuple(row) for row in self._part[first:end, 1:].tolist()]
        return found


class Chart:
    """The places of a grammar that were come to so far; safe to share between threads.

    Args:
        rules: Of the grammar.
        trie: Of the vocabulary.

    Raises:
        GrammarError: the grammar is too large to be followed.
    """

    def __init__(self, rules: RoomRules, trie: TokenTrie) -> None:
        self.trie, self.lock = trie, threading.RLock()
        self._starts = rules.starts.tolist()
        self._ends = {node: rule for rule, node in enumerate(rules.ends.tolist())}
        self._rests: list[int] = rules.rests.tolist()
        self._nullable = [bool(flag) for flag in rules.nullable.tolist()]
        nodes = len(self._rests)
        self._edges, self._steps = _Rows(rules.edges, nodes), _Rows(rules.steps, nodes)
        self._calls = _Rows(rules.calls, nodes)
        self._rules_bytes = 8 * sum(part.nbytes for part in rules)
        self.places: list[Place] = []
        self._walked: deque[Place] = deque()
        self._settled = False
        self._known: dict[frozenset[tuple[int, int]], Place | None] = {}
        self.start = self._new()
        if not self._close(self.start, [(0, self.start)]):
            raise GrammarError(f"its start has over {MOST_ITEMS} positions in its rules")

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return self._rules_bytes + 2000 * len(self.places)

    def move(self, here: Place, byte: int) -> Place | None:
        """The place after one more byte; None if no text goes on with it, as far as is told."""
        found = here.moves.get(byte, self)
        if found is self:
            scanned = {(t, o) for low, high, t, o in here.scans if low <= byte <= high}
            found = here.moves[byte] = self._named(scanned) if scanned else None
        return found  # type: ignore[return-value]

    def after(self, here: Place, text: bytes) -> Place | None:
        """The place after more bytes; None if no text goes on with them."""
        found: Place | None = here
        with self.lock:
            for byte in text:
                if found is None:
                    return None
                found = self.move(found, byte)
        return found

    def tokens(self, here: Place) -> int:
        """Tokens that are enough to end a text at a place, ENDLESS if none are known to be: the
        fewest there are, of a grammar with few places; of another, the fewest that spell the fixed
        shortest rest."""
        with self.lock:
            if not self._settled:
                self._settled = True
                self._settle()
            if here.tokens < 0:
                self._count(here)
            return here.tokens

    def step(self, here: Place) -> Step:
        """What one token can do at a place."""
        with self.lock:
            found = here.step
            if found is None:
                found = here.step = self._walk(here)
                self._walked.append(here)
                if len(self._walked) * found.after.nbytes > STEP_BYTES:
                    self._walked.popleft().step = None
            return found

    def _settle(self) -> None:
        """Count the fewest tokens exactly: at the start and on the way from there, or, if the
        places that tokens lead to are few, at all of them."""
        most = min(EXACT_PLACES, EXACT_NODES // self.trie.nodes)
        found, parents = [self.start], {self.start.number: self.start}
        leads: list[list[Place]] = []
        end = None if self.start.rest else self.start
        for place in found:
            if len(leads) >= most:
                break
            leads.append(self._walk(place).places)
            for after in leads[-1]:
                if after.number not in parents:
                    parents[after.number] = place
                    found.append(after)
                    end = after if end is None and after.rest == 0 else end
        else:
            _relax(found, leads)
            return
        # Places are found in the order of how many tokens lead there.
        count = 0
        while end is not None:
            end.tokens, count = count, count + 1
            end = parents[end.number] if end is not self.start else None

    def _new(self) -> Place:
        self.places.append(Place(len(self.places)))
        return self.places[-1]

    def _named(self, scanned: set[tuple[int, Place]]) -> Place | None:
        name = frozenset([(node, origin.number) for node, origin in scanned])
        if name not in self._known:
            made = self._new()
            self._known[name] = made if self._close(made, list(scanned)) else None
        return self._known[name]

    def _close(self, here: Place, pending: list[tuple[int, Place]]) -> bool:
        """Predict and complete until there are no new positions; False if they are too many."""
        seen = {(node, origin.number) for node, origin in pending}
        edges, steps, calls = self._edges, self._steps, self._calls

        def add(node: int, origin: Place) -> None:
            key = node, origin.number
            if key not in seen:
                seen.add(key)
                pending.append((node, origin))

        while pending:
            node, origin = pending.pop()
            for low, high, target in edges[node]:
                here.scans.append((low, high, target, origin))
            for (target,) in steps[node]:
                add(target, origin)
            for rule, back in calls[node]:
                here.waiting.setdefault(rule, []).append((back, origin))
                add(self._starts[rule], here)
                if self._nullable[rule]:
                    add(back, origin)
            # A rule that ends where it began is nullable, and was skipped over above.
            ended = self._ends.get(node)
            if ended is None:
                continue
            if ended == 0 and origin is self.start:
                here.rest = 0
            if origin is not here:
                for back, outer in origin.waiting.get(ended, ()):
                    add(back, outer)
            if len(seen) > MOST_ITEMS:
                return False
        self._measure(here)
        return True

    def _measure(self, here: Place) -> None:
        """Find the shortest rest behind a place that is closed."""
        returns = here.returns
        if here is self.start:
            returns[0] = 0
        grown = True
        while grown:
            grown = False
            for rule, waiting in here.waiting.items():
                best = min(self._behind(back, outer) for back, outer in waiting)
                if best < returns.get(rule, ENDLESS):
                    returns[rule], grown = best, True
        self._measure_most(here)
        if here.rest == 0:
            return
        found = (ENDLESS, 0, 256)
        for low, high, target, origin in here.scans:
            rest = 1 + self._behind(target, origin)
            # Characters that are seen, before others.
            byte = max(low, 0x20) if high >= 0x20 else low
            found = min(found, (rest, int(byte < 0x20), byte))
        here.rest, _, here.byte = found

    def _measure_most(self, here: Place) -> None:
        """Find the longest of the rests behind the positions of a place."""
        returns = here.most_returns
        for _ in range(MOST_ROUNDS):
            grown = False
            for rule, waiting in here.waiting.items():
                most = max(self._most_behind(back, outer) for back, outer in waiting)
                if most > returns.get(rule, 0):
                    returns[rule], grown = most, True
            if not grown:
                break
        else:
            # Rules that begin with themselves wait for as many of them as one likes.
            here.most_returns = dict.fromkeys(here.waiting, ENDLESS)
        here.most = max((self._most_behind(t, o) for _, _, t, o in here.scans), default=0)

    def _most_behind(self, node: int, origin: Place) -> int:
        rule = bisect_right(self._starts, node) - 1
        return min(self._rests[node] + origin.most_returns.get(rule, 0), ENDLESS)

    def _behind(self, node: int, origin: Place) -> int:
        """Fewest bytes from a position to the end of the text."""
        rule = bisect_right(self._starts, node) - 1
        return min(self._rests[node] + origin.returns.get(rule, ENDLESS), ENDLESS)

    def _count(self, here: Place) -> None:
        """Count the tokens of the fixed rests of a place and of those on its way."""
        way, place = [], here
        while place.ahead is None:
            way.append(place)
            if place.rest == 0 or place.rest >= ENDLESS:
                place.tokens, place.ahead = place.rest, b""
                break
            after = self.move(place, place.byte)
            if after is None or after.rest != place.rest - 1:
                raise ValueError("the rests of a grammar's rules contradict each other")
            place = after
        for place in reversed(way):
            if place.rest == 0 or place.rest >= ENDLESS:
                continue
            after = place.moves[place.byte]
            assert after is not None
            assert after.ahead is not None
            place.ahead = bytes((place.byte, *after.ahead[: self.trie.longest - 1]))
            fewest = self._fewest(place, place.ahead)
            place.tokens = fewest if place.tokens < 0 else min(fewest, place.tokens)

    def _fewest(self, place: Place, ahead: bytes) -> int:
        best, there = ENDLESS, place
        known = self.trie.by_text
        for size in range(1, len(ahead) + 1):
            after = there.moves[ahead[size - 1]]
            assert after is not None
            there = after
            if after.tokens + 1 < best and ahead[:size] in known:
                best = after.tokens + 1
        return best

    def _walk(self, here: Place) -> Step:
        """Follow all tokens at once, byte by byte."""
        trie = self.trie
        found: list[Place] = [here]
        numbers = {here.number: 0}
        moves = np.full((16, 256), UNKNOWN, np.int32)
        states = np.full(trie.nodes, NOWHERE, np.int32)
        states[0] = 0
        for first, parents, read in trie.levels:
            before = states[parents]
            alive = np.flatnonzero(before >= 0)
            if not len(alive):
                break
            at, byte = before[alive], read[alive]
            after = moves[at, byte]
            if (after == UNKNOWN).any():
                asked = np.unique(at[after == UNKNOWN] * 256 + byte[after == UNKNOWN])
                for pair in asked.tolist():
                    place = self.move(found[pair >> 8], pair & 255)
                    if place is None:
                        moves[pair >> 8, pair & 255] = NOWHERE
                        continue
                    number = numbers.get(place.number)
                    if number is None:
                        number = numbers[place.number] = len(found)
                        found.append(place)
                        if number >= len(moves):
                            more = np.full_like(moves, UNKNOWN)
                            moves = np.concatenate([moves, more])
                    moves[pair >> 8, pair & 255] = number
                after = moves[at, byte]
            states[first + alive] = after
        states[0] = NOWHERE
        return _compact(found, states[trie.node_of])


def _relax(found: list[Place], leads: list[list[Place]]) -> None:
    """Set the fewest tokens from each place to an end, by the places that tokens lead to."""
    fewest = {place.number: 0 if place.rest == 0 else ENDLESS for place in found}
    grown = True
    while grown:
        grown = False
        for place, afters in zip(found, leads, strict=True):
            best = min((fewest[after.number] + 1 for after in afters), default=ENDLESS)
            if best < fewest[place.number]:
                fewest[place.number], grown = best, True
    for place in found:
        place.tokens = fewest[place.number]


def _compact(found: list[Place], after: npt.NDArray[np.int32]) -> Step:
    """A step with those places alone that some token ends at."""
    used = np.unique(after[after >= 0])
    numbers = np.full(len(found) + 1, NOWHERE, np.int32)
    numbers[used] = np.arange(len(used))
    return Step([found[i] for i in used.tolist()], numbers[after])
