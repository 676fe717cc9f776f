"""Text that a drafter on the host looks things up in: each request's own, and a public one."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from overlap_spec.caches import newest
from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter, HostDraft
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import History
from overlap_spec.tiers import Tier

# Ends a text in a pool of several.
END = -1
# Of one request in one step, so that a long prompt keeps no other request waiting.
TOKENS_A_STEP = 4096
# Tokens entered between two looks at the bytes.
RUN = 256


class TextIndex(Protocol):
    """A growing text, and what is known of it. ``bytes``: memory that it takes."""

    text: array[int]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; the last one may be END."""

    @property
    def bytes(self) -> int: ...


Index = TypeVar("Index", bound=TextIndex)
Node = TypeVar("Node")


class TextPool(Generic[Index]):
    """An index of as much of the newest text as fits into ``max_bytes``; ``added``: tokens that it
    was given so far.

    It has two indexes: where the younger one is full, the elder one is dropped, and nothing is
    entered again but the last ``size`` tokens.
    """

    def __init__(self, make_index: Callable[[], Index], size: int, max_bytes: int) -> None:
        self._make, self._size, self._max_bytes = make_index, size, max_bytes
        self._young, self._elder = make_index(), make_index()
        self.added = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Enter what comes next in its text; the last token may be END."""
        for start in range(0, len(tokens), RUN):
            # A full table takes twice as much for its next entry.
            if self._young.bytes > self._max_bytes // 4:
                last = self._young.text[-self._size :].tolist()
                self._young, self._elder = self._make(), self._young
                self._young.append(last)
            self._young.append(tokens[start : start + RUN])
        self.added += len(tokens)

    def indexes(self, oldest: bool) -> list[tuple[Index, bool]]:
        """Both, in order of preference, and whether each ends with the newest token."""
        both = [(self._young, True), (self._elder, False)]
        return both[::-1] if oldest else both

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self._young.bytes + self._elder.bytes


class LookupDrafter(Drafter, Generic[Index]):
    """Proposes what the known text says of a request's last tokens.

    Each request has a pool of its own text. A public pool, where it is asked for, has that of
    requests that have ended, which then shapes others' drafts and speed, never their text.

    Attributes:
        size: Tokens at the end of a text that are looked up at most.
        pools: By request id; those that drafted last come last.
    """

    host: ClassVar[bool] = True

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.size = config, vocab_size, self.longest(config)
        self._most, most_bytes = config.max_running_requests, config.ngram_pool_bytes
        self._share = most_bytes // (self._most * (1 + config.ngram_public_pool))
        self.public: TextPool[Index] | None = None
        if config.ngram_public_pool:
            self.public = TextPool(self.make_index, self.size, most_bytes // 2)
        self.pools: OrderedDict[int, TextPool[Index]] = OrderedDict()

    @classmethod
    def build(cls, config: EngineConfig, target: Decoder, *_: Any, **__: Any) -> Self:
        return cls(config, target.config.vocab_size)

    @abstractmethod
    def longest(self, config: EngineConfig) -> int:
        """Tokens at the end of a text that are looked up at most."""

    @abstractmethod
    def make_index(self) -> Index:
        """An empty index."""

    @abstractmethod
    def look_up(self, history: History, pool: TextPool[Index], tier: Tier) -> HostDraft:
        """The draft of one request; ``pool`` is its own, and has its newest tokens."""

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        return [self.look_up(history, self._pool(history), tier) for history in histories]

    def forget(self, history: History) -> None:
        self.pools.pop(history.request_id, None)
        if self.public is not None:
            self.public.add([*history.tokens(0, len(history)), END])

    def _pool(self, history: History) -> TextPool[Index]:
        """The request's pool, with its new tokens."""

        def make() -> TextPool[Index]:
            return TextPool(self.make_index, self.size, self._share)

        # Requests that wait for their turn again must not add up.
        pool = newest(self.pools, history.request_id, make, self._most)
        end = min(len(history), pool.added + TOKENS_A_STEP)
        pool.add(history.tokens(pool.added, end))
        return pool


def best_first(
    root: Node,
    children: Callable[[Node], Iterable[tuple[int, Node, float]]],
    count: int,
    forced: Sequence[int] = (),
) -> HostDraft:
    """The tree of the ``count`` likeliest tokens: parents come before their children, siblings in
    descending order.

    Args:
        children: Of a node: token, node, and probability after its parent, the likeliest first.
        forced: Tokens that are certain, of which ``root`` is the last.
    """
    tokens = list(forced[:count])
    parents, scores = list(range(len(tokens))), [0.0] * len(tokens)
    heap: list[tuple[float, int, int, int, Node]] = []
    order, cost = 0, 0.0
    while len(tokens) < count:
        for token, node, share in children(root):
            order += 1
            heapq.heappush(heap, (cost - math.log(share), order, token, len(tokens), node))
        if not heap:
            break
        cost, _, token, parent, root = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(-cost)
    return HostDraft(
        np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32)
    )
