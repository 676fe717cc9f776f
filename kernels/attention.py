"""Paged attention over a prefix that all queries see and a window that a mask rules.

One operation serves prefill, decode, tree verify, draft steps and draft extend: request ``b`` has
``prefix[b]`` cached keys, followed by ``W`` window keys at logical positions ``prefix[b] + w``.
"""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are, and knows no newer spelling.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import List, NamedTuple, Optional  # noqa: UP035

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels.dispatch import operation
from overlap_spec.kernels.elementwise import apply_rope, rms_norm
from overlap_spec.kernels.scripting import traceable

# The CPU's products give a row the same bits, in bfloat16, at all multiples of these; in float32
# fewer keys are enough to let most requests share a call.
ROWS = 4
KEYS, KEYS_FLOAT32 = 64, 32
# Keys of a layer that stay in a processor's caches.
TOGETHER_BYTES = 4 << 20


@dataclass(frozen=True)
class KeySpan:
    """Which keys each query of a batch of requests may see.

    The queries lie end to end, one request's after the other's.

    Attributes:
        pages: int64 ``(B, P)``: page of logical positions ``[p * page_size, (p + 1) * page_size)``;
            ``P * page_size`` covers prefix and window. Unused entries name any valid page.
        prefix: int64 ``(B,)``: keys before the window.
        positions: int64 ``(T,)``: each query's own position (for sliding windows).
        mask: bool ``(T, W)``: query t sees window key w of its request; None means causal: a
            request's query i sees its window keys 0 to i, of which it has as many as queries.
        first: Keys at logical positions below this are never seen (1 for EAGLE's draft cache,
            whose slot 0 does not exist).
        offsets: int64 ``(B + 1,)``, from 0 to T: request b owns queries ``offsets[b]`` to
            ``offsets[b + 1] - 1``, which may be none; None: each owns ``T / B``.
        longest: No request owns more queries; of no interest without offsets.
    """

    pages: Tensor
    prefix: Tensor
    positions: Tensor
    mask: Tensor | None = None
    first: int = 0
    offsets: Tensor | None = None
    longest: int = 0

    def rectangle(self, rows: Tensor) -> Tensor:
        """What is the queries', ``(T, ...)``, by request: ``(B, Q, ...)``.

        Without offsets a view; with them Q is :attr:`longest`, and what is no query's copies one.
        """
        if self.offsets is None:
            return rows.view(self.pages.shape[0], -1, *rows.shape[1:])
        return rows[self._places[0]]

    def flat(self, rectangle: Tensor) -> Tensor:
        """The queries' rows of a rectangle, ``(B, Q, ...)`` → ``(T, ...)``."""
        rows = rectangle.flatten(0, 1)
        return rows if self.offsets is None else rows.index_select(0, self._places[1])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Queries by request ``(B, longest)``, and each one's place ``(T,)`` among those."""
        assert self.offsets is not None
        device = self.offsets.device
        query = torch.arange(self.positions.shape[0], device=device)
        queries = self.offsets[:-1, None] + torch.arange(self.longest, device=device)
        request = torch.searchsorted(self.offsets[1:], query, right=True)
        place = query - self.offsets[request] + request * self.longest
        return queries.clamp(max=query.shape[0] - 1), place

    @cached_property
    def _requests(self) -> dict[int, list[tuple[slice, KeySpan]]]:
        return {}

    def requests(self, page_size: int) -> list[tuple[slice, KeySpan]]:
        """Each request's queries and its own span, with no more pages than its keys are on.

        Waits for the device, and is of causal spans. Made once for all layers.
        """
        assert self.offsets is not None
        if page_size not in self._requests:
            found = []
            bounds, prefixes = self.offsets.tolist(), self.prefix.tolist()
            for b, (start, end) in enumerate(pairwise(bounds)):
                if start < end:
                    own, here = slice(b, b + 1), slice(start, end)
                    pages = self.pages[own, : -(-(prefixes[b] + end - start) // page_size)]
                    positions = self.positions[here]
                    span = KeySpan(pages, self.prefix[own], positions, None, self.first)
                    found.append((here, span))
            self._requests[page_size] = found
        return self._requests[page_size]

    def visible(self, page_size: int, window: int | None) -> Tensor:
        """The dense form of :meth:`rectangle`: bool ``(B, Q, P * page_size)``."""
        keys = torch.arange(self.pages.shape[1] * page_size, device=self.pages.device)
        offset = keys - self.prefix[:, None]
        positions = self.rectangle(self.positions)
        queries = positions.shape[1]
        mask = None if self.mask is None else self.rectangle(self.mask)
        if mask is None:
            index = torch.arange(queries, device=keys.device)
            seen = offset[:, None, :] <= index[:, None]
        else:
            width = mask.shape[2]
            inside = (offset >= 0) & (offset < width)
            columns = offset.clamp(0, width - 1)[:, None, :].expand(-1, queries, -1)
            seen = torch.where(inside[:, None, :], mask.gather(2, columns), offset[:, None, :] < 0)
        if self.first:
            seen = seen & (keys >= self.first)
        if window is not None:
            near = keys > positions[:, :, None] - window
            if mask is not None:
                # A tree's keys lie by node, not by depth; its ancestors are always near.
                near = near | (offset >= 0)[:, None, :]
            seen = seen & near
        return seen

    @cached_property
    def _dense(self) -> dict[tuple[int, int | None, int, torch.dtype], Tensor]:
        return {}

    @cached_property
    def _own_pages(self) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
        return {}

    def own_pages(self, page_size: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pages that are read of each request, and how many: all of :func:`pages_together`.

        Past its own, a request's last page stands in: others' may hold anything. Made once for all
        layers.

        Returns:
            Pages int64 ``(B, P')``; how many, int64 ``(B,)``, ascending; whose they are, ``(B,)``.
        """
        key = page_size, keys
        if key not in self._own_pages:
            width = (self.rectangle(self.positions) if self.mask is None else self.mask).shape[1]
            own = (self.prefix + (width + page_size - 1)) // page_size
            step, columns = pages_together(page_size, keys), self.pages.shape[1]
            own = own.clamp(max=columns)
            place = torch.arange(columns + -columns % step, device=own.device)
            pages = self.pages.gather(1, torch.minimum(place, own[:, None] - 1))
            many, order = ((own + (step - 1)) // step * step).sort(stable=True)
            self._own_pages[key] = pages, many, order
        return self._own_pages[key]

    @cached_property
    def packed(self) -> Tensor:
        """:attr:`mask` as :func:`pack_mask` makes it, made once for all layers."""
        assert self.mask is not None
        return pack_mask(self.mask)

    @cached_property
    def as_int32(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Pages, prefixes, ends of prefix and causal window, and offsets, in int32, made once."""
        offsets, batch = self.offsets, self.pages.shape[0]
        own = self.positions.shape[0] // batch if offsets is None else offsets.diff()
        pages, prefix, ends = (x.int() for x in (self.pages, self.prefix, self.prefix + own))
        return pages, prefix, ends, None if offsets is None else offsets.int()

    def dense(self, page_size: int, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """:meth:`visible` repeated for ``group`` heads, as what is added to scores: 0 or -inf.

        With columns of -inf up to a multiple of :func:`pages_together`, and in half precision rows
        of 0 up to one of :data:`ROWS`. Computed once for all layers.
        """
        key = (page_size, window, group, dtype)
        if key not in self._dense:
            seen = self.visible(page_size, window)
            added = torch.where(seen, 0.0, -torch.inf).to(dtype).repeat(1, group, 1)
            step = pages_together(page_size, keys_together(dtype))
            missing = -self.pages.shape[1] % step * page_size
            added = F.pad(added, (0, missing), value=-torch.inf)
            if dtype != torch.float32:
                added = F.pad(added, (0, 0, 0, -added.shape[1] % ROWS))
            self._dense[key] = added[:, None]
        return self._dense[key]


class Scoring(NamedTuple):
    """How a layer's products of queries and keys become weights, where it departs from the usual.

    Attributes:
        scale: Factor of the products; None: ``1 / sqrt(D)``.
        soft_cap: Scaled products x become ``soft_cap * tanh(x / soft_cap)``; None: they stay.
        sinks: ``(heads,)``, any float type: one more score of each head, whose weight goes nowhere
            (arXiv 2309.17453); None: there is none.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


USUAL = Scoring()


def pages_together(page_size: int, keys: int = KEYS) -> int:
    """Pages that are read together: their keys are ``keys``, or one page has more."""
    return max(1, keys // page_size)


def keys_together(dtype: torch.dtype) -> int:
    """Products over keys are of multiples of these, on the CPU."""
    return KEYS_FLOAT32 if dtype == torch.float32 else KEYS


@operation
def pack_mask(mask: Tensor) -> Tensor:
    """Bits of a mask: bool ``(..., W)`` → int64 ``(..., ceil(W / 64))``.

    Bit ``w % 64`` of word ``w // 64`` is entry w; the bits from W on are 0.
    """
    width = mask.shape[-1]
    words = F.pad(mask, (0, -width % 64)).unflatten(-1, (-1, 64)).long()
    packed: Tensor = (words << torch.arange(64, device=mask.device)).sum(-1)
    return packed


@operation
def rotate_and_store(
    qkv: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """:func:`apply_rope` of queries and keys, and new keys and values into their slots.

    Args:
        qkv: ``(T, heads + 2 * kv_heads, D)``: queries, keys, values, neither normed nor rotated.
        rotary: ``(T, 2, D)`` as in :func:`apply_rope`.
        k_cache, v_cache: ``(pages, page_size, kv_heads, D)``.
        slots: int64 ``(T,)``, slot = page * page_size + offset. Where they repeat, any may win.
        norm: Weight ``(heads + kv_heads, D)`` and eps of :func:`rms_norm` over each query's and
            key's own head, before the rotation; None: there is none.

    Returns:
        The rotated queries ``(T, heads, D)``.
    """
    kv_heads = k_cache.shape[2]
    rotated = qkv.shape[1] - kv_heads
    qk = qkv[:, :rotated]
    if norm is not None:
        qk = rms_norm(qk, *norm)
    qk = apply_rope(qk, rotary)
    k_cache.flatten(0, 1).index_copy_(0, slots, qk[:, rotated - kv_heads :])
    v_cache.flatten(0, 1).index_copy_(0, slots, qkv[:, rotated:])
    return qk[:, : rotated - kv_heads]


@operation
def page_slots(pages: Tensor, logical: Tensor, page_size: int) -> Tensor:
    """Physical slots of logical ones.

    ``pages`` int64 ``(B, P)``: each request's pages; ``logical`` int64 ``(B, Q)`` below
    ``P * page_size`` → int64 ``(B, Q)``, slot = page * page_size + offset.
    """
    return pages.gather(1, logical // page_size) * page_size + logical % page_size


@operation
def move_kv(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots ``source`` to slots ``target`` in every layer, all read before any is written.

    ``k_cache, v_cache (layers, pages, page_size, kv_heads, D)``, each of its own D; ``source,
    target`` int64 ``(B, W)``; no row of ``source`` meets another row's ``target``, and targets are
    distinct.
    """
    source, target = source.flatten(), target.flatten()
    for cache in (k_cache, v_cache):
        flat = cache.flatten(1, 2)
        # Assigned to an index, a cache of one layer would have its size recorded.
        flat.index_copy_(1, target, flat.index_select(1, source))


@operation
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: KeySpan,
    window: int | None = None,
    scoring: Scoring = USUAL,
) -> Tensor:
    """Attention of a batch's queries over paged keys, with grouped heads.

    Args:
        q: ``(T, heads, D)``; heads is a multiple of kv_heads, head h reads kv head
            ``h // (heads / kv_heads)``.
        k_cache, v_cache: ``(pages, page_size, kv_heads, D)``. Or of latents (DeepSeek-V2, arXiv
            2405.04434): ``v_cache (…, V)`` and ``k_cache (…, D - V)``, of which a key is its value
            with what ``k_cache`` has behind it.
        span: Which keys are seen; every query must see at least one.
        window: Sliding window in tokens, the query's own position included, or None; longer
            than a tree is deep.
        scoring: Scale, soft cap and sinks of the scores.

    Returns:
        ``(T, heads * D)``, of latents ``(T, heads * V)``.
    """
    if span.offsets is None or span.mask is not None:
        return _attend(q, k_cache, v_cache, span, window, scoring)
    # Requests may be of very different lengths: each by itself reads and masks its own keys only.
    out = q.new_empty(q.shape[0], q.shape[1] * v_cache.shape[3])
    for here, own in span.requests(k_cache.shape[1]):
        out[here] = _attend(q[here], k_cache, v_cache, own, window, scoring)
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: KeySpan,
    window: int | None,
    scoring: Scoring,
) -> Tensor:
    """:func:`tree_attention` of the queries as one rectangle."""
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // kv_heads
    # The heads of a group share their keys: they become more queries of one kv head.
    grouped = span.rectangle(q).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)
    queries = grouped.flatten(2, 3)
    added = span.dense(page_size, window, group, q.dtype)
    sinks = None
    if scoring.sinks is not None:
        # One a row: heads of a group, each with all queries.
        sinks = scoring.sinks.view(kv_heads, group).repeat_interleave(grouped.shape[3], 1)
        sinks = F.pad(sinks, (0, added.shape[2] - sinks.shape[1]))
    rule = scoring.scale, scoring.soft_cap, sinks
    pages, own, order = span.own_pages(page_size, keys_together(q.dtype))
    if q.is_cuda:
        mixed = _at_once(queries, k_cache, v_cache, pages, added, *rule)
    else:
        shared = own, order, added, TOGETHER_BYTES
        mixed = _by_request(queries, k_cache, v_cache, pages, *shared, *rule)
    mixed = mixed.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)
    return span.flat(mixed[..., : v_cache.shape[3]].flatten(2))


def _mix(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    added: Tensor,
    scale: Optional[float],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    sinks: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """Values by weight: ``q (B, kv_heads, Q, D)``, ``keys, values (B, kv_heads, K, D)``, ``added``
    to the scores ``(B, 1, Q, K)``, ``sinks (kv_heads, Q)`` → as ``q``."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=added, scale=scale)
    # Products of three dimensions: those of more copy keys of many requests in another order.
    flat_q, flat_keys, flat_values = q.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
    factor = q.size(-1) ** -0.5 if scale is None else scale
    scores = torch.bmm(flat_q, flat_keys.transpose(1, 2)).view(
        added.size(0), -1, q.size(2), keys.size(2)
    )
    scores = scores.float() * factor
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores + added
    if sinks is not None:
        column = sinks.float()[None, :, :, None].expand(scores.size(0), -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.size(2)]
    return torch.bmm(weights.to(values.dtype).flatten(0, 1), flat_values).view_as(q)


def _at_once(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    added: Tensor,
    scale: Optional[float],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    sinks: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """Attention of ``q (B, kv_heads, Q, D)`` over ``pages (B, P)``, all copied before.

    What is mixed of latents is their keys, which begin with them: torch's kernel wants both of one
    size.

    Args:
        added: To the scores ``(B, 1, Q', P * page_size)``: rows of 0 from Q to Q'.
        scale, soft_cap: As in :class:`Scoring`; sinks: ``(kv_heads, Q')``, one a row.
    """
    rows, missing = q.size(2), added.size(2) - q.size(2)
    if missing > 0:
        q = F.pad(q, [0, 0, 0, missing])
    batch, kv_heads, every = q.size(0), q.size(1), pages.flatten()
    # Whole pages are copied, which indexing by a matrix of them would do number by number.
    keys = k_cache.index_select(0, every).view(batch, -1, kv_heads, k_cache.size(3))
    values = v_cache.index_select(0, every).view(batch, -1, kv_heads, v_cache.size(3))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if q.size(3) > keys.size(3):
        keys = values = torch.cat([values, keys], -1)
    mixed = _mix(q, keys, values, added, scale, soft_cap, sinks)
    return mixed[:, :, :rows] if missing > 0 else mixed


@traceable
def _by_request(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    own: Tensor,
    order: Tensor,
    added: Tensor,
    together_bytes: int,
    scale: Optional[float],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    sinks: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    """:func:`_at_once` on the CPU, with each request's own pages alone.

    A product over keys adds them up in an order that its shape decides, and how is the processor's
    affair. So a request's are of as many keys as it has, whatever the others have: those with
    equally many pages share a call, unless their keys take more than ``together_bytes``. A copy of
    more would go to memory and back, and be taken from the system and given back in each layer.

    Args:
        own, order: As :meth:`KeySpan.own_pages` gives them.
    """
    batch, page_size = q.size(0), k_cache.size(1)
    page_bytes = v_cache[0].numel() * v_cache.element_size()
    counts: List[int] = own.tolist()  # noqa: UP006
    most = counts[-1]
    few = batch * most * page_bytes <= together_bytes
    if batch == 1 or (few and counts[0] == most):
        if most < pages.size(1):
            pages, added = pages[:, :most], added[:, :, :, : most * page_size]
        return _at_once(q, k_cache, v_cache, pages, added, scale, soft_cap, sinks)
    out = torch.empty_like(q)
    start = 0
    while start < batch:
        count, end = counts[start], start + 1
        while end < batch and counts[end] == count:
            end += 1
        if (end - start) * count * page_bytes > together_bytes:
            end = start + 1
        who = order[start:end]
        here = pages[:, :count].index_select(0, who)
        seen = added[:, :, :, : count * page_size].index_select(0, who)
        some = q.index_select(0, who)
        mixed = _at_once(some, k_cache, v_cache, here, seen, scale, soft_cap, sinks)
        out.index_copy_(0, who, mixed)
        start = end
    return out
