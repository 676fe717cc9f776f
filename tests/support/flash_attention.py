"""FlashAttention-3's ``flash_attn_with_kvcache`` in torch, as its documentation says it is: it
stands for the module where none is installed, and takes what that takes, no more."""

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from overlap_spec.kernels.dispatch import FLASH
from overlap_spec.kernels.triton import flash

# Called so often.
CALLS = {"trees": 0, "chunks": 0}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
) -> Any:
    """Means, in the type of q, and natural logarithms of the weights' sums, -inf of no keys."""
    CALLS["chunks" if causal else "trees"] += 1
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == 1
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert return_softmax_lse
    assert (cu_seqlens_q is None) == (max_seqlen_q is None) == (q.dim() == 4)
    if cu_seqlens_q is None:
        lengths = [q.shape[1]] * q.shape[0]
    else:
        assert cu_seqlens_q.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) <= (max_seqlen_q or 0)
    rows = q.reshape(-1, *q.shape[-2:]).float()
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    means, logs = [], []
    for number, (start, end) in enumerate(pairwise(bounds)):
        seen = int(cache_seqlens[number])
        k, v = (
            cache[page_table[number].long()].flatten(0, 1)[:seen].float()
            for cache in (k_cache, v_cache)
        )
        group = q.shape[-2] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", rows[start:end], k) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # The last query's place is the last key's.
        place = torch.arange(end - start)[:, None] + seen - (end - start)
        key = torch.arange(seen)
        hidden = (key > place) & causal
        if window_size != (-1, -1):
            hidden |= (key < place - window_size[0]) | (key > place + window_size[1])
        scores = scores.masked_fill(hidden, -torch.inf)
        means.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v))
        logs.append(scores.logsumexp(-1))
    mean = torch.cat(means).to(q.dtype).view(q.shape)
    return mean, torch.cat(logs, 1) if cu_seqlens_q is not None else torch.stack(logs)


def _in_base_2(q: Any, *args: Any, **kwargs: Any) -> Any:
    mean, log_sum = flash_attn_with_kvcache(q, *args, **kwargs)
    return mean, log_sum / torch.log(torch.tensor(2.0))


def _takes_draft_caches(q: Tensor, span: Any, window: Any, _: Any) -> bool:
    return q.dtype in flash.HALF and (window is None or span.mask is None)


def _takes_windows(q: Tensor, span: Any, _: Any, scoring: Any) -> bool:
    return q.dtype in flash.HALF and span.first == 0 and scoring.sinks is None


def _takes_sinks(q: Tensor, span: Any, *_: Any) -> bool:
    return q.dtype in flash.HALF and span.first == 0 and span.mask is None


FAULTS: dict[str, tuple[str, Any]] = {
    "logarithms in base 2": ("flash_attn_with_kvcache", _in_base_2),
    "draft caches are taken": ("takes", _takes_draft_caches),
    "windows of trees are taken": ("takes", _takes_windows),
    "sinks of chunks are taken": ("takes", _takes_sinks),
}


@contextmanager
def installed(fault: str | None = None) -> Iterator[None]:
    """The stand-in as the module, with one of :data:`FAULTS` in it or in what chooses it."""
    module = ModuleType(FLASH)
    module.__spec__ = importlib.machinery.ModuleSpec(FLASH, None)
    stand: Any = flash_attn_with_kvcache
    name, wrong = FAULTS[fault] if fault else ("", None)
    module.flash_attn_with_kvcache = wrong if name == stand.__name__ else stand  # type: ignore[attr-defined]
    takes = wrong if name == "takes" else flash.takes
    sys.modules[FLASH] = module
    try:
        with patch.object(flash, "takes", takes):
            yield
    finally:
        del sys.modules[FLASH]
