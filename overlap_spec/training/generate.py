"""Greedy generation in batches: the target's own outputs, for training a head and for checks."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.models.decoder import Decoder, Heads
from overlap_spec.training.batches import Row

# Changes the logits (rows, vocab) in place, given the indices of the prompts still running.
Mask = Callable[[list[int], Tensor], None]


class CachedRows:
    """``attend`` with a cache for prompts padded on the left.

    Args:
        decoder: The model, for its shape.
        lengths: Tokens of each prompt.
        total: Longest sequence, prompt and output.
    """

    def __init__(self, decoder: Decoder, lengths: list[int], total: int) -> None:
        config = decoder.config
        device, dtype = decoder.norm.weight.device, decoder.norm.weight.dtype
        shape = (config.num_layers, 2, len(lengths), config.num_kv_heads, total, config.head_dim)
        self.cache = torch.zeros(shape, device=device, dtype=dtype)
        self.groups = config.num_heads // config.num_kv_heads
        self.start = max(lengths) - torch.tensor(lengths, device=device)
        self.begin, self.end = 0, max(lengths)

    def advance(self) -> None:
        """From here on calls bring one token a row, behind all others."""
        self.begin, self.end = self.end, self.end + 1

    def positions(self) -> Tensor:
        """int64 ``(B, new tokens)``: each new token's position; padding has 0."""
        slots = torch.arange(self.begin, self.end, device=self.start.device)
        return (slots - self.start[:, None]).clamp(min=0)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        q, k, v = heads.rotated()
        rows, new = len(self.start), self.end - self.begin
        q, k, v = (x.view(rows, new, x.shape[1], -1).transpose(1, 2) for x in (q, k, v))
        self.cache[layer, 0, :, :, self.begin : self.end] = k
        self.cache[layer, 1, :, :, self.begin : self.end] = v
        keys, values = self.cache[layer, :, :, :, : self.end].repeat_interleave(self.groups, 2)
        slots = torch.arange(self.end, device=q.device)
        own = slots[self.begin :]
        seen = (slots <= own[:, None]) & (slots >= self.start[:, None, None])
        # A padded query sees itself, lest its softmax be empty.
        seen |= slots == own[:, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None])
        return out.transpose(1, 2).reshape(rows * new, -1)


@torch.no_grad()
def greedy(
    decoder: Decoder,
    prompts: list[list[int]],
    end_ids: Collection[int],
    max_new: int,
    mask: Mask | None = None,
) -> list[list[int]]:
    """The greedy continuation of each prompt, at most ``max_new`` tokens.

    Args:
        end_ids: An output ends with the first of these.
        mask: Forbids tokens; ``-inf`` in the logits.
    """
    longest = max(len(prompt) for prompt in prompts)
    device = decoder.norm.weight.device
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
    attend = CachedRows(decoder, [len(p) for p in prompts], longest + max_new)
    outputs: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new):
        hidden, _ = decoder(tokens.flatten(), attend.positions().flatten(), attend)
        logits = decoder.logits(hidden.view(len(prompts), -1, hidden.shape[-1])[:, -1]).float()
        if mask is not None:
            mask(sorted(running), logits)
        tokens = logits.argmax(-1, keepdim=True)
        for row in sorted(running):
            outputs[row].append(int(tokens[row]))
            if outputs[row][-1] in end_ids:
                running.discard(row)
        if not running:
            break
        attend.advance()
    return outputs


def own_outputs(
    decoder: Decoder,
    prompts: list[list[int]],
    end_ids: Collection[int],
    max_new: int,
    batch: int = 64,
    report: Callable[[float], None] | None = None,
) -> list[Row]:
    """Prompts with their greedy continuations as training rows: ids, and weights of 0.1 on the
    prompt and 1 on the output.

    Args:
        report: Called with the share that is done.
    """
    ordered = sorted(prompts, key=len)
    rows: list[Row] = []
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        for prompt, output in zip(part, greedy(decoder, part, end_ids, max_new), strict=True):
            rows.append((prompt + output, [0.1] * len(prompt) + [1.0] * len(output)))
        if report is not None:
            report(min(1.0, (start + batch) / len(ordered)))
    return rows
