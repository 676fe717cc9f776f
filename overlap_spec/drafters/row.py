"""Several drafters in a row: for each request and step the one of which most is to be expected.

Those on the host draft first, each as if it were alone. How much of its drafts a request's own
tokens bear out says what its next one is worth. A model behind them drafts where it brings more
tokens a millisecond for the batch; then requests whose host draft is worth more keep that.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, Self

import numpy as np

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import NOTHING, Drafter, HostDraft, MakeCache, Tables
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
# What a step with a model's drafts takes of one without, while that is not measured, or where
# nothing may depend on a clock; steps of which the median counts.
MODEL_COST, STEPS = 1.5, 15


@dataclass
class Tally:
    """A sum over what was hoped for, discounted with every step: tokens expected, or steps."""

    hoped: float
    got: float

    @property
    def share(self) -> float:
        """What came of each one that was hoped for."""
        return self.got / self.hoped

    def add(self, hoped: float, got: float) -> None:
        """Enter one step."""
        self.hoped, self.got = KEPT * self.hoped + hoped, KEPT * self.got + got

    def lean(self) -> Tally:
        """As much, of the weight that it has for a new request."""
        return Tally(BEFORE, BEFORE * self.share)


@dataclass
class Known:
    """Of one request: a tally of each member, the model's last; what was drafted at which length,
    and whether by the model."""

    tallies: list[Tally]
    length: int = 0
    drafts: list[HostDraft] = field(default_factory=list)
    by_model: bool = False


class RowDrafter(Drafter):
    """Drafts by the member that is worth most.

    Args:
        members: On the host.
        model: The one behind them, if any.
        clocked: Whether steps' times are measured.

    Attributes:
        known: By request id.
    """

    host: ClassVar[bool] = True

    def __init__(self, members: Sequence[Drafter], model: Drafter | None, clocked: bool) -> None:
        super().__init__()
        self.members, self._model, self._clocked = list(members), model, clocked
        self.guided = any(member.guided for member in members)
        if model is not None:
            self.feature_layers = model.feature_layers
        # Of all requests. What a model brings a step is not known before.
        self._all = [Tally(BEFORE, BEFORE) for _ in range(len(members) + 1)]
        self.known: OrderedDict[int, Known] = OrderedDict()
        # By batch, and whether the model drafts.
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        # When the last step began, and of which kind it was.
        self._last: tuple[float, tuple[int, bool]] | None = None

    @property
    def behind(self) -> Drafter | None:
        return self._model

    @property
    def built_in(self) -> bool:
        everyone = self.members if self._model is None else [*self.members, self._model]
        return all(member.built_in for member in everyone)

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
        last = built[-1]
        members, model = (built, None) if last.host else (built[:-1], last)
        return cls(members, model, config.adaptive.lower() != "static")

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        begun = self._step_begins()
        known = [self._follow(history, tier) for history in histories]
        columns = [member.propose(histories, tier) for member in self.members]
        chosen, hosts, models = list[HostDraft](), list[float](), list[float]()
        for request, history, *drafts in zip(known, histories, *columns, strict=True):
            forced = history.forced[: tier.steps]
            request.drafts = [graft(draft, forced, tier) if len(draft.tokens) else draft
                              for draft in drafts]  # fmt: skip
            worths = [
                float(np.exp(draft.scores).sum()) * tally.share
                for draft, tally in zip(request.drafts, request.tallies, strict=False)
            ]
            most = max(worths)
            best = next(at for at, worth in enumerate(worths) if worth * MARGIN >= most)
            chosen.append(request.drafts[best])
            hosts.append(worths[best])
            models.append(max(request.tallies[-1].share, len(forced)))
            request.length = len(history)
        batch = len(histories)
        both = [max(pair) for pair in zip(hosts, models, strict=True)]
        asks = self.behind is not None and (
            (batch + sum(both)) * self._cost(batch, False)
            > (batch + sum(hosts)) * self._cost(batch, True)
        )
        for at, request in enumerate(known):
            request.by_model = asks and models[at] >= hosts[at]
            if request.by_model:
                chosen[at] = NOTHING
        self._last = begun, (batch, asks)
        return chosen

    def forget(self, history: History) -> None:
        self.known.pop(history.request_id, None)
        for member in self.members:
            member.forget(history)

    def _follow(self, history: History, tier: Tier) -> Known:
        """The request's, with what its new tokens say of the last drafts."""
        found = self.known.get(history.request_id)
        if found is None:
            found = Known([tally.lean() for tally in self._all])
            found.tallies[-1].got += BEFORE * tier.steps / 2 if self.behind is not None else 0.0
            self.known[history.request_id] = found
            return found
        came = history.tokens(found.length, len(history))
        results = [judge(draft, came) for draft in found.drafts]
        if found.by_model and came:
            results.append((1.0, float(min(len(came) - 1, tier.steps))))
        for tallies in (found.tallies, self._all):
            for tally, (hoped, got) in zip(tallies, results, strict=False):
                if hoped:
                    tally.add(hoped, got)
        return found

    def _cost(self, batch: int, by_model: bool) -> float:
        times = [self._seconds.get((batch, kind)) for kind in (False, True)]
        if all(times):
            return median(times[by_model] or ())
        return MODEL_COST if by_model else 1.0

    def _step_begins(self) -> float:
        """Now; between two such lies one step, whose time is noted."""
        now = time.perf_counter()
        if self._clocked and self._last is not None:
            begun, kind = self._last
            self._seconds.setdefault(kind, deque(maxlen=STEPS)).append(now - begun)
        return now


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
