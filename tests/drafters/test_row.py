"""Drafters in a row: who goes is decided by what came of drafts before, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.drafters.base import Drafter, Foreseen, HostDraft
from overlap_spec.drafters.row import RowDrafter, Tally, drafts_on, judge
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
    row = RowDrafter([Says([1, 1, 1], 0.9), Says([2, 2, 2], 0.6)], None)
    history = History(0, [5], [])
    drafted = [step(row, history, [2, 2, 2, 2]) for _ in range(6)]
    assert drafted[0] == [1, 1, 1]
    assert drafted[-1] == [2, 2, 2]
    # Another request has the hope that all have seen, and no more of this one.
    assert step(row, History(1, [5], []), []) == [2, 2, 2]


def ahead(
    row: RowDrafter, histories: Sequence[History], came: Sequence[Sequence[int]]
) -> list[Any]:
    """What was foreseen while a step ran, and then the tokens that it brings."""
    found = row.foresee(histories, CHAIN)
    for history, tokens in zip(histories, came, strict=True):
        assert isinstance(history.output, list)
        history.output.extend(tokens)
    return found


def test_what_promises_more_than_the_model_is_drafted_a_step_early() -> None:
    sure, unsure = Says([1] * 9, 0.97), Says([1], 0.2)
    # The model's drafts are refused, or accepted.
    for member, came, ours in ((sure, [1], True), (sure, [3] * 5, False), (unsure, [3], False)):
        row = RowDrafter([member], Model([], 1.0))
        history = [History(0, [5], [])]
        for _ in range(20):
            (found,) = ahead(row, history, [came])
            if found is not None:
                break
        assert (found is not None) == ours


def test_a_draft_starts_where_enough_is_left_of_the_chain() -> None:
    row = RowDrafter([Says(range(9), 0.97)], Model([], 1.0))
    histories = [History(0, [5], [])]
    ahead(row, histories, [[]])
    # Of four drafts of the model's one is accepted.
    row.known[0].tallies, row.known[0].left = [Tally(4.0, 4.0), Tally(4.0, 1.0)], 0
    (found,) = ahead(row, histories, [[]])
    assert found.tokens.tolist() == [*range(9)]
    # Behind the last but one a single token is left, and behind the last none.
    assert found.starts.tolist() == [*range(7), -1, -1]


def test_who_drafted_is_told_by_what_came() -> None:
    chain = Foreseen(np.array([1, 2, 3, 4]), np.zeros(4, np.float32), np.array([1, -1, 3, -1]))
    assert drafts_on(chain, [1], (), 2)
    assert drafts_on(chain, [9, 9, 3], (), 2)
    assert drafts_on(chain, [1], [2, 3], 2)
    for came, forced in (([1, 2], ()), ([2], ()), ([1], [3]), ([1], [2, 3, 4]), ([1] * 5, ())):
        assert not drafts_on(chain, came, forced, 2)
    assert not drafts_on(None, [1], (), 2)


def test_what_promises_nothing_is_asked_less_often() -> None:
    asked = []

    class Counted(Says):
        def propose(self, histories: Sequence[History], tier: Tier) -> list[HostDraft]:
            asked.append(len(histories))
            return super().propose(histories, tier)

    row = RowDrafter([Counted([1], 0.2)], Model([], 1.0))
    for _ in range(31):
        ahead(row, [History(0, [5], [])], [[3, 3, 3]])
    # At steps 1, 3, 7, 15, 23 and 31.
    assert sum(asked) == 6
    row.forget(History(0, [5], []))
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
    """Repeated text beside free text: some trees are the host's, others the head's. No step waits
    for the one before, so that accept lengths are those of the serial mode."""
    overlaid = []
    before = Drafts.overlay

    def overlay(*given: Any) -> Any:
        overlaid.append(given)
        return before(*given)

    monkeypatch.setattr(Drafts, "overlay", overlay)
    prompts = ["abcabcabcabc", "xyz xyz xyz", "0123456789", "9876543210"]
    grammars = [Grammar.regex(text) for text in ("(abcdefghij){9}", "[a-d]{60}", "[e-h]{60}")]
    grammars.insert(1, None)
    asked = {"max_tokens": 90, "temperature": 0}
    with Engine(**tiny, algorithm="none", overlap="none") as engine:
        want = engine.generate(prompts, grammars, asked)
    lengths = []
    for overlap in ("none", "once-sync"):
        named = {"algorithm": " Suffix, eagle3", "overlap": overlap}
        with Engine(**tiny, **named) as engine:
            assert not engine.core.worker.traits.drafts_on_host
            got = engine.generate(prompts, grammars, asked)
            assert engine.snapshot()["drafter"]["name"] == "suffix,eagle3"
            assert engine.snapshot()["drafter"]["faults"] == 0
            lengths.append([engine.generate(p, g, asked).stats.accept_length
                            for p, g in zip(prompts, grammars, strict=True)])  # fmt: skip
        assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert lengths[0] == lengths[1]
    assert overlaid


def test_a_target_without_a_head_has_a_row(tiny: dict[str, Any]) -> None:
    headless = {name: value for name, value in tiny.items() if name != "draft"}
    assert EngineConfig.build(**tiny).drafter == "eagle3"
    assert EngineConfig.build().drafter == "eagle3"
    assert EngineConfig.build(**headless, algorithm="none").drafter == "none"
    with Engine(**headless) as engine:
        assert engine.snapshot()["drafter"]["name"] == "slots,suffix"
        output = engine.generate("x", Grammar.regex("(abcdefghij){6}"), {"temperature": 0})
    assert output.text == "abcdefghij" * 6
    assert output.stats.accept_length > 3
