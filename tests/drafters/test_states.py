"""Tables of grammars' states: what they allow, and what a drafter makes of them."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.drafters.tree_drafter import TreeDrafter
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_drafts import Parts
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.drafting import byte_states as unrolling
from overlap_spec.grammar.drafting.byte_states import byte_states
from overlap_spec.grammar.drafting.forced import ForcedRuns
from overlap_spec.grammar.drafting.state_table import Standing, StateTable, token_steps
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.kernels import (
    GrammarStanding,
    Noise,
    StateTables,
    legal_candidates,
    log_probs_among,
    noise_keys,
    top_candidates,
)
from overlap_spec.kernels.sampling import CHOICE
from overlap_spec.steps import (
    COMMON_STATES,
    DEAD,
    FEW_TOKENS,
    FIRST,
    LOST,
    STATE_WIDTH,
    TOKEN_STEPS,
)
from overlap_spec.worker.grammar_drafts import GrammarDrafts
from tests.support.grafts import PERSON, PROMPTS, SAMPLING, SHAPES, key, lengths
from tests.support.tiers import few

CPU = torch.device("cpu")
WORDS = [b"na", b"name", b'":', b'":"', b'"}', b"tr", b"rue", b"12", b", ", b'{"', b"x" * 20]
TEXTS = [*(bytes([b]) for b in range(256)), b"", *WORDS, b"na", "é".encode(), b""]
STOP, SPECIAL = 256, len(TEXTS) - 1
VOCABULARY = Vocabulary(tuple(TEXTS), len(TEXTS), (STOP,), frozenset((SPECIAL,)))
GRAMMARS = {
    "object": Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "kind": {"enum": ["red", "reddish", "blue"]},
                "is": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    ),
    "pattern": Grammar.regex(r"[A-Z][a-z]+é?(-[0-9]{2,4})*"),
    "choice": Grammar.choice(["yes", "yesterday", "no"]),
    "free keys": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}
    ),
    "recursive": Grammar.ebnf('root ::= "x" | "(" root ")" | "[" root "]"'),
    "two circles": Grammar.ebnf(
        'root ::= a | b\na ::= "x" | "(" a ")" "."\nb ::= "y" | "(" b "]" ","'
    ),
    "left recursive": Grammar.ebnf('root ::= root "+" root | "1"'),
    "right recursive": Grammar.ebnf('root ::= "a" root | "b"'),
}


def follower(table: StateTable) -> GrammarStanding:
    """A text's start in a table."""
    standing = Standing()
    standing.enter(table, COMMON_STATES)
    return standing


def after_bytes(table: StateTable, state: int | None = None) -> NDArray[np.int32]:
    """The states after each byte: of one state, or of all that are the table's own."""
    rows = slice(COMMON_STATES, None) if state is None else state // STATE_WIDTH
    return table.moves[rows, :256]


def walks(grammar: Grammar, table: StateTable) -> tuple[int, int, int]:
    """Random texts under a grammar, beside its table: illegal tokens that were met, those of them
    that the table forbids, and bytes that it forces. What is legal it must allow."""
    compiled, rng = load("reference")(VOCABULARY).compile(grammar), random.Random(1)
    standing = follower(table)
    illegal = forbidden = told = 0
    for _ in range(8):
        matcher, state = compiled.matcher(), FIRST
        row = np.zeros(VOCABULARY.words, np.int32)
        for _ in range(40):
            matcher.fill(row)
            flags = np.unpackbits(row.view(np.uint8), bitorder="little")[: VOCABULARY.size]
            legal = set(np.flatnonzero(flags).tolist()) - {STOP}
            if state != LOST:
                after = {t: standing.after(state, text) for t, text in enumerate(VOCABULARY.text)}
                assert all(after[token] != DEAD for token in legal)
                assert table.final[state // STATE_WIDTH] or not matcher.is_complete
                forced = standing.forced(state, 99)
                assert matcher.forced_bytes().startswith(forced)
                told += len(forced)
                wrong = [t for t, text in enumerate(VOCABULARY.text) if text and t not in legal]
                illegal += len(wrong)
                forbidden += sum(after[token] == DEAD for token in wrong)
                *few, closed = table.few[state // STATE_WIDTH].tolist()
                listed = {VOCABULARY.text[t] for t in few if t >= 0}
                texts = {VOCABULARY.text[t] for t in legal}
                assert not closed or len(listed) == FEW_TOKENS or listed >= texts
            if not legal:
                break
            token = rng.choice(sorted(legal))
            assert matcher.accept(token)
            state = standing.after(state, VOCABULARY.text[token])
    return illegal, forbidden, told


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_table_allows_what_its_grammar_does_and_little_more(name: str) -> None:
    illegal, forbidden, told = walks(GRAMMARS[name], byte_states(GRAMMARS[name], VOCABULARY))
    assert forbidden > 500
    assert told > 5 or name in ("pattern", "recursive", "left recursive", "right recursive")
    # How often to go back, and so whether the grammar may end, is forgotten in circles.
    assert 0.95 * illegal < forbidden <= illegal
    assert name in ("recursive", "two circles") or forbidden == illegal


def test_what_lies_behind_the_limit_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = byte_states(GRAMMARS["object"], VOCABULARY)
    monkeypatch.setattr(unrolling, "MOST_STATES", 30)
    table = byte_states(GRAMMARS["object"], VOCABULARY)
    assert len(table.moves) == COMMON_STATES + 30 < len(whole.moves)
    assert (after_bytes(table) == LOST).any()
    assert not (after_bytes(whole) == LOST).any()
    walks(GRAMMARS["object"], table)
    # The least deep come first: the text is told as long as it is not deep.
    standing = follower(table)
    text = b'{"name":"x","kind":"red","tags":["\\u00ffx'
    assert standing.after(FIRST, b'{"name":"') >= FIRST
    assert standing.after(FIRST, text) == LOST == standing.after(FIRST, text + b"}")
    monkeypatch.setattr(unrolling, "MOST_NODES", 3)
    with pytest.raises(GrammarError):
        byte_states(GRAMMARS["object"], VOCABULARY)


def test_only_how_deep_a_circle_goes_is_forgotten() -> None:
    tree = Grammar.json_schema(
        {
            "$defs": {"node": {"type": "object", "properties": {"n": {"type": "null"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["n", "below"], "additionalProperties": False}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"type": "null"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )  # fmt: skip
    table = byte_states(tree, VOCABULARY)
    assert not (after_bytes(table) == LOST).any()
    standing = follower(table)
    after = standing.after(FIRST, b'{"a":{"n":null,"below":[')
    # A node's keys are forced however deep it stands, and so is what ends a list.
    deep = standing.after(after, b'{"n":null,"below":[' * 50)
    for state in (after, deep):
        assert set(np.flatnonzero(after_bytes(table, state) != DEAD)) == set(b"{]")
        assert set(np.flatnonzero(after_bytes(table, standing.after(state, b"{")) != DEAD)) == {34}
    # A list may end as often as one likes, but only where a list stands.
    for state in (after, deep):
        for times in (1, 2, 51):
            assert standing.after(state, b"]}" * times + b',"b":null}') >= FIRST
        assert standing.after(state, b"]]") == DEAD == standing.after(state, b"}")
        assert standing.after(state, b']},"n"') == DEAD


def test_a_table_survives_its_way_between_processes() -> None:
    table = byte_states(GRAMMARS["object"], VOCABULARY)
    again = StateTable.from_bytes(table.to_bytes(), VOCABULARY.size)
    assert isinstance(again, StateTable)
    for part, same in zip(table, again, strict=True):
        assert part.dtype == same.dtype
        np.testing.assert_array_equal(part, same)


def test_few_tokens_are_listed_and_too_many_are_cut() -> None:
    table = byte_states(Grammar.regex("a{30}b"), VOCABULARY)
    # High counts are loops.
    assert len(table.moves) < 28
    standing = follower(table)
    assert standing.after(FIRST, b"a" * 20 + b"b") != DEAD == standing.after(FIRST, b"aab")
    assert table.few[COMMON_STATES].tolist() == [ord("a"), *[-1] * (FEW_TOKENS - 1), 1]
    long = Vocabulary((*(b"x" * n for n in range(12)), b"y"), 13, (0,), frozenset())
    table = byte_states(Grammar.ebnf(f'root ::= "{"x" * 11}y" [a-z]*'), long)
    assert table.few[COMMON_STATES].tolist() == [1, 2, 3, 4, 8, 9, 10, 11, 1]
    # One byte more, and a token could go on behind what is forced.
    table = byte_states(Grammar.ebnf('root ::= "xxx" [a-z]*'), long)
    assert table.few[COMMON_STATES].tolist()[:4] == [1, 2, 3, -1]
    assert table.few[COMMON_STATES, -1] == 0


def device_states(table: StateTable, base: int) -> GrammarDrafts:
    states = GrammarDrafts(4, VOCABULARY.size, 2200, CPU)
    states.write({"texts": (0, token_steps(VOCABULARY.text, VOCABULARY.stop_ids))})
    states.write(table.parts(base))
    return states


@pytest.mark.parametrize("name", ["object", "recursive"])
def test_the_device_knows_what_the_host_does(name: str) -> None:
    table = byte_states(GRAMMARS[name], VOCABULARY)
    base = COMMON_STATES + 17
    states, standing = device_states(table, base), Standing()
    standing.enter(table, base)
    for text in (b"(", b"["):
        standing.read(-1, text)
    assert standing.state == follower(table).after(FIRST, b"([")
    for state in (LOST, DEAD, *range(FIRST, STATE_WIDTH * min(63, len(table.moves)), STATE_WIDTH)):
        told = torch.full((VOCABULARY.size,), standing.number(state), dtype=torch.int32)
        after = states.after(told, torch.arange(VOCABULARY.size)).tolist()
        for token, text in enumerate(VOCABULARY.text):
            want = standing.number(standing.after(state, text))
            if token == STOP:
                ends = state >= FIRST and table.final[state // STATE_WIDTH]
                want = 2 * STATE_WIDTH if ends else standing.number(min(state, DEAD))
            elif not text:
                want = standing.number(min(state, DEAD))
            elif len(text) > TOKEN_STEPS and want != STATE_WIDTH:
                want = LOST
            assert after[token] == want, (state, token)
    # Of a node whose state was not told, and of no token at all, nothing is known.
    unknown = states.after(torch.tensor([-1, 0]).int(), torch.tensor([5, -1]))
    assert unknown.tolist() == [LOST, LOST]


def test_tables_share_the_room_and_give_way_when_nobody_reads_them() -> None:
    def table(count: int) -> StateTable:
        moves, few = np.zeros((count, 256), np.uint16), np.zeros((count, FEW_TOKENS + 1), np.int32)
        return StateTable.of(moves, np.zeros(count, bool), few)

    rooms, a, b, c = Parts(COMMON_STATES, 10), table(4), table(4), table(6)
    assert rooms.enter(1, a) == (COMMON_STATES, True)
    assert rooms.enter(2, a) == (COMMON_STATES, False)
    assert rooms.enter(3, b) == (COMMON_STATES + 4, True)
    assert rooms.enter(4, c) is None
    rooms.leave(1)
    assert rooms.enter(4, c) is None
    # A table that is read no more stays until its room is needed, the oldest going first.
    rooms.leave(3)
    assert rooms.enter(3, b) == (COMMON_STATES + 4, False)
    rooms.leave(3)
    rooms.leave(2)
    assert rooms.enter(4, c) == (COMMON_STATES, True) or rooms.enter(4, c) == (
        COMMON_STATES + 4,
        True,
    )
    assert rooms.enter(5, table(11)) is None
    rooms.leave(4)
    assert rooms.enter(6, table(10)) == (COMMON_STATES, True)


def standing_in(rows: list[tuple[list[int], list[int], bool]], size: int) -> GrammarStanding:
    """Branches, each in a state of its own: legal tokens, those that are listed, and whether these
    are all. A token is moved by one step, its own."""
    count = COMMON_STATES + len(rows)
    moves = torch.full((count, STATE_WIDTH), STATE_WIDTH, dtype=torch.int32)
    moves[0] = LOST
    few = torch.full((count, FEW_TOKENS + 1), -1, dtype=torch.int32)
    few[:, -1] = 0
    for row, (legal, listed, closed) in enumerate(rows, COMMON_STATES):
        moves[row, legal] = row * STATE_WIDTH
        few[row, : len(listed)] = torch.tensor(listed).int()
        few[row, -1] = closed
    texts = torch.arange(size, dtype=torch.int32)[:, None]
    tables = StateTables(moves.flatten(), texts, few)
    return GrammarStanding(tables, (torch.arange(COMMON_STATES, count) * STATE_WIDTH).int())


def test_legal_candidates_are_the_best_of_what_is_allowed() -> None:
    generator, size = torch.Generator().manual_seed(3), 50
    logits = torch.randn(5, size, generator=generator)
    best = logits.argsort(1, descending=True).tolist()
    every = list(range(size))
    standing = standing_in(
        [
            (every, [], False),
            ([t for t in every if t not in best[1][:6:2]], [], False),
            # None of the best: what is listed, though it is not all.
            (best[2][20:], best[2][20:23], False),
            # These alone, one of them among the best.
            ([best[3][0], best[3][30]], [best[3][0], best[3][30]], True),
            # Nothing.
            ([], [], False),
        ],
        size,
    )
    scores, tokens = legal_candidates(logits, 3, standing)
    assert tokens[:2].tolist() == [best[0][:3], best[1][1:6:2]]
    assert tokens[2].tolist() == best[2][20:23]
    assert tokens[3, :2].tolist() == [best[3][0], best[3][30]]
    dead = scores == -torch.inf
    assert dead.sum(1).tolist() == [0, 0, 0, 1, 3]
    plain = logits.log_softmax(1)
    torch.testing.assert_close(scores[0], plain[0, best[0][:3]])
    left = 1 - plain[1, best[1][:6:2]].exp().sum()
    torch.testing.assert_close(scores[1], plain[1, best[1][1:6:2]] - left.log())
    torch.testing.assert_close(scores[2], logits[2, best[2][20:23]].log_softmax(0))
    torch.testing.assert_close(scores[3, :2].exp().sum(), torch.tensor(1.0))
    assert (scores <= 0).all()


def test_branches_go_on_behind_their_tokens() -> None:
    rows: list[tuple[list[int], list[int], bool]] = [([1], [], False), ([2], [], False)]
    standing = standing_in(rows, 9)
    here = standing.states.tolist()
    assert standing.behind(torch.tensor([[1], [1]])).states.tolist() == [here[0], STATE_WIDTH]
    branch = torch.tensor([[1, 0, 1]])
    further = standing.behind(torch.tensor([[1, 1, 2]]), branch)
    assert further.states.tolist() == [STATE_WIDTH, here[0], here[1]]


@pytest.mark.parametrize("noisy", [False, True])
def test_odds_among_few_are_those_of_masked_logits(noisy: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator)
    own = torch.stack([torch.randperm(50, generator=generator)[:5] for _ in range(6)])
    own[2, 1:], own[3, 3] = -1, -1
    noise = None
    if noisy:
        heat = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 1.0])
        noise = Noise(heat, noise_keys(torch.arange(6), torch.arange(6) + 9, CHOICE))
    bias = torch.where(own >= 0, 0.0, -torch.inf)
    scores = log_probs_among(logits, own.clamp(min=0), own, bias, noise)
    masked = torch.full_like(logits, -torch.inf)
    for row, ids in enumerate(own.tolist()):
        for token in (t for t in ids if t >= 0):
            masked[row, token] = logits[row, token]
    want, best = top_candidates(masked, 5, None, noise)
    for row in range(6):
        for score, token in zip(want[row].tolist(), best[row].tolist(), strict=True):
            if score > -torch.inf:
                assert scores[row][own[row] == token].item() == pytest.approx(score, abs=1e-5)
    assert ((scores > -torch.inf).sum(1) == (own >= 0).sum(1)).all()


class Fixed(TreeDrafter):
    """Logits that are given."""

    def __init__(self, logits: Tensor, offsets: Tensor | None) -> None:
        cache: Any = None
        super().__init__(cache, torch.zeros(1, 1), 0, offsets)
        self.given = logits

    @classmethod
    def build(cls, *_: Any) -> Fixed:
        raise NotImplementedError

    def advance(self, tokens: Tensor, before: Any, positions: Tensor, attend: Any) -> Tensor:
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        return self.given.expand(len(states), -1)


def test_tokens_that_a_drafter_lacks_are_no_candidates() -> None:
    """Draft ids 0 to 3 are the targets' 5, 2, 9 and 4."""
    drafter = Fixed(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([5, 1, 7, 1]))
    rows = [([9, 5, 8], [9, 5, 8], True), ([3, 30], [3, 30], True), ([4, 3], [4, 3], True)]
    scores, tokens, *_ = drafter.candidates(torch.zeros(3, 1), 2, None, standing_in(rows, 40))
    assert tokens[0].tolist() == [9, 5]
    # It knows none of those that can come: nothing is drafted.
    assert (scores[1] == -torch.inf).all()
    assert tokens[2, 0] == 4
    assert scores[2].tolist() == [0.0, -np.inf]


@pytest.mark.parametrize("algorithm", few(("eagle3", "draft_model"), "draft_model"))
@pytest.mark.parametrize("shape", few(SHAPES, "tree"))
def test_only_what_the_grammar_allows_is_drafted(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, algorithm: str, shape: str
) -> None:
    """Without any run: tables alone make random drafters right where text is forced."""
    settings = {**tiny, "mask_deadline_ms": None, "context_length": 256}
    monkeypatch.setattr(ForcedRuns, "tokens", lambda *_: [])
    asked = [SAMPLING, {**SAMPLING, "temperature": 1.0, "seed": 4}]
    with Engine(**settings, algorithm="none", overlap="none") as engine:
        plain = [engine.generate(PROMPTS, PERSON, one) for one in asked]
    settings |= {"algorithm": algorithm, **SHAPES[shape]}
    if algorithm == "draft_model":
        settings["draft"] = tiny["model"]
    found = []
    for overlap in ("none", "once-sync"):
        with Engine(**settings, overlap=overlap) as engine:
            outputs = [engine.generate(PROMPTS, PERSON, one) for one in asked]
            assert [key(one) for one in outputs] == [key(one) for one in plain]
            assert engine.snapshot()["drafter"]["faults"] == 0
            found.append([lengths(one) for one in outputs])
            if overlap == "once-sync":
                engine.core.grammar.pool.forced = None
                without = [engine.generate(PROMPTS, PERSON, one) for one in asked]
    assert found[0] == found[1]
    for on, off in zip(chain(*outputs), chain(*without), strict=True):
        assert on.stats.grafted_tokens == 0
        # High counts are loops, and long tokens are not looked at to their end.
        assert on.stats.illegal_drafts < on.stats.drafted_tokens / 6
        assert on.stats.accepted_drafts > 30
        assert on.stats.verifies < off.stats.verifies


def test_wrong_tables_change_no_text(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**tiny, "mask_deadline_ms": None, "context_length": 256}
    with Engine(**settings, algorithm="none", overlap="none") as engine:
        plain = engine.generate(PROMPTS, PERSON, SAMPLING)
    rng = np.random.default_rng(0)

    def wrong(_: type[StateTable], __: bytes) -> StateTable:
        count = 40
        few = rng.integers(-1, 200, (count, FEW_TOKENS + 1)).astype(np.int32)
        moves = rng.integers(0, COMMON_STATES + count, (count, 256)).astype(np.uint16)
        return StateTable.of(moves, rng.random(count) < 0.5, few)

    monkeypatch.setattr(StateTable, "from_bytes", classmethod(wrong))
    settings |= {**SHAPES["tree"], "grammar_isolated": True}
    with Engine(**settings) as engine:
        assert key(engine.generate(PROMPTS, PERSON, SAMPLING)) == key(plain)
        assert engine.core.worker.traits.reads_states
