"""States of the layers that keep no keys: a slot for each row, and how passes change them.

A pass over trees leaves them as they are, and hands on what each node would write, of which commit
enters the accepted path's. A pass over chunks enters all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap_spec.kernels import (
    Writes,
    convolve,
    delta_rule,
    inputs_after,
    path_taps,
    state_after,
)
from overlap_spec.kernels.scripting import Tensors
from overlap_spec.models.config import DeltaConfig
from overlap_spec.models.delta import Flow
from overlap_spec.worker.batch import Chunks
from overlap_spec.worker.kv_pool import lazy_zeros

# Tokens of a prompt that are computed at once: what a token takes grows with it, what a state takes
# is divided by it.
BLOCK = 64


class StatePool(nn.Module):
    """``state`` float32 ``(layers, slots, H, G, K, V)`` as :mod:`overlap_spec.kernels.recurrence`
    has it, and ``inputs (layers, slots, taps - 1, C)``: of the convolution, before the state. Slot
    r is row r's, of ``rows``; then comes the row of padding's, which stays zero, and behind it are
    at most ``kept`` states that are kept with pages.
    """

    state: Tensor
    inputs: Tensor

    def __init__(
        self, config: DeltaConfig, rows: int, kept: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config, self._dtype, self._device = config, dtype, device
        self._padding, self._slots = rows, rows + 1 + kept
        numbers = [i for i, is_one in enumerate(config.layers) if is_one]
        self.index = {layer: index for index, layer in enumerate(numbers)}

    def allocate(self) -> None:
        """Take the memory; nothing else works before."""
        for name, (shape, dtype) in self._shapes().items():
            self.register_buffer(name, lazy_zeros(shape, dtype, self._device))

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        config, slots = self.config, (len(self.index), self._slots)
        state = *slots, config.key_heads, config.groups, config.key_dim, config.value_dim
        inputs = *slots, config.taps - 1, config.channels
        return {"state": (state, torch.float32), "inputs": (inputs, self._dtype)}

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes().values())

    @property
    def node_bytes(self) -> int:
        """Bytes of what one node writes over all layers."""
        config = self.config
        numbers = config.key_heads * (config.key_dim + config.groups * (config.value_dim + 1))
        return len(self.index) * (4 * numbers + self._dtype.itemsize * config.channels)

    def commit(self, rows: Tensor, ancestors: Tensor, last: Tensor, writes: Tensors) -> None:
        """Let the states be those behind the nodes ``last``, int64 ``(B,)``; ``writes`` as of
        :attr:`TreeStates.writes`."""
        taps = path_taps(ancestors, self.config.taps)
        index = last[:, None, None].expand(-1, 1, ancestors.shape[2])
        seen = ancestors.gather(1, index).squeeze(1)
        every = [part.unflatten(0, ancestors.shape[:2]) for part in writes]
        for layer in range(len(self.index)):
            own = Writes(*(part[:, :, layer] for part in every))
            state, inputs = self.before(layer, rows)
            state = state_after(state, own, seen, last)
            self.enter(layer, rows, state, inputs_after(inputs, own, taps, last))
        # Else the padding's would grow, of what nobody wrote.
        for slots in (self.state, self.inputs):
            slots[:, self._padding : self._padding + 1] = 0.0

    @property
    def kept_slots(self) -> range:
        """Those of states that are kept with pages."""
        return range(self._padding + 1, self._slots)

    def before(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The states of ``rows (B,)`` in a layer of this number, and their inputs."""
        return self.state[layer, rows], self.inputs[layer, rows]

    def enter(self, layer: int, rows: Tensor, state: Tensor, inputs: Tensor) -> None:
        """Let these be the states of ``rows``."""
        self.state[layer].index_copy_(0, rows, state)
        self.inputs[layer].index_copy_(0, rows, inputs)

    def nothing_written(self, nodes: int) -> Tensors:
        """What ``nodes`` nodes write that are no tokens."""
        config, layers = self.config, len(self.index)
        heads = config.key_heads, config.groups
        shapes = (config.key_heads, config.key_dim), (*heads, config.value_dim), heads
        found = [self.state.new_zeros(nodes, layers, *shape) for shape in shapes]
        return *found, self.inputs.new_zeros(nodes, layers, config.channels)


class TreeStates:
    """What the nodes of trees read, each behind its parent, of int64 ``rows (B,)`` and bool
    ``ancestors (B, N, N)``. ``pack`` int64 ``(T,)``: the nodes that there are tokens of; None:
    all."""

    def __init__(
        self, pool: StatePool, rows: Tensor, ancestors: Tensor, pack: Tensor | None = None
    ) -> None:
        self._pool, self._rows, self._ancestors, self._pack = pool, rows, ancestors, pack
        self._taps = path_taps(ancestors, pool.config.taps)
        self._writes: list[Writes] = []

    def __call__(self, layer: int, flow: Flow) -> Tensor:
        """See :class:`overlap_spec.models.decoder.Attend`."""
        before = self._pool.before(self._pool.index[layer], self._rows)
        inputs, decays, rates = (self._spread(part) for part in flow[:3])
        here = self._ancestors, self._taps
        out, writes = pass_block(flow, before, inputs, decays, rates, *here)
        self._writes.append(writes)
        flat = out.flatten(0, 1)
        return flat if self._pack is None else flat[self._pack]

    @property
    def writes(self) -> Tensors:
        """:class:`Writes` of the layers that were passed: ``(B * N, layers, ...)``."""
        parts = zip(*self._writes, strict=True)
        return tuple(torch.stack(part, 2).flatten(0, 1) for part in parts)

    def _spread(self, x: Tensor) -> Tensor:
        """``(T, C)`` → ``(B, N, C)``, zeros where there is no token."""
        batch, nodes, _ = self._ancestors.shape
        if self._pack is not None:
            x = x.new_zeros(batch * nodes, x.shape[1]).index_copy_(0, self._pack, x)
        return x.view(batch, nodes, -1)


class Block(NamedTuple):
    """A run of the tokens of the B longest chunks: their numbers, int64 ``(B, N)``, that of all
    where there is none; and the ``last`` of each, int64 ``(B,)``. Of the states kept behind them:
    their numbers among all kept ones, and int64 ``(K,)`` whose of the B, behind which of the N.
    """

    tokens: Tensor
    last: Tensor
    kept: slice
    owners: Tensor
    ends: Tensor


class ChunkStates:
    """What the tokens of chunks read; the states are then those behind the chunks."""

    def __init__(self, pool: StatePool, chunks: Chunks) -> None:
        self._pool, self._kept_slots = pool, chunks.kept_slots
        device, total = chunks.tokens.device, len(chunks.tokens)
        # Longest first, so that a block has tokens of the first ones.
        order = chunks.sizes.argsort(descending=True, stable=True)
        sizes, offsets = chunks.sizes[order, None], chunks.offsets[order, None]
        self._rows, self._slots = chunks.rows[order], chunks.states[order]
        self._begins = chunks.starts[order] == 0
        owners = order.argsort()[chunks.kept_chunks]
        size = min(BLOCK, max(chunks.lengths))
        within = torch.arange(size, device=device)
        self._causal = (within <= within[:, None])[None]
        self._taps = path_taps(self._causal, pool.config.taps)
        self._blocks: list[Block] = []
        for start in range(0, max(chunks.lengths), size):
            count = sum(length > start for length in chunks.lengths)
            left, first = sizes[:count] - start, offsets[:count] + start
            tokens = torch.where(within < left, first + within, total)
            last = left[:, 0].clamp(max=size) - 1
            kept = slice(*(bisect_left(chunks.kept, at) for at in (start, start + size)))
            ends = chunks.kept_ends[kept] - start
            self._blocks.append(Block(tokens, last, kept, owners[kept], ends))

    def __call__(self, layer: int, flow: Flow) -> Tensor:
        """See :class:`overlap_spec.models.decoder.Attend`."""
        number = self._pool.index[layer]
        states = [
            # Whatever the row's last request has left there.
            torch.where(self._begins.view(-1, *[1] * (part.dim() - 1)), 0.0, part)
            for part in self._pool.before(number, self._slots)
        ]
        total = len(flow.inputs)
        found = flow.decays.new_empty(total + 1, flow.config.value_channels)
        for tokens, last, kept, owners, ends in self._blocks:
            count = len(last)
            before = states[0][:count], states[1][:count]
            inputs, decays, rates = (part[tokens.clamp(max=total - 1)] for part in flow[:3])
            causal, taps = (x.expand(count, -1, -1) for x in (self._causal, self._taps))
            out, writes = pass_block(flow, before, inputs, decays, rates, causal, taps)
            found.index_copy_(0, tokens.flatten(), out.flatten(0, 1))
            if len(owners):
                some = [part[owners] for part in (*before, *writes)]
                after = self._after(some[0], some[1], Writes(*some[2:]), ends)
                self._pool.enter(number, self._kept_slots[kept], *after)
            for part, new in zip(before, self._after(*before, writes, last), strict=True):
                part.copy_(new)
        self._pool.enter(number, self._rows, *states)
        return found[:total]

    def _after(
        self, state: Tensor, inputs: Tensor, writes: Writes, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States behind the tokens ``ends`` of a block, int64 ``(B,)``."""
        taps = self._taps.expand(len(ends), -1, -1)
        state = state_after(state, writes, self._causal[0][ends], ends)
        return state, inputs_after(inputs, writes, taps, ends)


def pass_block(
    flow: Flow,
    before: tuple[Tensor, Tensor],
    inputs: Tensor,
    decays: Tensor,
    rates: Tensor,
    ancestors: Tensor,
    taps: Tensor,
) -> tuple[Tensor, Writes]:
    """What nodes read, float32 ``(B, N, heads * V)``, and what they write; ``before``: states and
    inputs before the roots; ``inputs``, ``decays``, ``rates``: of ``flow``, as ``(B, N, ...)``."""
    tokens = flow.tokens(convolve(before[1], inputs, taps, flow.weight), decays, rates)
    out, values, sums = delta_rule(before[0], tokens, ancestors)
    return out.flatten(2), Writes(tokens.keys, values, sums, inputs)
