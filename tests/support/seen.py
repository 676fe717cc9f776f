"""What a drafter that tells all depths at once has computed."""

from typing import Any

import pytest
from torch import Tensor

from overlap_spec.drafters.base import Roots
from overlap_spec.drafters.marginals import MarginalDrafter


class Seen:
    """The states of every draft, with their roots, and the drafts themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[MarginalDrafter]) -> None:
        self.states: list[Tensor] = []
        self.drafts: list[tuple[Roots, Any]] = []
        depths, draft = kind.depths, kind.draft

        def look(drafter: Any, roots: Roots, count: int) -> Tensor:
            self.states.append(depths(drafter, roots, count))
            return self.states[-1]

        def keep(drafter: Any, roots: Roots, tier: Any) -> Any:
            self.drafts.append((roots, draft(drafter, roots, tier)))
            return self.drafts[-1][1]

        monkeypatch.setattr(kind, "depths", look)
        monkeypatch.setattr(kind, "draft", keep)
