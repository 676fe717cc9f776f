"""Gated delta networks over trees, against the plain recurrence along each node's path."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels import (
    Tokens,
    Writes,
    convolve,
    delta_rule,
    inputs_after,
    path_taps,
    state_after,
    unit,
)

BATCH, HEADS, GROUPS, KEY, VALUE, TAPS, CHANNELS = 3, 2, 3, 5, 4, 4, 6
CHAIN, BUSH = [-1, *range(69)], [-1, 0, 0, 1, 2, 2, 4, 4, 7, -1, 8]


def paths(parents: list[int]) -> list[list[int]]:
    """Of each node those from its root to it."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@pytest.fixture(params=[CHAIN, BUSH, [-1]], ids=["chain", "bush", "root"])
def tree(request: pytest.FixtureRequest) -> tuple[list[list[int]], Tensor]:
    """The path of each node, and bool ``(B, N, N)``."""
    found = paths(request.param)
    seen = torch.zeros(len(found), len(found), dtype=torch.bool)
    for node, path in enumerate(found):
        seen[node, path] = True
    return found, seen.expand(BATCH, -1, -1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(len(shape)))


def test_a_nodes_state_is_that_of_its_path(tree: tuple[list[list[int]], Tensor]) -> None:
    found, ancestors = tree
    nodes = len(found)
    heads = HEADS, GROUPS
    before, inputs = drawn(*heads, KEY, VALUE), drawn(nodes, CHANNELS)
    tokens = Tokens(
        drawn(nodes, HEADS, KEY),
        unit(drawn(nodes, HEADS, KEY).flip(1)),
        drawn(nodes, *heads, VALUE),
        -drawn(nodes, *heads).exp(),
        drawn(nodes, *heads).sigmoid(),
    )
    out, written, sums = delta_rule(before, tokens, ancestors)
    writes = Writes(tokens.keys, written, sums, inputs)
    for node, path in enumerate(found):
        state = before
        for at in path:
            q, k, v, decay, rate = (part[:, at] for part in tokens)
            state = state * decay[..., None, None].exp()
            told = torch.einsum("bhk,bhgkv->bhgv", k, state)
            state = state + torch.einsum("bhk,bhgv->bhgkv", k, rate[..., None] * (v - told))
        want = torch.einsum("bhk,bhgkv->bhgv", q, state)
        torch.testing.assert_close(out[:, node], want, atol=1e-5, rtol=1e-4)
        last = torch.full((BATCH,), node)
        got = state_after(before, writes, ancestors[:, node], last)
        torch.testing.assert_close(got, state, atol=1e-5, rtol=1e-4)


def test_a_convolution_goes_up_the_path(tree: tuple[list[list[int]], Tensor]) -> None:
    found, ancestors = tree
    before, inputs = drawn(TAPS - 1, CHANNELS), drawn(len(found), CHANNELS)
    weight = torch.randn(CHANNELS, TAPS, generator=torch.Generator().manual_seed(1))
    taps = path_taps(ancestors, TAPS)
    out = convolve(before, inputs, taps, weight)
    none = Tensor()
    for node, path in enumerate(found):
        read = torch.cat([before, inputs[:, path]], 1)[:, -TAPS:]
        torch.testing.assert_close(out[:, node], F.silu((read * weight.t()).sum(1)))
        last = torch.full((BATCH,), node)
        got = inputs_after(before, Writes(none, none, none, inputs), taps, last)
        assert torch.equal(got, read[:, 1:])


def test_what_others_write_may_be_no_number() -> None:
    """A row of which a number is lost leaves those of other requests alone."""
    state, lost = torch.zeros(2, HEADS, GROUPS, KEY, VALUE), torch.zeros(2, 1, HEADS, KEY)
    lost[1] = torch.nan
    values, rates = torch.ones(2, 1, HEADS, GROUPS, VALUE), torch.zeros(2, 1, HEADS, GROUPS)
    tokens = Tokens(lost, lost, values, rates, rates)
    out, *_ = delta_rule(state, tokens, torch.ones(2, 1, 1, dtype=torch.bool))
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()
