"""Several drafters in a row: for each request and step the one of which most is to be expected.

Those on the host all draft, each as if it were alone. How much of its drafts a request's own tokens
bear out says what its next one is worth. Where a model is behind them, they draft a step early,
while the device verifies: what is to follow the known text, wherever the step under way comes to. A
request has that in place of the model's draft where it promises more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter, Foreseen, HostDraft, MakeCache, Tables
from overlap_spec.drafters.grafts import graft
from overlap_spec.drafters.registry import load_drafter
from overlap_spec.errors import ConfigError
from overlap_spec.models.decoder import Decoder
from overlap_spec.steps import History
from overlap_spec.tiers import Tier

# Weight of what was seen before at each new step, and of what all requests saw in a new one's.
KEPT, BEFORE = 0.9, 4.0
# So much more a later member's draft must be worth than an earlier one's.
MARGIN = 1.5
# Steps at most until a request's host drafts are looked for again, where none promised enough: one,
# then twice as many each time.
PAUSE = 8


@dataclass
class Tally:
    """How much came of what was ``hoped`` for, tokens or steps, discounted with every step."""

    hoped: float = BEFORE
    got: float = BEFORE

    @property
    def share(self) -> float:
        return self.got / self.hoped

    def add(self, hoped: float, got: float) -> None:
        """Enter one step."""
        self.hoped, self.got = KEPT * self.hoped + hoped, KEPT * self.got + got


@dataclass
class Known:
    """Of one request: a tally of each member, the model's last; what was drafted at which length;
    what the next step may draft of it, and whether the model drafts the one under way. Its members
    are asked again in ``left`` steps, then maybe in twice ``pause``."""

    tallies: list[Tally]
    length: int
    drafts: list[HostDraft] = field(default_factory=list)
    foreseen: Foreseen | None = None
    by_model: bool = True
    left: int = 0
    pause: int = 1


class RowDrafter(Drafter):
    """Drafts by the member on the host that is worth most, or by the ``model`` behind them, if any;
    ``known``: by request id."""

    host: ClassVar[bool] = True

    def __init__(self, members: Sequence[Drafter], model: Drafter | None) -> None:
        super().__init__()
        self.members, self._model = list(members), model
        self.guided = any(member.guided for member in members)
        if model is not None:
            self.feature_layers = model.feature_layers
        # Of all requests.
        self._all = [Tally() for _ in range(len(members) + 1)]
        self.known: OrderedDict[int, Known] = OrderedDict()

    @property
    def behind(self) -> Drafter | None:
        return self._model

    @property
    def built_in(self) -> bool:
        return all(each.built_in for each in (*self.members, self._model) if each is not None)

    @classmethod
    def build(
        cls, config: EngineConfig, target: Decoder, tables: Tables, make_cache: MakeCache
    ) -> Self:
        names = config.drafters
        built = [load_drafter(name).build(config, target, tables, make_cache) for name in names]
        for name, member in zip(names[:-1], built, strict=False):
            if not member.host:
                raise ConfigError(
                    f"algorithm: {name!r} drafts for every request, so that none is asked behind "
                    "it: name it last"
                )
        return cls(built, None) if built[-1].host else cls(built[:-1], built[-1])

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        known = [self._follow(history, tier) for history in histories]
        return [draft for draft, _ in self._best(known, histories, tier)]

    def foresee(self, histories: Sequence[History], tier: Tier) -> list[Foreseen | None]:
        known = [self._follow(history, tier) for history in histories]
        for each in known:
            each.left -= 1
        due = [at for at, each in enumerate(known) if each.left <= 0]
        # What the step under way accepts, its bonus, and the next draft.
        deep = Tier(2 * tier.steps + 1, 1, 2 * tier.steps + 2)
        best = self._best([known[at] for at in due], [histories[at] for at in due], deep)
        for at, (draft, share) in zip(due, best, strict=True):
            each = known[at]
            worth = promised(draft, tier.steps) * share > each.tallies[-1].share * tier.steps
            if worth.any():
                starts = np.where(worth, draft.tokens, -1)
                each.foreseen = Foreseen(draft.tokens, draft.scores, starts)
            each.pause = each.left = 1 if worth.any() else min(2 * each.pause, PAUSE)
        return [each.foreseen for each in known]

    def forget(self, history: History) -> None:
        self.known.pop(history.request_id, None)
        for member in self.members:
            member.forget(history)

    def _best(
        self, known: Sequence[Known], histories: Sequence[History], tier: Tier
    ) -> list[tuple[HostDraft, float]]:
        """Of each request the draft that is worth most, and the share of it that is to come."""
        columns = [member.propose(histories, tier) for member in self.members]
        chosen = []
        for request, history, *drafts in zip(known, histories, *columns, strict=True):
            forced = history.forced[: tier.steps]
            request.drafts = [graft(draft, forced, tier) if len(draft.tokens) else draft
                              for draft in drafts]  # fmt: skip
            shares = [tally.share for tally in request.tallies]
            pairs = list(zip(request.drafts, shares, strict=False))
            worths = [float(np.exp(draft.scores).sum()) * share for draft, share in pairs]
            most = max(worths)
            chosen.append(next(p for p, w in zip(pairs, worths, strict=True) if w * MARGIN >= most))
        return chosen

    def _follow(self, history: History, tier: Tier) -> Known:
        """The request's, with what its new tokens say of the last drafts."""
        found = self.known.get(history.request_id)
        if found is None:
            lean = [Tally(got=BEFORE * tally.share) for tally in self._all]
            self.known[history.request_id] = found = Known(lean, len(history))
        came = history.tokens(found.length, len(history))
        if not came:
            return found
        results = [judge(draft, came) for draft in found.drafts]
        if self._model is not None and found.by_model:
            results += [(0.0, 0.0)] * (len(self.members) - len(results))
            results.append((float(tier.steps), float(min(len(came) - 1, tier.steps))))
        for tallies in (found.tallies, self._all):
            for tally, (hoped, got) in zip(tallies, results, strict=False):
                if hoped:
                    tally.add(hoped, got)
        found.by_model = not drafts_on(found.foreseen, came, history.forced, tier.steps)
        found.length, found.drafts, found.foreseen = len(history), [], None
        return found


def promised(chain: HostDraft, steps: int) -> NDArray[np.float64]:
    """Tokens that a chain lets expect behind each of its own, if that comes; of at most ``steps``
    behind it."""
    chances = np.exp(chain.scores.astype(np.float64))
    sums = chances.cumsum()
    ends = np.minimum(np.arange(len(sums)) + steps, len(sums) - 1)
    found: NDArray[np.float64] = (sums[ends] - sums) / chances
    return found


def drafts_on(
    foreseen: Foreseen | None, came: Sequence[int], forced: Sequence[int], steps: int
) -> bool:
    """Whether what was foreseen is drafted behind the tokens that ``came``, as the worker decides
    (:meth:`overlap_spec.worker.drafts.Drafts.foreseen`)."""
    at = len(came) - 1
    if foreseen is None or at >= len(foreseen.starts) or foreseen.starts[at] != came[-1]:
        return False
    run = foreseen.tokens[at + 1 : at + 1 + steps][: len(forced)]
    return bool(np.array_equal(run, forced))


def judge(draft: HostDraft, came: Sequence[int]) -> tuple[float, float]:
    """How many tokens a draft let expect as deep as ``came`` tells, and how many came."""
    parents = range(len(draft.tokens)) if draft.parents is None else draft.parents.tolist()
    depths, below, hoped = [0], dict[tuple[int, int], int](), 0.0
    nodes = zip(draft.tokens.tolist(), parents, np.exp(draft.scores).tolist(), strict=True)
    for number, (token, parent, chance) in enumerate(nodes, 1):
        depths.append(depths[parent] + 1)
        below[parent, token] = number
        hoped += chance if depths[number] <= len(came) else 0.0
    node = got = 0
    for token in came:
        if (node, token) not in below:
            break
        node, got = below[node, token], got + 1
    return hoped, float(got)
