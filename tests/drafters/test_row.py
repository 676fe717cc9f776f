"""Drafters in a row: who goes is decided by what came of drafts before, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter, HostDraft
from overlap_spec.drafters.row import RowDrafter, judge
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.steps import History
from overlap_spec.tiers import Tier
from overlap_spec.worker.drafts import Drafts

CHAIN = Tier(4, 1, 5)


class Says(Drafter):
    """Drafts the same tokens always, each with the same chance behind the one before."""

    host: ClassVar[bool] = True

    def __init__(self, tokens: Sequence[int], chance: float) -> None:
        super().__init__()
        self.tokens, self.scores = tokens, np.log(chance) * np.arange(1, len(tokens) + 1)

    @classmethod
    def build(cls, *_: Any) -> Says:
        return cls((), 1.0)

    def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
        count = tier.steps
        draft = HostDraft(
            np.array(self.tokens[:count], np.int64), None, self.scores[:count].astype(np.float32)
        )
        return [draft] * len(histories)


class Model(Says):
    host = False


def step(row: RowDrafter, history: History, came: Sequence[int]) -> list[int]:
    """What a step drafts, and then the tokens that it brings."""
    (draft,) = row.propose([history], CHAIN)
    assert isinstance(history.output, list)
    history.output.extend(came)
    return draft.tokens.tolist()


def test_what_came_of_a_draft() -> None:
    tree = HostDraft(
        np.array([1, 2, 3, 4]), np.array([0, 0, 1, 3]), np.log([0.5, 0.4, 0.25, 0.2]).astype("f4")
    )
    # As deep as it can be told: three levels of nodes, of which the path 1, 3 came.
    assert judge(tree, [1, 3, 9]) == (pytest.approx(1.35), 2.0)
    assert judge(tree, [2]) == (pytest.approx(0.9), 1.0)
    assert judge(tree, []) == (0.0, 0.0)


def test_who_was_right_before_goes() -> None:
    """The second member promises less, and is right."""
    row = RowDrafter([Says([1, 1, 1], 0.9), Says([2, 2, 2], 0.6)], None, clocked=False)
    history = History(0, [5], [])
    drafted = [step(row, history, [2, 2, 2, 2]) for _ in range(6)]
    assert drafted[0] == [1, 1, 1]
    assert drafted[-1] == [2, 2, 2]
    # Another request has the hope that all have seen, and no more of this one.
    assert step(row, History(1, [5], []), []) == [2, 2, 2]


def test_a_model_goes_where_it_brings_more() -> None:
    sure, unsure = Says([1, 1, 1, 1], 0.97), Says([1], 0.2)
    for member, came, by_model in ((sure, [1] * 5, False), (unsure, [3, 3, 3, 3], True)):
        row = RowDrafter([member], Model([], 1.0), clocked=False)
        history = History(0, [5], [])
        drafted = [step(row, history, came) for _ in range(6)]
        assert (drafted[-1] == []) == by_model


def test_one_batch_has_both() -> None:
    """Where a model drafts for some requests, others keep what the host is surer of."""

    class Sure(Says):
        def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
            found = super().propose(histories, tier)
            nothing = HostDraft(np.empty(0, np.int64), None, np.empty(0, np.float32))
            return [d if h.request_id == 0 else nothing for d, h in zip(found, histories)]  # noqa: B905

    row = RowDrafter([Sure([1, 1, 1, 1], 0.99)], Model([], 1.0), clocked=False)
    known = [History(n, [5], []) for n in range(3)]
    for _ in range(6):
        drafts = row.propose(known, CHAIN)
        for history, came in zip(known, ([1] * 5, [3, 3, 3], [3, 3, 3]), strict=True):
            assert isinstance(history.output, list)
            history.output.extend(came)
    assert [len(draft.tokens) for draft in drafts] == [4, 0, 0]
    for history in known:
        row.forget(history)
    assert not row.known


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("suffix,telepathy", "algorithm must be one of .*: 'telepathy'"),
        ("suffix,none", "algorithm must be one of .*: 'none'"),
        ("suffix,", "algorithm must be one of .*: ''"),
        ("suffix,Suffix", "algorithm: 'suffix' is named twice"),
        ("eagle3,suffix", "algorithm: 'eagle3' drafts for every request.*name it last"),
    ],
)
def test_what_is_no_row_is_an_error(tiny: dict[str, Any], named: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(**tiny, algorithm=named)


def test_both_draft_in_an_engine(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated text beside free text: some trees are the host's, others the head's."""
    overlaid = []
    before = Drafts.overlay

    def overlay(*given: Any) -> Any:
        overlaid.append(given)
        return before(*given)

    monkeypatch.setattr(Drafts, "overlay", overlay)
    prompts = ["abcabcabcabc", "xyz xyz xyz", "0123456789"]
    grammars = [Grammar.regex("(abcdefghij){9}"), None, Grammar.regex("[a-d]{60}")]
    asked = {"max_tokens": 90, "temperature": 0}
    with Engine(**tiny, algorithm="none", overlap="none") as engine:
        want = engine.generate(prompts, grammars, asked)
    with Engine(**tiny, algorithm=" Suffix, eagle3", adaptive="static") as engine:
        got = engine.generate(prompts, grammars, asked)
        assert engine.snapshot()["drafter"]["name"] == "suffix,eagle3"
        assert engine.snapshot()["drafter"]["faults"] == 0
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert overlaid


def test_a_target_without_a_head_has_a_row(tiny: dict[str, Any]) -> None:
    headless = {name: value for name, value in tiny.items() if name != "draft"}
    assert EngineConfig.build(**tiny).drafter == "eagle3"
    assert EngineConfig.build().drafter == "eagle3"
    assert EngineConfig.build(**headless, algorithm="none").drafter == "none"
    with Engine(**headless, adaptive="static") as engine:
        assert engine.snapshot()["drafter"]["name"] == "slots,suffix"
        output = engine.generate("x", Grammar.regex("(abcdefghij){6}"), {"temperature": 0})
    assert output.text == "abcdefghij" * 6
    assert output.stats.accept_length > 3
