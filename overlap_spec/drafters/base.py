"""What the worker asks of a drafter, and what it lends to one.

A drafter is one file, ``drafters/NAME.py``, with one :class:`Drafter`; NAME is its
``speculative-algorithm``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from overlap_spec.config import EngineConfig
from overlap_spec.kernels import GrammarStanding, Noise, noise_keys
from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Attend, Decoder, Heads
from overlap_spec.steps import History, Int64s
from overlap_spec.tiers import Floats, Tier


class DraftCache(Protocol):
    """A paged cache of a drafter's own keys, on the same pages as the target's.

    Slot i of a sequence belongs to token i; a page's content depends on nothing after it.
    """

    def attend(
        self, pages: Tensor, slots: Tensor, prefix: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Attend:
        """Attention of one rectangle of queries, which stores their keys first.

        Args:
            pages: int64 ``(B, P)``: :attr:`Roots.pages`.
            slots: int64 ``(B, Q)``: logical slots into which the queries' own keys go.
            prefix: int64 ``(B,)``: cached keys that every query sees.
            positions: int64 ``(B, Q)``: each query's position.
            mask: bool ``(B, Q, W)``: which of the W keys after the prefix each query sees; None:
                causal.
        """


class MakeCache(Protocol):
    """Makes a drafter's cache; its memory is there once the drafter has been built."""

    def __call__(self, layers: ModelConfig, first: int = 0) -> DraftCache:
        """A cache for layers of this shape; slots below ``first`` do not exist."""


class Tables(Protocol):
    """The rows' state on the device, int64; R rows, the last of which belongs to no request:
    ``committed (R,)``, the roots' positions, ``roots (R,)``, last committed tokens, and ``pages
    (R, P)``. ``vocab_size``: the target's."""

    committed: Tensor
    roots: Tensor
    pages: Tensor
    vocab_size: int


class Roots(NamedTuple):
    """The trees' roots, int64: ``rows (B,)`` and their ``pages (B, P)``, last committed
    ``tokens (B,)`` and their ``positions (B,)``, and ``forced (B, L)``: the likely tokens of what
    the grammar forces behind each root, -1 behind their end.

    ``temperature`` float32 ``(B,)``, 0 where a row is greedy, and ``seeds`` int64 ``(B,)``: with
    them :meth:`noise` is that of the target's choices. None where all rows are greedy.

    ``standing``: where each root stands in its grammar's table; None: no row has a grammar, or the
    drafter does not read them.
    """

    rows: Tensor
    pages: Tensor
    tokens: Tensor
    positions: Tensor
    forced: Tensor
    temperature: Tensor | None = None
    seeds: Tensor | None = None
    standing: GrammarStanding | None = None

    def noise(self, depth: int, branches: int) -> Noise | None:
        """The noise of the tokens at ``depth``, the root's children being at 1: of the children of
        ``branches`` nodes a root, ``(B * branches,)``."""
        if self.temperature is None or self.seeds is None:
            return None
        keys = noise_keys(self.seeds, self.positions + depth)
        return Noise(*(each.repeat_interleave(branches) for each in (self.temperature, keys)))


class Draft(NamedTuple):
    """Drafted nodes after each root, in node order: node n is number ``n - 1`` here.

    ``tokens`` int64 ``(B, M)``: siblings are distinct and in descending probability. ``parents``
    int64 ``(B, M)``: each one's parent node (0: the root), which comes earlier; None: a chain.
    ``scores`` float32 ``(B, M)``: summed log-probability of the node's path; at most the parent's.
    -inf is a dead node: it is not verified, nor is any node after it on its path.
    """

    tokens: Tensor
    parents: Tensor | None
    scores: Tensor


class HostDraft(NamedTuple):
    """A :class:`Draft` made on the host, of one request: numpy arrays ``(m,)``, m <= M."""

    tokens: Int64s
    parents: Int64s | None
    scores: Floats


class Foreseen(NamedTuple):
    """What a drafter on the host takes to follow a known text, of which more is computed already:
    a chain of ``tokens`` int64 ``(m,)``, and their ``scores`` as of a :class:`HostDraft`. Where the
    text has gone on to one of ``starts`` int64 ``(m,)``, the tokens behind that one are worth a
    draft; -1 where they are not."""

    tokens: Int64s
    scores: Floats
    starts: Int64s


# Of a drafter on the host that has nothing to propose.
NOTHING = HostDraft(np.empty(0, np.int64), None, np.empty(0, np.float32))


class Committed(ABC):
    """Committed tokens on their way into the drafter.

    Attributes:
        tokens, positions: int64 ``(T,)``.
        features: ``(T, F)``, of the position before each token: the target's
            :attr:`Drafter.feature_layers` side by side; None where the drafter asks for none.
        rows, last: int64 ``(B,)``: the new root of ``rows[b]`` is token number ``last[b]``.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor | None
    rows: Tensor
    last: Tensor

    @abstractmethod
    def attend(self, cache: DraftCache) -> Attend:
        """Attention of these tokens over what ``cache`` holds of their sequences."""

    @abstractmethod
    def store(self, cache: DraftCache, layer: int, heads: Heads) -> None:
        """Put these tokens' keys and values of a layer into ``cache``, for later queries alone."""


class Drafter(nn.Module, ABC):
    """Proposes a tree after each root; takes in what was accepted.

    A recorded drafter's methods are run once and replayed for batches of other sizes: what they do
    depends on shapes and on the tier alone, sizes are taken from ``tensor.shape``, no result is
    read on the host, and what is kept between calls is a registered buffer with an entry for each
    row of the tables, written in place. The worker checks a recording against the method itself. A
    drafter that raises, or is recorded wrongly, costs requests their drafts alone.

    Attributes:
        feature_layers: Layers of the target whose inputs :meth:`extend` receives (``num_layers``:
            the last output; ``models.decoder.NORMED_OUTPUT``: that after the final norm). Set by
            the instance where it depends on the checkpoint.
        recorded: Whether both methods may be recorded. What a recorded drafter takes in of prompts
            may run beside what it takes in of trees, which are other rows.
        host: Whether it drafts on the host, by :meth:`propose` in place of :meth:`draft`.
        guided: Whether it reads the :attr:`History.guide` of requests there.
    """

    feature_layers: tuple[int, ...] = ()
    recorded: ClassVar[bool] = True
    host: ClassVar[bool] = False
    guided: bool = False

    @property
    def behind(self) -> Drafter | None:
        """Of a drafter that is ``host``: what drafts on the device where it foresees nothing. Such
        a one has :meth:`foresee` in place of :meth:`propose`, and no step waits for it."""
        return None

    @property
    def built_in(self) -> bool:
        """Whether it is of this project, so that its drafts need no checks."""
        return type(self).__module__.startswith("overlap_spec.drafters.")

    @classmethod
    @abstractmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Drafter:
        """The drafter for ``target``.

        Args:
            config: The engine's settings; :attr:`EngineConfig.draft_path` is the drafter's folder.
            target: On its device, in its type, not yet packed.
            tables: State of the rows; not to be written.
            make_cache: Called once for each cache that the drafter has.

        Raises:
            ConfigError: a setting that this drafter cannot have.
            CheckpointError: a checkpoint that does not fit the target.
        """

    def draft(self, roots: Roots, tier: Tier) -> Draft:
        """``tier.nodes - 1`` nodes a root, at most ``tier.steps`` deep; ``tier.steps`` >= 1."""
        raise NotImplementedError(f"{type(self).__name__} must have draft or, as host, propose")

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        """The same on the host, for a drafter that is ``host``. Each request's root is the last of
        its known tokens. These are live: what is to be kept of them is copied. What a draft lacks
        of their ``forced`` tokens, the worker puts into it."""
        raise NotImplementedError(f"{type(self).__name__} must have propose")

    def foresee(self, histories: Sequence[History], tier: Tier) -> list[Foreseen | None]:
        """For the step after the one under way, whose ``tier`` and whose roots, the last tokens of
        ``histories``, these are, while that is verified."""
        raise NotImplementedError(f"{type(self).__name__} must have foresee")

    def forget(self, history: History) -> None:
        """A request has ended, and is never asked for again; for a drafter that is ``host``."""

    def extend(self, committed: Committed) -> None:
        """Take in committed tokens, so that the next draft can start after them."""


def host_draft(drafts: Sequence[HostDraft], tier: Tier) -> tuple[Int64s, Int64s, Floats]:
    """Drafts of a batch as rectangles ``(B, tier.nodes - 1)``: what is missing is dead. ValueError:
    a draft that is too long or whose parents are no earlier nodes."""
    shape = len(drafts), tier.nodes - 1
    tokens, parents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    scores = np.full(shape, -np.inf, np.float32)
    for row, draft in enumerate(drafts):
        count = len(draft.tokens)
        own = np.arange(count) if draft.parents is None else np.asarray(draft.parents)
        if count > shape[1] or len(own) != count or len(draft.scores) != count:
            raise ValueError(f"draft {row} has {count} nodes; at most {shape[1]} fit the tier")
        if count and not ((own >= 0) & (own <= np.arange(count))).all():
            raise ValueError(f"draft {row}: a node's parent must be an earlier node")
        tokens[row, :count], parents[row, :count] = draft.tokens, own
        scores[row, :count] = draft.scores
    return tokens, parents, scores
