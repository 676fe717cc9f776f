"""Drafts of values by where they go: what the prompt has that is legal there.

Where a grammar leaves a choice behind text that it forces, a *slot* begins, known by its state in
the grammar's table (a key's value in JSON). It is filled with spans of the prompt that the table
allows there, to the ends that the prompt's words and marks suggest, with values that the slot had
before, and with what few choices there are; then comes what is forced behind them, and the next
slot. All of it is text, cut as the tokenizer does.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from overlap_spec.caches import newest
from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import NOTHING, Drafter, HostDraft
from overlap_spec.drafters.text_pool import best_first
from overlap_spec.steps import (
    BY_NONE,
    BY_STOP,
    DEAD,
    DONE,
    FIRST,
    LOST,
    STATE_WIDTH,
    Guide,
    History,
)
from overlap_spec.tiers import Tier

# Bytes of a value that is looked at; the prompt's last bytes that are looked through; of spans the
# starts that are weighed, and the places where a value's text is looked for.
LONGEST, PROMPT_BYTES, STARTS, PLACES = 96, 8192, 24, 64
# Bytes that may come: where text is free; where it is a choice of few; behind a value's end.
FREE_WAYS, FEW_WAYS, END_WAYS = 64, 12, 2
# Bytes of text for each token of a draft.
BYTES_A_TOKEN = 6
# Grammars whose earlier values are kept, slots of each, and values of a slot.
GRAMMARS, SLOTS, VALUES = 64, 256, 16
# For a tree and for a chain: texts that are finished, and that are cut into tokens. Options of a
# choice, texts whose tokens are kept.
FINISHED, TEXTS, OPTIONS, ENCODED = (5, 2), (10, 12), 4, 512
# Weights: of values that a slot had, beside all spans' 1; of a choice of few, for bytes with which
# a value or `true` begins, and for others; that it is none of these.
EARLIER, OWN, OPENS, FEW, DOUBT = 1.0, 0.5, 1.0, 0.3, 0.1
LIKELY = b'"{[t'
# Weights of a span's start: behind the key's words; used already, in free text and else; a key
# itself; inside a word; in small letters; where a sentence begins.
NEAR, USED, USED_FEW, NAMED, INSIDE, LOWER, SENTENCE = 5.0, 0.1, 0.5, 0.1, 0.2, 0.25, 0.4
# Chances that a span ends: at a mark; the least that is looked at; between two words, by whether
# these begin in small letters.
AT_MARK, LEAST = 0.9, 0.03
BETWEEN = {(False, False): 0.4, (False, True): 0.8, (True, False): 0.7, (True, True): 0.5}
OPENING, CLOSING, APART = b"\"'[({ ", b"\"',]}", b" \t\n\"'([{<:=$#"
# The most that a token's chance can be.
STEP = 0.97

WORD = re.compile(rb"(?<![0-9A-Za-z\x80-\xff])(?=[+\-#]?[0-9A-Za-z\x80-\xff])")
# Where a span of words may end: behind it.
BREAK = re.compile(rb"""(?=\s|$|[.,;:!?)\]}>"'|/]+(?:\s|$)|["')\]}>|])""")
NAME = re.compile(rb'^"([^"]+)":')
KEY = re.compile(rb"([0-9A-Za-z_\x80-\xff]+)[^0-9A-Za-z_\x80-\xff]*$")


class Place(NamedTuple):
    """Where a text stands: in the table, and since which state in a slot (-1: in none) with which
    value so far."""

    state: int
    slot: int
    value: bytes


START = Place(FIRST, -1, b"")


class Table:
    """A grammar's states, read byte by byte."""

    def __init__(self, guide: Guide) -> None:
        # Of a view, Python reads a number several times faster than of an array.
        self.states = guide.states
        self._moves, self._forced = guide.states.moves.reshape(-1).data, guide.states.forced.data
        self._ways: dict[int, list[int]] = {}
        self._ends: dict[int, list[bytes]] = {}
        # Names that the grammar forces, in small letters.
        rows = np.flatnonzero(guide.states.forced == ord('"')).tolist()
        runs = (self.force(row * STATE_WIDTH, LONGEST)[0] for row in rows)
        self.keys = {name.lower() for run in runs for name in NAME.findall(run)}

    def forced(self, state: int) -> int:
        """The only byte that can come, -1 where there is another."""
        return self._forced[state // STATE_WIDTH]

    def after(self, state: int, text: bytes) -> int:
        """The state behind more bytes."""
        for byte in text:
            state = self._moves[state + byte]
        return state

    def ways(self, state: int) -> list[int]:
        """The bytes that may come."""
        if state not in self._ways:
            moves = self._moves[state : state + BY_NONE].tolist()
            self._ways[state] = [byte for byte, after in enumerate(moves) if after != DEAD]
        return self._ways[state]

    def ends(self, state: int) -> list[bytes]:
        """Marks that end a value: behind them little is left to choose."""
        if state not in self._ends:
            marks = [b for b in self.ways(state) if b < 128 and not chr(b).isalnum() and b > 32]
            self._ends[state] = [bytes((b,)) for b in marks if self._ends_with(state, b)]
        return self._ends[state]

    def _ends_with(self, state: int, byte: int) -> bool:
        after = self._moves[state + byte]
        if after in (LOST, state):
            return False
        return self._moves[after + BY_STOP] == DONE or len(self.ways(after)) <= END_WAYS

    def is_free(self, state: int) -> bool:
        """Whether text may come as it likes."""
        return len(self.ways(state)) > FREE_WAYS

    def read(self, place: Place, text: bytes) -> tuple[Place, list[Place]]:
        """The place behind more text, and the ends of the slots that it ends."""
        state, slot, value = place
        ended = list[Place]()
        for byte in text:
            if self.forced(state) < 0:
                slot = state if slot < 0 else slot
                value = (value + bytes((byte,)))[-LONGEST:]
            elif slot >= 0:
                ended.append(Place(state, slot, value))
                slot, value = -1, b""
            state = self._moves[state + byte]
        return Place(state, slot, value), ended

    def force(self, state: int, most: int) -> tuple[bytes, int]:
        """The bytes that must come, and the state behind them."""
        found = bytearray()
        while len(found) < most and (byte := self.forced(state)) >= 0:
            found.append(byte)
            state = self._moves[state + byte]
        return bytes(found), state


Values = OrderedDict[int, OrderedDict[bytes, int]]


def note(values: Values, slot: int, value: bytes) -> None:
    """Enter a slot's value; of many the newest stay."""
    had = values.setdefault(slot, OrderedDict())
    values.move_to_end(slot)
    had[value] = had.pop(value, 0) + 1
    while len(had) > VALUES:
        had.popitem(last=False)
    while len(values) > SLOTS:
        values.popitem(last=False)


class Prompt:
    """The end of a prompt as text; ``weights``: of each word's first byte, how likely free text
    begins there; ``breaks``: where a span of words may end."""

    def __init__(self, text: bytes, keys: Collection[bytes]) -> None:
        self.text = text[-PROMPT_BYTES:]
        self._lower = self.text.lower()
        self.breaks = {found.start() for found in BREAK.finditer(self.text)}
        self._words = [found.start() for found in WORD.finditer(self.text)]
        self.weights = {start: self._weight(start) for start in self._words}
        for name in keys:
            for spelled in {name, name.replace(b"_", b" ")}:
                for found in re.finditer(re.escape(spelled) + rb"(?![0-9a-z])", self._lower):
                    if found.start() in self.weights:
                        self.weights[found.start()] *= NAMED

    def places(self, text: bytes) -> list[int]:
        """Where a text stands, in a few places."""
        found, at = list[int](), self.text.find(text) if text else -1
        while at >= 0 and len(found) < PLACES:
            found.append(at)
            at = self.text.find(text, at + 1)
        return found

    def near(self, before: bytes) -> set[int]:
        """Starts behind words of the key that the output has before the slot."""
        found = KEY.search(before)
        near = set[int]()
        for word in found[1].lower().split(b"_") if found else ():
            if len(word) < 3:
                continue
            for at in re.finditer(re.escape(word), self._lower):
                first = bisect_left(self._words, at.end())
                near.update(w for w in self._words[first : first + 3] if w - at.end() < 16)
        return near

    def end_chance(self, start: int, at: int) -> float:
        """The chance that a span ends at a break of the prompt, by what stands around."""
        prompt = self.text
        if prompt[at : at + 1] != b" ":
            return AT_MARK
        last = prompt.rfind(b" ", start, at) + 1 or start
        return BETWEEN[prompt[last : last + 1].islower(), prompt[at + 1 : at + 2].islower()]

    def _weight(self, start: int) -> float:
        """How likely free text begins with a word of the prompt, by how it stands there."""
        byte, prior = self.text[start], self.text[max(0, start - 4) : start]
        weight = INSIDE if prior and prior[-1] not in APART else 1.0
        if chr(byte).isupper():
            prior = prior.rstrip(b" \"'")
            return weight * (SENTENCE if not prior or prior[-1] in b".!?:\n" else 1.0)
        return weight * (1.0 if chr(byte).isdigit() else LOWER)


class Filling:
    """One request: its prompt as text, how far its output has come, and the values that its slots
    had in that (``own``), and in others (``earlier``; empty where nobody asked for that)."""

    def __init__(self, guide: Guide, history: History, table: Table, earlier: Values) -> None:
        self.table, self.own, self.earlier = table, Values(), earlier
        self._texts, self._encode = guide.texts, guide.encode
        self.prompt = Prompt(self.text_of(history.prompt), table.keys)
        self.place, self._read, self._said = START, 0, b""
        self._used: set[int] = set()
        self._encoded: OrderedDict[bytes, Sequence[int]] = OrderedDict()
        self._options: dict[Place, list[tuple[bytes, float]]] = {}

    def text_of(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens."""
        return b"".join([self._texts[token] for token in tokens])

    def follow(self, history: History) -> None:
        """Read what came to the output."""
        text = self.text_of(history.output[self._read :])
        self._read = len(history.output)
        self._said = (self._said + text)[-LONGEST:]
        self.place, ended = self.table.read(self.place, text)
        for place in ended:
            self._end(place)

    def finish(self) -> None:
        """The output is over."""
        if self.place.slot >= 0 and self.place.value:
            self._end(self.place)

    def _end(self, place: Place) -> None:
        note(self.own, place.slot, place.value)
        self._used.update(self.prompt.places(place.value.strip(CLOSING)))
        self._options.clear()

    def draft(self, forced: Sequence[int], tier: Tier) -> HostDraft:
        """The tree of the likeliest tokens behind what is forced, with which it begins."""
        run = forced[: tier.steps]
        ahead = self.text_of(run)
        place, _ = self.table.read(self.place, ahead)
        # How likely each path of tokens is behind that place.
        chances: dict[tuple[int, ...], float] = {}
        most, said = tier.steps - len(run), self._said + ahead
        room = most * BYTES_A_TOKEN
        for text, chance in self._texts_behind(place, said, room, tier.top_k) if most > 0 else ():
            path = tuple(self._tokens(text)[:most])
            for end in range(1, len(path) + 1):
                chances[path[:end]] = chances.get(path[:end], 0.0) + chance
        below: dict[tuple[int, ...], list[tuple[float, int]]] = {}
        for path, chance in chances.items():
            below.setdefault(path[:-1], []).append((chance, path[-1]))

        def children(path: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], float]]:
            whole = chances.get(path, 1.0)
            for chance, token in sorted(below.get(path, ()), reverse=True)[: tier.top_k]:
                yield token, (*path, token), min(STEP, chance / whole)

        return best_first(tuple[int, ...](), children, tier.nodes - 1, run)

    def _tokens(self, text: bytes) -> Sequence[int]:
        def encode() -> Sequence[int]:
            try:
                return self._encode(text.decode())
            except UnicodeDecodeError as error:
                return self._encode(text[: error.start].decode())

        return newest(self._encoded, text, encode, ENCODED)

    def _texts_behind(
        self, place: Place, said: bytes, room: int, branches: int
    ) -> list[tuple[bytes, float]]:
        """Texts that may come behind a place, none the beginning of another, and their chances.

        The likeliest one is finished to ``room`` bytes, then the likeliest that left it.
        """
        whole, ways = list[tuple[bytes, float]](), [(1.0, b"", place)]
        shape = branches == 1
        finished = FINISHED[shape]
        while ways and finished:
            finished -= 1
            ways.sort(key=lambda way: way[0])
            chance, text, place = ways.pop()
            while len(text) < room:
                more, _ = self.table.force(place.state, room)
                if not more:
                    found = self.options(place, said + text)
                    if not found:
                        break
                    (more, share), *others = found
                    # That it is none of these.
                    whole.append((text, chance * (1 - sum(part for _, part in found))))
                    for option, part in others:
                        behind, _ = self.table.read(place, option)
                        ways.append((chance * part, text + option, behind))
                    chance *= share
                text, place = text + more, self.table.read(place, more)[0]
            whole.append((text, chance))
        whole += [(text, chance) for chance, text, _ in ways]
        return sorted(whole, key=lambda way: -way[1])[: TEXTS[shape]]

    def options(self, place: Place, said: bytes) -> list[tuple[bytes, float]]:
        """What may come at a place where there is a choice: texts and their chances, the best
        first; ``said``: the output's text as far as the place, or its end."""
        state, slot, value = place
        if state < FIRST:
            return []
        if place in self._options:
            return self._options[place]
        weights = defaultdict[bytes, float](float)
        had_here = state if slot < 0 else slot
        for values, trust in ((self.earlier, EARLIER), (self.own, OWN)):
            had: Mapping[bytes, int] = values.get(had_here, {})
            often = sum(had.values())
            for text, count in had.items():
                if text.startswith(value) and text != value:
                    weights[text[len(value) :]] += trust * count / often
        spans = self._spans(place, said[: len(said) - len(value)])
        total = sum(weight for _, weight in spans)
        for text, weight in spans:
            weights[text] += weight / total
        ways = self.table.ways(state)
        for byte in ways if len(ways) <= FEW_WAYS else ():
            if not any(text[0] == byte for text in weights):
                weights[bytes((byte,))] = OPENS if byte in LIKELY else FEW
        total = sum(weights.values()) + DOUBT
        best = heapq.nlargest(OPTIONS, weights.items(), key=lambda option: option[1])
        self._options[place] = found = [(text, weight / total) for text, weight in best]
        return found

    def _spans(self, place: Place, before: bytes) -> list[tuple[bytes, float]]:
        """Spans of the prompt that go on with a place's value, with weights."""
        value = place.value.lstrip(OPENING)
        starts, read = [] if value else self._starts(place.state, before), 0
        for word in WORD.finditer(value):
            end = value[word.start() :]
            starts = [(at, 1.0) for at in self.prompt.places(end) if at in self.prompt.weights]
            if starts:
                read = len(end)
                break
        return [
            (text, weight * share)
            for start, weight in starts
            for text, share in self._ends_of(start + read, place.state, start)
        ]

    def _starts(self, state: int, before: bytes) -> list[tuple[int, float]]:
        """Where spans may start that fill a slot, with weights, the likeliest first."""
        near, free, used = self.prompt.near(before), self.table.is_free(state), self._used
        ways = frozenset(self.table.ways(state))
        prompt, known, again = self.prompt.text, self.prompt.weights, USED if free else USED_FEW
        found = [
            (start, (weight if free else 1.0) * (again if start in used else 1.0)
                    * (NEAR if start in near else 1.0))
            for start, weight in known.items()
            if prompt[start] in ways
        ]  # fmt: skip
        return heapq.nlargest(STARTS, found, key=lambda item: item[1])

    def _ends_of(self, at: int, state: int, start: int) -> list[tuple[bytes, float]]:
        """Ends of a span that goes on at ``at`` of the prompt, with what closes it."""
        prompt, first, left = self.prompt.text, at, 1.0
        found = list[tuple[bytes, float]]()
        most = min(len(prompt), start + LONGEST)
        while True:
            goes_on = at < most and (after := self.table.after(state, prompt[at : at + 1])) != DEAD
            if at > start and (at == len(prompt) or at in self.prompt.breaks):
                chance = self.prompt.end_chance(start, at) if goes_on else 1.0
                closed = self.table.forced(state) >= 0
                for close in [b""] if closed else self.table.ends(state)[:2]:
                    text = prompt[first:at] + close
                    if text:
                        found.append((text, left * chance))
                left *= 1 - chance
            if not goes_on or after < FIRST or left < LEAST:
                return found
            state, at = after, at + 1


class SlotDrafter(Drafter):
    """Proposes what fills the next slots of each request's grammar; ``fillings``: by request id;
    ``grammars``: by a salt and a grammar's identity, its states, and what its slots had."""

    host: ClassVar[bool] = True
    guided = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._shares, self._most = config.slots_earlier, config.max_running_requests
        self.fillings: OrderedDict[int, Filling] = OrderedDict()
        self.grammars: OrderedDict[tuple[str, int], tuple[Table, Values]] = OrderedDict()

    @classmethod
    def build(cls, config: EngineConfig, *_: Any, **__: Any) -> Self:
        return cls(config)

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        drafts = []
        for history in histories:
            filling = self._filling(history)
            drafts.append(NOTHING if filling is None else filling.draft(history.forced, tier))
        return drafts

    def forget(self, history: History) -> None:
        filling = self.fillings.pop(history.request_id, None)
        if filling is not None and self._shares:
            filling.follow(history)
            filling.finish()
            for slot, had in filling.own.items():
                for value in had:
                    note(filling.earlier, slot, value)

    def _filling(self, history: History) -> Filling | None:
        """The request's, with its new tokens."""
        guide = history.guide
        if guide is None:
            return None

        def make() -> Filling:
            key = guide.salt, id(guide.states)
            known = newest(self.grammars, key, lambda: (Table(guide), Values()), GRAMMARS)
            return Filling(guide, history, *known)

        # Requests that wait for their turn again must not add up.
        filling = newest(self.fillings, history.request_id, make, self._most)
        filling.follow(history)
        return filling
