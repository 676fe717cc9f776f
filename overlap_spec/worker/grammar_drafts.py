"""What grammars tell drafts, on the device.

The lane tells of every node of a step's trees ``TOLD`` numbers: the run of tokens that is forced
behind it, and where it stands in its grammar's maps. What it told of the node before a new root is
kept with the root's row for the next draft, moved on by the root's token.

A map is a grammar's table of states by bytes (:mod:`overlap_spec.kernels.states`), or the trie of
the few texts that a whole output can be: where what is left of it fits into the tree, it is the
draft.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.kernels import GrammarStanding, StateTables, after_tokens
from overlap_spec.steps import (
    BY_NONE,
    COMMON_STATES,
    DEAD,
    DONE,
    FEW_TOKENS,
    LOST,
    RUN_TOKENS,
    STATE_WIDTH,
    TOKEN_STEPS,
    TRIE_NODES,
    Part,
)
from overlap_spec.tiers import Tier
from overlap_spec.worker.kv_pool import lazy_zeros


class GrammarDrafts(nn.Module):
    """The maps of all grammars, and what is known of each row's root.

    ``forced`` int64 ``(R, RUN_TOKENS - 1)``: the tokens that are forced behind it, -1 behind their
    end. ``state`` int32 ``(R,)``: its state; LOST without a table: everything may come. ``place``
    int64 ``(R,)``: its node among all tries', -1: none. ``moves``, ``texts``, ``few``: as
    :class:`StateTables` has them. ``tries`` int64 ``(R * TRIE_NODES, 4)``: of each node its token,
    parent, depth, and the number of nodes below it, which come right after it: so draft node i of a
    root at node p is node p + i.

    Args:
        rows: R, of which the last belongs to no request.
        states: Room for so many states beside the common ones.
    """

    forced: Tensor
    state: Tensor
    place: Tensor
    moves: Tensor
    texts: Tensor
    few: Tensor
    tries: Tensor

    def __init__(self, rows: int, vocab_size: int, states: int, device: torch.device) -> None:
        def table(shape: tuple[int, ...], dtype: torch.dtype, value: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        super().__init__()
        every = COMMON_STATES + states
        moves = lazy_zeros((every * STATE_WIDTH,), torch.int32, device)
        moves[DEAD : DONE + STATE_WIDTH] = DEAD
        moves[DEAD + BY_NONE], moves[DONE + BY_NONE] = DEAD, DONE
        few = lazy_zeros((every, FEW_TOKENS + 1), torch.int32, device)
        few[:COMMON_STATES, :FEW_TOKENS] = -1
        self.reads_states, self.has_tries = states > 0, False
        self.register_buffer("forced", table((rows, RUN_TOKENS - 1), torch.int64, -1))
        self.register_buffer("state", table((rows,), torch.int32, LOST))
        self.register_buffer("place", table((rows,), torch.int64, -1))
        self.register_buffer("moves", moves)
        # Until it is told what tokens are, no token moves anything.
        shape = vocab_size if states else 1, TOKEN_STEPS
        self.register_buffer("texts", table(shape, torch.int32, BY_NONE))
        self.register_buffer("few", few)
        self.register_buffer("tries", lazy_zeros((rows * TRIE_NODES, 4), torch.int64, device))

    def write(self, parts: Mapping[str, Part]) -> None:
        """Take in parts of a map, or the texts of all tokens, by the name of what they are of."""
        self.has_tries |= "tries" in parts
        for name, (first, values) in parts.items():
            rows = getattr(self, name)[first : first + len(values)]
            rows.copy_(torch.from_numpy(values), non_blocking=True)

    def forget(self) -> None:
        """What passes over the row of padding left there."""
        self.forced[-1:], self.state[-1:], self.place[-1:] = -1, LOST, -1

    def standing(self, rows: Tensor) -> GrammarStanding:
        """Where rows' roots stand in their grammars' tables."""
        return GrammarStanding(StateTables(self.moves, self.texts, self.few), self.state[rows])

    def enter(self, rows: Tensor, told: Tensor, tokens: Tensor, tries: bool) -> Tensor:
        """Enter new roots; what the host is told of each: int64 ``(S, RUN_TOKENS)``, what is forced
        behind it, and how many nodes of its trie are left, -1: it has none.

        Args:
            told: int32 ``(S, TOLD)``: what the lane told of the nodes before them.
            tokens: int64 ``(S,)``: the roots; negative ones are none.
            tries: Whether any of them may have a trie.
        """
        goes_on = told[:, :1] == tokens[:, None]
        forced = self.forced[rows] = torch.where(goes_on, told[:, 1:RUN_TOKENS], -1).long()
        if self.reads_states:
            self.state[rows] = self.after(told[:, RUN_TOKENS], tokens)
        if not tries:
            return F.pad(forced, (0, 1), value=-1)
        place = self.place[rows] = self.child(told[:, RUN_TOKENS + 1].long(), tokens)
        left = torch.where(place >= 0, self.tries[place.clamp(min=0), 3], -1)
        return torch.cat([forced, left[:, None]], 1)

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states int32 ``(S,)`` behind tokens, from ``states (S,)``, -1 being LOST."""
        return after_tokens(self.moves, states.clamp(min=LOST), self.texts, tokens.clamp(min=0))

    def child(self, place: Tensor, tokens: Tensor) -> Tensor:
        """The nodes int64 ``(S,)`` after ``place (S,)`` by ``tokens``, -1 where there is none."""
        at = place.clamp(min=0)
        below = self._below(at, TRIE_NODES - 1)
        index = torch.arange(TRIE_NODES - 1, device=at.device)
        same = (below[..., 0] == tokens[:, None]) & (below[..., 1] == place[:, None])
        same &= index < self.tries[at, 3][:, None]
        value, node = same.to(torch.uint8).max(-1)
        return torch.where(value > 0, at + 1 + node, -1)

    def _below(self, place: Tensor, count: int) -> Tensor:
        """int64 ``(S, count, 4)``: the nodes right after each place."""
        index = place[:, None] + 1 + torch.arange(count, device=place.device)
        return self.tries[index.clamp(max=len(self.tries) - 1)]

    def complete(self, draft: Draft, roots: Roots, tier: Tier) -> Draft:
        """What is left of the root's trie, where that fits into the tier; else the ``draft``, of
        ``tier.base``, lengthened."""
        tokens, parents, scores = lengthen(draft, roots, tier)
        assert parents is not None
        place = self.place[roots.rows]
        at = place.clamp(min=0)
        here, below = self.tries[at], self._below(at, tier.nodes - 1)
        index = torch.arange(tier.nodes - 1, device=place.device)
        alive = index < here[:, 3:]
        alive &= below[..., 2] - here[:, 2:3] <= tier.steps
        whole = ((place >= 0) & (here[:, 3] < tier.nodes))[:, None]
        return Draft(
            torch.where(whole, below[..., 0], tokens).clamp(min=0),
            torch.where(whole, below[..., 1] - at[:, None], parents),
            torch.where(whole, torch.where(alive, 0.0, -torch.inf), scores),
        )


def lengthen(draft: Draft, roots: Roots, tier: Tier) -> Draft:
    """The ``draft``, of ``tier.base``, and one more branch: what is forced behind that part of a
    run which is drafted already."""
    tokens, parents, scores = draft
    batch, drafted = tokens.shape
    index = torch.arange(tier.nodes - 1, device=tokens.device)
    if parents is None:
        parents = index[:drafted].expand(batch, drafted)
    run = roots.forced[:, : tier.steps]
    # The last drafted node of the run, and its depth.
    end = depth = torch.zeros_like(roots.tokens)
    goes_on = torch.ones_like(end, dtype=torch.bool)
    for step in range(min(tier.own.steps, run.shape[1])):
        follows = (parents == end[:, None]) & (tokens == run[:, step, None])
        value, node = (follows & (scores > -torch.inf)).to(torch.uint8).max(1)
        goes_on = goes_on & (value > 0)
        end, depth = torch.where(goes_on, node + 1, end), depth + goes_on
    room = index[drafted:]
    place = depth[:, None] + (room - drafted)
    tail = run.gather(1, place.clamp(max=run.shape[1] - 1))
    lives = (place < run.shape[1]) & (tail >= 0)
    score = F.pad(scores, (1, 0)).gather(1, end[:, None])
    first = room == drafted
    return Draft(
        torch.cat([tokens, tail.clamp(min=0)], 1),
        torch.cat([parents, torch.where(first, end[:, None], room)], 1),
        torch.cat([scores, torch.where(lives, score, -torch.inf)], 1),
    )
