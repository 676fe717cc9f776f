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
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.ir.reach import ENDLESS
from overlap_spec.grammar.room.bodies import Body, body_of
from overlap_spec.grammar.room.graph import RuleGraph
from overlap_spec.grammar.room.rules import Ints, RoomRules
from overlap_spec.grammar.room.trie import Repeats, TokenTrie
from overlap_spec.grammar.rows import packed, tokens_of, which_allowed

# Positions of a place; one with more is not followed: as if no text went on there.
MOST_ITEMS = 4000
# What counting the fewest tokens exactly may take: places, and nodes of the tree of tokens that are
# looked at for them all.
EXACT_PLACES, EXACT_NODES = 400, 100_000
# So many tokens of a mask are read one by one, and so many ways into a repetition are looked at.
FEW_TOKENS, MOST_ENTRIES = 2048, 2
PREPARED_RULES = 256
# Of tokens that begin with a byte behind which the repetition is another.
ENTERED_TOKENS = 256
# Places that are looked at to see whether bodies lead to one place, and first bytes of those that
# need not.
MOST_WAYS, MOST_OTHERS = 128, 16
# Of what tokens can do, it is kept what more of them than this can, at so many places.
KEPT_TOKENS, MOST_STEPS = 64, 64
UNKNOWN, NOWHERE = -2, -1
# How often the rules that wait at a place are looked at, to see how long their rests are at most.
MOST_ROUNDS = 8


@dataclass(eq=False, repr=False, slots=True)
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

    number: int
    rest: int = ENDLESS
    byte: int = -1
    tokens: int = -1
    ahead: bytes | None = None
    waiting: dict[int, list[tuple[int, Place]]] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    most_returns: dict[int, int] = field(default_factory=dict)
    most: int = 0
    scans: list[tuple[int, int, int, Place]] = field(default_factory=list)
    moves: dict[int, Place | None] = field(default_factory=dict)
    lead: tuple[Body, Place] | None = None
    entry: Entry | None = None
    is_led: bool = False
    is_entered: bool = False
    step: tuple[Ints | None, Step] | None = None


class Entry(NamedTuple):
    """How tokens that are bodies of one repetition lead on from a place.

    Attributes:
        after: The place behind the first one; `Place.lead` tells the next ones.
        others: First bytes of bodies that may lead elsewhere.
    """

    body: Body
    after: Place
    others: tuple[int, ...]


class Step(NamedTuple):
    """What one token can do at a place.

    Attributes:
        kinds: int16 `(size,)`: of each token its kind, -1 or above; or there are none.
        of_kind: int64 `(n + 1,)`: of each kind, the number of the place behind such tokens, -1:
            there is none; the last is that of -1.
        few, few_after: int64 `(n,)`: tokens, and of each the number of the place behind it,
            whatever their kind.
    """

    places: list[Place]
    kinds: npt.NDArray[np.int16] | None
    of_kind: npt.NDArray[np.int64]
    few: npt.NDArray[np.int64]
    few_after: npt.NDArray[np.int64]

    def after(self, token: int) -> Place:
        """The place behind a token, which leads to one."""
        at = np.flatnonzero(self.few == token)
        if len(at):
            return self.places[int(self.few_after[at[0]])]
        assert self.kinds is not None
        return self.places[int(self.of_kind[self.kinds[token]])]

    def row(self, fits: npt.NDArray[np.bool_], row: Ints) -> Ints:
        """The tokens of a mask row that lead to one of some places.

        Args:
            fits: bool `(places,)`.
            row: int32 `(words,)`.
        """
        flags = np.zeros(len(row) * 32, np.bool_)
        if self.kinds is not None:
            flags[: len(self.kinds)] = np.append(fits, False)[self.of_kind][self.kinds]
        flags[self.few] = fits[self.few_after]
        return row & packed(flags, len(row))

    def nearest(
        self, row: Ints, needs: npt.NDArray[np.int64], count: int
    ) -> list[tuple[int, Place]]:
        """The tokens of a mask row behind which fewest are needed, of equal ones the first, each
        with the place behind it.

        Args:
            row: int32 `(words,)`, of tokens that lead to a place.
            needs: int64 `(places,)`: tokens that are enough behind each.
        """
        if self.kinds is None:
            inside = np.flatnonzero(which_allowed(row, self.few))
            after = self.few_after[inside]
            order = np.lexsort((self.few[inside], needs[after]))[:count]
            first = self.few[inside[order]].tolist()
            return [(t, self.places[n]) for t, n in zip(first, after[order].tolist(), strict=True)]
        found: list[tuple[int, Place]] = []
        for need in np.unique(needs).tolist():
            tokens = tokens_of(self.row(needs == need, row))[: count - len(found)]
            found += [(token, self.after(token)) for token in tokens.tolist()]
            if len(found) == count:
                break
        return found


class Chart:
    """The places of a grammar that were come to so far; safe to share between threads.

    Raises:
        GrammarError: the grammar is too large to be followed.
    """

    def __init__(self, rules: RoomRules, trie: TokenTrie) -> None:
        self.trie, self.lock = trie, threading.RLock()
        self._graph = RuleGraph(rules)
        self._body_of = cache(partial(body_of, self._graph))
        self._rests: list[int] = rules.rests.tolist()
        self._nullable = [bool(flag) for flag in rules.nullable.tolist()]
        self._rules_bytes = 8 * sum(part.nbytes for part in rules)
        self.start = Place(0)
        self.places = [self.start]
        self._stepped: deque[Place] = deque()
        self._settled = False
        self._known: dict[frozenset[tuple[int, int]], Place | None] = {}
        if not self._close(self.start, [(0, self.start)]):
            raise GrammarError(f"its start has over {MOST_ITEMS} positions in its rules")

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        steps = len(self._stepped) * 4 * self.trie.size
        return self._rules_bytes + steps + 2000 * len(self.places)

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

    def step(self, here: Place, row: Ints) -> Step:
        """What the tokens of a mask row can do at a place."""
        with self.lock:
            if here.step is not None:
                # A place's mask is the same whenever a text comes there, but for what must differ.
                of, found = here.step
                if of is None or np.array_equal(of, row):
                    return found
            read = _read(self, here, row)
            kept, step = (None, _walk(self, here)) if read is None else (row.copy(), read)
            if len(step.few) > KEPT_TOKENS or step.kinds is not None:
                if here.step is None:
                    self._stepped.append(here)
                here.step = kept, step
                if len(self._stepped) > MOST_STEPS:
                    self._stepped.popleft().step = None
            return step

    def prepare(self) -> None:
        """Look at the bodies of repetitions, for masks to come."""
        for rule in range(min(len(self._graph.starts), PREPARED_RULES)):
            with self.lock:
                body = self._body_of(rule)
            if body is not None:
                self.trie.repeats(body.moves)

    def entry(self, here: Place) -> Entry | None:
        """How tokens that are bodies of one repetition lead on from a place; None: not told so."""
        if not here.is_entered:
            here.entry, here.is_entered = _find_entry(self, here), True
        return here.entry

    def lead(self, here: Place) -> tuple[Body, Place] | None:
        """The body of the repetition that a place is in, and the place behind it: all texts of it
        lead there, and nothing else at the place begins as they do. None: there is none such."""
        if not here.is_led:
            here.is_led = True
            for rule, waiting in here.waiting.items():
                body = self._body_of(rule) if len(waiting) == 1 else None
                if body is not None and _is_alone(here, rule, body, self._graph.rule_of):
                    after = self._named(set(waiting))
                    if after is not None:
                        here.lead = body, after
                        break
        return here.lead

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
            leads.append(_walk(self, place).places)
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

    def _named(self, scanned: set[tuple[int, Place]]) -> Place | None:
        """The place of some positions: those that are only the end of a rule go by what waits for
        it, so that a text has one name however its last character is spelled."""
        items: set[tuple[int, Place]] = set()
        seen = {(node, origin.number) for node, origin in scanned}
        pending, graph = [*scanned], self._graph
        while pending:
            node, origin = pending.pop()
            node = graph.onward(node)
            rule = graph.ends.get(node)
            if rule is None or graph.leads_on(node) or (rule == 0 and origin is self.start):
                items.add((node, origin))
                continue
            for back, outer in origin.waiting.get(rule, ()):
                if (back, outer.number) not in seen:
                    seen.add((back, outer.number))
                    pending.append((back, outer))
        name = frozenset([(node, origin.number) for node, origin in items])
        if name not in self._known:
            made = Place(len(self.places))
            self.places.append(made)
            self._known[name] = made if self._close(made, list(items)) else None
        return self._known[name]

    def _close(self, here: Place, pending: list[tuple[int, Place]]) -> bool:
        """Predict and complete until there are no new positions; False if they are too many."""
        seen = {(node, origin.number) for node, origin in pending}
        graph = self._graph
        edges, steps, calls = graph.edges, graph.steps, graph.calls

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
                add(graph.starts[rule], here)
                if self._nullable[rule]:
                    add(back, origin)
            # A rule that ends where it began is nullable, and was skipped over above.
            ended = graph.ends.get(node)
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
        """Find the shortest rest behind a place that is closed, and the longest of the rests behind
        its positions."""
        returns = here.returns
        if here is self.start:
            returns[0] = 0
        grown = True
        while grown:
            grown = False
            for rule, waiting in here.waiting.items():
                best = min(self._behind(back, outer.returns) for back, outer in waiting)
                if best < returns.get(rule, ENDLESS):
                    returns[rule], grown = best, True
        most_returns = here.most_returns
        for _ in range(MOST_ROUNDS):
            grown = False
            for rule, waiting in here.waiting.items():
                most = max(self._behind(back, outer.most_returns, 0) for back, outer in waiting)
                if most > most_returns.get(rule, 0):
                    most_returns[rule], grown = most, True
            if not grown:
                break
        else:
            # Rules that begin with themselves wait for as many of them as one likes.
            here.most_returns = dict.fromkeys(here.waiting, ENDLESS)
        mosts = (self._behind(t, o.most_returns, 0) for _, _, t, o in here.scans)
        here.most = max(mosts, default=0)
        if here.rest == 0:
            return
        found = (ENDLESS, 0, 256)
        for low, high, target, origin in here.scans:
            rest = 1 + self._behind(target, origin.returns)
            # Characters that are seen, before others.
            byte = max(low, 0x20) if high >= 0x20 else low
            found = min(found, (rest, int(byte < 0x20), byte))
        here.rest, _, here.byte = found

    def _behind(self, node: int, returns: dict[int, int], unknown: int = ENDLESS) -> int:
        """Bytes from a position to the end of the text, fewest in its own rule: by what its origin
        tells of those behind a rule."""
        return min(self._rests[node] + returns.get(self._graph.rule_of[node], unknown), ENDLESS)

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
            fewest = _fewest(place, place.ahead, self.trie.by_text)
            place.tokens = fewest if place.tokens < 0 else min(fewest, place.tokens)


class _Reading:
    """Tokens read at a place, to be a step."""

    def __init__(self, chart: Chart, here: Place, repeats: Repeats | None = None) -> None:
        self._chart, self._here, self._repeats = chart, here, repeats
        self._places: list[Place] = []
        self._numbers: dict[int, int] = {}
        self._heads: list[Place] = []
        self._others: tuple[int, ...] = ()
        self._kinds: npt.NDArray[np.int16] | None = None
        self._of_kind = np.full(1, NOWHERE, np.int64)

    def enter(self, here: Place, entry: Entry, before: bytes) -> None:
        """Read the tokens that begin with some bytes, which lead to a place, by its entry."""
        repeats, trie = self._repeats, self._chart.trie
        assert repeats is not None
        heads, lead = [here, entry.after], self._chart.lead(entry.after)
        while lead is not None and lead[0] is entry.body and len(heads) <= repeats.most:
            heads.append(lead[1])
            lead = self._chart.lead(lead[1])
        table = np.full(repeats.most + 2, NOWHERE)
        size = min(len(heads), len(table) - 1 - len(before))
        numbers = [self._number(place) for place in heads[1:size]]
        table[len(before) + 1 : len(before) + size] = numbers
        if self._kinds is None:
            self._heads, self._others, self._of_kind = heads, entry.others, table
            self._kinds = repeats.counts
            if entry.others:
                # From here on a kind is the number of a place.
                self._kinds = table[repeats.counts].astype(np.int16)
        else:
            tokens = trie.beginning(before)
            self._kinds[tokens] = table[repeats.counts[tokens]]
        for byte in entry.others:
            self._enter_other(here, entry.body, before + bytes((byte,)))
        if entry.others and not before:
            self._of_kind = np.append(np.arange(len(self._places)), NOWHERE)

    def _enter_other(self, here: Place, body: Body, before: bytes) -> None:
        chart = self._chart
        assert self._kinds is not None
        tokens = chart.trie.beginning(before)
        # Few are soonest read one by one.
        after = chart.move(here, before[-1]) if len(tokens) > ENTERED_TOKENS else None
        entry = None if after is None else chart.entry(after)
        single = body.moves[0, before[-1]] == body.end
        if after is not None and entry is not None and entry.body is body and single:
            self.enter(after, entry, before)
        else:
            self._kinds[tokens] = NOWHERE

    def told(self) -> Ints:
        """int32 `(words,)`: the tokens that are read."""
        assert self._repeats is not None
        assert self._kinds is not None
        if not self._others:
            return self._repeats.within(len(self._heads) - 1)
        return packed(self._kinds >= 0, self._chart.trie.words)

    def step(self, tokens: npt.NDArray[np.int64]) -> Step:
        """The step, with these tokens read one by one."""
        known: dict[tuple[int, bytes], int] = {}
        if self._repeats is None:
            texts = self._chart.trie.texts
            parts = [(0, texts[token]) for token in tokens.tolist()]
            found = np.array([self._behind(0, text, known) for _, text in parts], np.int64)
        else:
            most = len(self._heads) - 1
            parts, part_of = self._repeats.parts(tokens, self._others, most)
            found = np.array([self._behind(*part, known) for part in parts], np.int64)[part_of]
        lead = found >= 0
        few, few_after = tokens[lead], found[lead]
        return Step(self._places, self._kinds, self._of_kind, few, few_after)

    def whole(
        self, tokens: npt.NDArray[np.int64], states: npt.NDArray[np.int32], places: list[Place]
    ) -> Step:
        """The step of some tokens, and the numbers of the places behind them."""
        numbers = np.full(len(places), NOWHERE, np.int64)
        for state in np.unique(states).tolist():
            numbers[state] = self._number(places[state])
        return Step(self._places, None, self._of_kind, tokens, numbers[states])

    def _behind(self, count: int, text: bytes, known: dict[tuple[int, bytes], int]) -> int:
        """The number of the place behind so many bodies and a text."""
        if not text:
            return NOWHERE
        here = self._heads[count] if count else self._here
        name = here.number, text
        if name not in known:
            known[name] = self._read(here, text, known)
        return known[name]

    def _read(self, here: Place, text: bytes, known: dict[tuple[int, bytes], int]) -> int:
        before = known.get((here.number, text[:-1]))
        if before is None:
            place = self._chart.after(here, text)
        elif before < 0:
            place = None
        else:
            place = self._chart.move(self._places[before], text[-1])
        return NOWHERE if place is None else self._number(place)

    def _number(self, place: Place) -> int:
        found = self._numbers.get(place.number)
        if found is None:
            found = self._numbers[place.number] = len(self._places)
            self._places.append(place)
        return found


def _fewest(place: Place, ahead: bytes, known: frozenset[bytes]) -> int:
    """Tokens that spell the rest of a place, of which the next places' are known."""
    best, there = ENDLESS, place
    for size in range(1, len(ahead) + 1):
        after = there.moves[ahead[size - 1]]
        assert after is not None
        there = after
        if after.tokens + 1 < best and ahead[:size] in known:
            best = after.tokens + 1
    return best


def _walk(chart: Chart, here: Place) -> Step:
    """Follow all tokens at once, byte by byte."""
    trie, reading = chart.trie, _Reading(chart, here)
    found, numbers = [here], {here.number: 0}
    moves = np.full((16, 256), UNKNOWN, np.int32)
    nodes, states = np.zeros(1, np.int32), np.zeros(1, np.int32)
    ends: list[npt.NDArray[np.int64]] = []
    end_states: list[npt.NDArray[np.int32]] = []
    while len(nodes):
        nodes, at = trie.below(nodes)
        states, byte = states[at], trie.read[nodes]
        after = moves.ravel()[states * 256 + byte]
        if (after == UNKNOWN).any():
            asked = np.unique(states[after == UNKNOWN] * 256 + byte[after == UNKNOWN])
            for pair in asked.tolist():
                place = chart.move(found[pair >> 8], pair & 255)
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
            after = moves.ravel()[states * 256 + byte]
        alive = after >= 0
        nodes, states = nodes[alive], after[alive]
        tokens, at = trie.tokens_at(nodes)
        ends.append(tokens)
        end_states.append(states[at])
    return reading.whole(np.concatenate(ends), np.concatenate(end_states), found)


def _read(chart: Chart, here: Place, row: Ints) -> Step | None:
    """What the tokens of a row can do, read one by one where they are few, or are but for few
    of them bodies of a repetition; None: neither is so."""
    if int(np.bitwise_count(row).sum()) <= FEW_TOKENS:
        return _Reading(chart, here).step(tokens_of(row))
    entry = chart.entry(here)
    if entry is None:
        return None
    reading = _Reading(chart, here, chart.trie.repeats(entry.body.moves))
    reading.enter(here, entry, b"")
    left = tokens_of(row & ~reading.told())
    return reading.step(left) if len(left) <= FEW_TOKENS else None


def _find_entry(chart: Chart, here: Place) -> Entry | None:
    lead = chart.lead(here)
    if lead is not None:
        after = chart.lead(lead[1])
        if after is not None and after[0] is lead[0]:
            return Entry(*lead, ())
    # Bytes in the order of how many are read alike.
    for low, _, _, _ in sorted(here.scans, key=lambda scan: scan[0] - scan[1])[:MOST_ENTRIES]:
        there = chart.move(here, low)
        lead = None if there is None else chart.lead(there)
        if there is not None and lead is not None and lead[0].begins[low]:
            body, known = lead[0], dict[tuple[Place | None, int], bool]()
            others: list[int] = []
            for first, last, then in _alike(here, body.ways[0]):
                name = chart.move(here, first), then
                if name not in known:
                    known[name] = _leads_to(chart, *name, body, there, set())
                if not known[name]:
                    others += range(first, last + 1)
            return Entry(body, there, tuple(others)) if len(others) <= MOST_OTHERS else None
    return None


def _leads_to(
    chart: Chart,
    here: Place | None,
    state: int,
    body: Body,
    there: Place,
    seen: set[tuple[Place, int]],
) -> bool:
    """Whether all that is left of a body in a state leads from one place to another."""
    if here is None or state == body.end:
        return here is there
    if (here, state) in seen:
        return True
    seen.add((here, state))
    spans = _alike(here, body.ways[state])
    ways = {(chart.move(here, first), then) for first, _, then in spans}
    return len(seen) <= MOST_WAYS and all(
        _leads_to(chart, after, then, body, there, seen) for after, then in ways
    )


def _is_alone(here: Place, rule: int, body: Body, rule_of: list[int]) -> bool:
    """Whether nothing else at a place reads the bytes that a body begins with."""
    for low, high, target, origin in here.scans:
        inside = origin is here and rule_of[target] in body.rules
        if not inside and body.begins[low : high + 1].any():
            return False
    return all(
        outer is here and rule_of[back] in body.rules
        for called in body.rules
        if called != rule
        for back, outer in here.waiting.get(called, ())
    )


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


def _alike(here: Place, spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans of bytes, each with a number, cut where a place reads them differently."""
    cuts = sorted({low for low, _, _, _ in here.scans} | {high + 1 for _, high, _, _ in here.scans})
    found = []
    for low, high, number in spans:
        inside = cuts[bisect_right(cuts, low) : bisect_right(cuts, high)]
        firsts = [low, *inside]
        found += [(a, b - 1, number) for a, b in pairwise([*firsts, high + 1])]
    return found
