"""Drafts out of what the grammar tells alone: tries of whole outputs.

Where the texts that an output can still be fit into the tree, they are the draft: one verify then
decides all that is left, whatever it is.

A row's trie is a table ``(4, TRIE_NODES)`` of tokens, parents, depths, and nodes below each node.
Node 0 is the prompt's end, and what is below a node comes right after it: so draft node i of a root
at node p is node p + i.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from overlap_spec.drafters.base import Draft, Roots
from overlap_spec.steps import TRIE_NODES, Int64s, TokenTrie
from overlap_spec.tiers import Tier


def trie_table(trie: TokenTrie) -> Int64s:
    """int64 ``(4, TRIE_NODES)``."""
    table = np.full((4, TRIE_NODES), -1, np.int64)
    count = len(trie.tokens)
    for row, values in enumerate((trie.tokens, trie.parents + 1, trie.depths, trie.sizes)):
        table[row, 1 : count + 1] = values
    table[:, 0] = -1, -1, 0, count
    return table


def draft_known(draft: Draft, roots: Roots, tries: Tensor, place: Tensor, tier: Tier) -> Draft:
    """A draft; in its place, where it fits, what is left of a trie.

    Args:
        draft: Of ``tier``'s size, with parents.
        tries, place: Of all rows, as in :class:`overlap_spec.worker.tables.RowTables`.
        tier: With a base.
    """
    count = tier.nodes - 1
    index = torch.arange(count, device=place.device)
    tokens, parents, scores = draft
    assert parents is not None
    place = place[roots.rows]
    whole = fits(tries, roots.rows, place, tier)[:, None]
    known = tries[roots.rows]
    at = place.clamp(min=0)[:, None]
    below = (at + 1 + index).clamp(max=known.shape[2] - 1)
    own, above, depth = (known[:, part].gather(1, below) for part in range(3))
    alive = index < known[:, 3].gather(1, at)
    alive &= depth - known[:, 2].gather(1, at) <= tier.steps
    return Draft(
        torch.where(whole, own, tokens).clamp(min=0),
        torch.where(whole, above - at, parents),
        torch.where(whole, torch.where(alive, 0.0, -torch.inf), scores),
    )


def fits(tries: Tensor, rows: Tensor, place: Tensor, tier: Tier) -> Tensor:
    """bool ``(B,)``: whether what is left of each trie at ``place (B,)`` is drafted whole."""
    left = tries[rows, 3].gather(1, place.clamp(min=0)[:, None])[:, 0]
    return (place >= 0) & (left < tier.nodes)


def child(tries: Tensor, rows: Tensor, place: Tensor, tokens: Tensor) -> Tensor:
    """The nodes after ``place (B,)`` by ``tokens (B,)``: int64 ``(B,)``, -1 where there is none."""
    known = tries[rows]
    same = (known[:, 1] == place[:, None]) & (known[:, 0] == tokens[:, None])
    value, node = (same & (place >= 0)[:, None]).to(torch.uint8).max(-1)
    return torch.where(value > 0, node, -1)


def follow(
    tries: Tensor, rows: Tensor, place: Tensor, tier: Tier, last: Tensor, bonus: Tensor
) -> Tensor:
    """Where rows stand after a verify: int64 ``(B,)``.

    A path through what the drafter guessed is not followed: the row has no place then.

    Args:
        place: ``(B,)``: where they stood.
        last: ``(B,)``: the last accepted node of each tree.
        bonus: ``(B,)``: the token after it.
    """
    whole = fits(tries, rows, place, tier)
    reached = torch.where(whole, place + last, torch.where(last == 0, place, -1))
    return child(tries, rows, reached, bonus)
