"""Gated delta networks over trees (arXiv 2412.06464), in which no node's state is ever made.

A token of key ``k``, value ``v``, decay ``g`` and rate ``b`` makes the state ``S (K, V)`` into
``exp(g) S + k w``, where it writes ``w = b (v - k exp(g) S)``; a query reads ``q`` times that. So
the state behind a node is that before the root and what the nodes on the way to it have written,
each faded by the decays that came after. What nodes write solves a triangular system; in it a tree
differs from a chain in nothing but which nodes are above each other. A prompt is a chain of blocks.

Of H heads of keys and queries each has G heads of values. B trees of N nodes, parents before
children; states are float32 ``(B, H, G, K, V)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


class Tokens(NamedTuple):
    """``queries``, ``keys (B, N, H, K)``, ``values (B, N, H, G, V)``; ``decays`` (logarithms, not
    above 0) and ``rates (B, N, H, G)``; all float32."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    rates: Tensor


class Writes(NamedTuple):
    """What nodes add to the states of their trees.

    ``keys (B, N, H, K)`` and ``values (B, N, H, G, V)``: what each writes, and where; ``decays
    (B, N, H, G)``: the sum of those from the root to it; ``inputs (B, N, C)``: of the convolution.
    """

    keys: Tensor
    values: Tensor
    decays: Tensor
    inputs: Tensor


def path_taps(ancestors: Tensor, taps: int) -> Tensor:
    """Where each node finds itself, its parent, and so on up, ``taps`` in all.

    Args:
        ancestors: bool ``(B, N, N)`` as in :class:`~overlap_spec.kernels.tree.Tree`.

    Returns:
        int64 ``(B, N, taps)``: below ``taps - 1`` one of the inputs before the root, the oldest
        first; from there on a node.
    """
    batch, nodes, _ = ancestors.shape
    index = torch.arange(nodes, device=ancestors.device)
    # As they come before their children, the last that is above a node is its parent.
    parents = (ancestors.tril(-1) * (index + 1)).amax(-1) - 1
    before = torch.arange(-1, taps - 2, device=ancestors.device).clamp(min=0)
    above = torch.cat([before.expand(batch, -1), parents + taps - 1], 1)
    way = [(index + taps - 1).expand(batch, -1)]
    for _ in range(taps - 1):
        way.append(above.gather(1, way[-1]))
    return torch.stack(way, -1)


def convolve(before: Tensor, inputs: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution along the trees' paths, each channel by itself, and SiLU.

    Args:
        before: ``(B, taps - 1, C)``: inputs before the root, the oldest first.
        inputs: ``(B, N, C)``.
        taps: As of :func:`path_taps`.
        weight: ``(C, taps)``, that of the node itself last.

    Returns:
        float32 ``(B, N, C)``.
    """
    found = _taken(torch.cat([before, inputs], 1), taps.flatten(1)).unflatten(1, taps.shape[1:])
    return F.silu((found.float() * weight.float().flip(1).t()).sum(2))


def unit(x: Tensor) -> Tensor:
    """``x`` of length 1 along its last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def delta_rule(state: Tensor, tokens: Tokens, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What nodes read and write.

    Args:
        state: Before the roots.
        ancestors: bool ``(B, N, N)``: which nodes are above each, itself included.

    Returns:
        What each reads and what each writes, ``(B, N, H, G, V)``, and the sums of decays as in
        :class:`Writes`.
    """
    heads = [x.movedim(1, -2) for x in tokens[:3]]
    queries, keys, values = heads[0][:, :, None], heads[1][:, :, None], heads[2]
    rates = tokens.rates.movedim(1, -1)[..., None]
    sums = (ancestors.float() @ tokens.decays.flatten(2)).view_as(tokens.decays)
    faded = sums.movedim(1, -1)
    # What is left, at each node, of what each one above it wrote.
    left = (faded[..., :, None] - faded[..., None, :]).exp()
    left = torch.where(ancestors[:, None, None], left, 0.0)
    both = torch.cat([keys, queries], -2)
    of_keys, of_queries = (both @ keys.transpose(-1, -2)).chunk(2, -2)
    known, read = (both @ state).chunk(2, -2)
    since = faded.exp()[..., None]
    written = torch.linalg.solve_triangular(
        rates * of_keys * left, rates * (values - since * known), upper=False, unitriangular=True
    )
    out = since * read + (of_queries * left) @ written
    return out.movedim(-2, 1), written.movedim(-2, 1), sums


def state_after(state: Tensor, writes: Writes, seen: Tensor, last: Tensor) -> Tensor:
    """The state behind one node of each tree.

    Args:
        state: Before the roots.
        seen: bool ``(B, N)``: the nodes above it, itself included.
        last: int64 ``(B,)``: its number.
    """
    total = _taken(writes.decays, last[:, None])
    left = torch.where(seen[:, :, None, None], (total - writes.decays).exp(), 0.0)
    keys = (writes.keys[:, :, :, None] * left[..., None]).movedim(1, -1)
    return total[:, 0, :, :, None, None].exp() * state + keys @ writes.values.movedim(1, -2)


def inputs_after(before: Tensor, writes: Writes, taps: Tensor, last: Tensor) -> Tensor:
    """The convolution's inputs behind that node, as ``before``: see :func:`convolve`."""
    way = _taken(taps, last[:, None])[:, 0, :-1].flip(1)
    return _taken(torch.cat([before, writes.inputs], 1), way)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """``x (B, M, ...)`` at ``index (B, n)`` → ``(B, n, ...)``."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]
