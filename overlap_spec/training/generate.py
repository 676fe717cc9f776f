"""Greedy generation in batches: the target's own answers, to train a head on and to check it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.models.decoder import Decoder, Heads, Latents
from overlap_spec.training.attention import usual

AT_ONCE = 16


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

    def __call__(self, layer: int, heads: Heads | Latents) -> Tensor:
        q, k, v = usual(heads)
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
    deadline: float = math.inf,
) -> list[list[int]]:
    """The greedy continuation of each prompt, at most ``max_new`` tokens.

    Args:
        end_ids: An output ends with the first of these.
        deadline: Of ``time.monotonic``: outputs are cut there, behind a token each at least.
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
        tokens = logits.argmax(-1, keepdim=True)
        new = tokens[:, 0].tolist()
        for row in sorted(running):
            outputs[row].append(new[row])
            if outputs[row][-1] in end_ids:
                running.discard(row)
        if not running or time.monotonic() >= deadline:
            break
        attend.advance()
    return outputs


def answers(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    end_ids: Collection[int],
    max_new: int,
    max_length: int,
    deadline: float = math.inf,
    at_once: int = AT_ONCE,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Greedy answers to many prompts, those of like lengths together: least padding.

    Args:
        max_new, max_length: Most tokens of an answer, and of a prompt with its answer.
        deadline: Of ``time.monotonic``: what has not begun then gets no answer, but for the first.
        at_once: How many prompts are answered together.

    Yields:
        Some of the prompts' numbers, each with its answer.
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), at_once):
        if start and time.monotonic() >= deadline:
            return
        part = order[start : start + at_once]
        rows = [prompts[number] for number in part]
        room = min(max_new, max_length - len(rows[-1]))
        yield list(zip(part, greedy(decoder, rows, end_ids, room, deadline), strict=True))
