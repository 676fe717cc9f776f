"""What clients share: whose turn it is, and how much each may have."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

# Who asks, for the request under way in this context; empty where nobody is told apart.
HOLDER: ContextVar[str] = ContextVar("overlap_spec.holder", default="")
# Holders of which is known when they had their last turn.
MOST_KNOWN = 4096
Item = TypeVar("Item")


def has_room(held: Mapping[str, int], holder: str, most: int, amount: int = 1) -> bool:
    """Whether a holder may have ``amount`` more of what ``most`` of is shared out; ``held``: how
    much each has, without those who have 0.

    A holder may have all that nobody has. Where that is not enough, one that stays within its equal
    part gets it all the same, so that it waits for nobody else; all together have at most twice
    ``most``.
    """
    total = sum(held.values()) + amount
    if total <= most:
        return True
    part = max(1, most // (len(held) + (holder not in held)))
    return held.get(holder, 0) + amount <= part and total <= 2 * most


class Shares:
    """Counts what each holder has of something; see :func:`has_room`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: Counter[str] = Counter()

    def has_room(self, holder: str, amount: int = 1) -> bool:
        """Whether the holder may have so much more."""
        return has_room(self.held, holder, self.most, amount)

    def add(self, holder: str, amount: int = 1) -> None:
        """Count what a holder has got; negative when it gives it back."""
        self.held[holder] += amount
        if not self.held[holder]:
            del self.held[holder]

    @property
    def total(self) -> int:
        """What all have together."""
        return self.held.total()


class Turns:
    """Whose turn it is: theirs whose last one was longest ago."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self._numbers = itertools.count(1)

    def first(self, holders: Iterable[str]) -> str:
        """Whose turn it is among some; of those who had none yet, the first."""
        return min(holders, key=lambda holder: self._last.get(holder, 0))

    def took(self, holder: str) -> None:
        """The holder has had its turn."""
        self._last.pop(holder, None)
        self._last[holder] = next(self._numbers)
        if len(self._last) > MOST_KNOWN:
            self._last.popitem(last=False)


class FairQueue(Generic[Item]):
    """Items that wait, in a line for each ``holder``; the holders take turns. ``rank``: an item's
    place in its holder's line, least first; None: first come, first served."""

    def __init__(
        self, holder: Callable[[Item], str], rank: Callable[[Item], Any] | None = None
    ) -> None:
        self._holder, self._rank = holder, rank
        self._lines: dict[str, list[Item]] = {}
        self._turns = Turns()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Item]:
        return itertools.chain.from_iterable(self._lines.values())

    def append(self, item: Item) -> None:
        """Let an item wait at its place in its holder's line."""
        line = self._lines.setdefault(self._holder(item), [])
        if self._rank is None:
            line.append(item)
        else:
            insort(line, item, key=self._rank)

    def line(self, may: Callable[[str], bool] = lambda _: True) -> Sequence[Item]:
        """The line of the holder whose turn it is, of those who ``may`` have one; empty where none
        may."""
        holders = [holder for holder in self._lines if may(holder)]
        return self._lines[self._turns.first(holders)] if holders else ()

    def take(self, item: Item) -> None:
        """Remove an item, which is its holder's turn."""
        self._turns.took(self._holder(item))
        self.remove(item)

    def popleft(self) -> Item:
        """Take the item whose turn it is; IndexError where nothing waits."""
        item = self.line()[0]
        self.take(item)
        return item

    def remove(self, item: Item) -> None:
        """Remove an item that waits no more."""
        holder = self._holder(item)
        self._lines[holder].remove(item)
        if not self._lines[holder]:
            del self._lines[holder]


class Lane:
    """``most`` places that are shared out by holder (:func:`has_room`), and waited for in turns, by
    at most ``most_waiting`` of each kind, shared out as well."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self.busy = Shares(most)
        self._waiting: FairQueue[_Waiter] = FairQueue(lambda waiter: waiter.holder)
        # How many wait, by kind.
        self._held = defaultdict[object, Shares](lambda: Shares(most_waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, holder: str) -> bool:
        """Whether the holder would get a place at once."""
        return self.busy.has_room(holder)

    async def take(self, holder: str, kind: object = None) -> bool:
        """Wait for a place; False if too many wait for one."""
        held = self._held[kind]
        if not self.has_room(holder) and not held.has_room(holder):
            return False
        waiter = _Waiter(holder, kind)
        self._waiting.append(waiter)
        held.add(holder)
        self._call()
        try:
            await waiter.called
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                held.add(holder, -1)
            elif not waiter.called.cancelled():
                self.give(holder)
            raise
        return True

    def give(self, holder: str) -> None:
        """Give a place back."""
        self.busy.add(holder, -1)
        self._call()

    def _call(self) -> None:
        while line := self._waiting.line(self.has_room):
            waiter = line[0]
            self._waiting.take(waiter)
            self._held[waiter.kind].add(waiter.holder, -1)
            if not waiter.called.done():
                self.busy.add(waiter.holder)
                waiter.called.set_result(None)


class _Waiter:
    """One that waits for a place."""

    def __init__(self, holder: str, kind: object = None) -> None:
        self.holder, self.kind = holder, kind
        self.called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
