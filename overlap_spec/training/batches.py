"""Rows of tokens with loss weights, and batches of a fixed set of them, epoch after epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

# Fine steps where most rows are: padding is work for nothing.
WIDTHS = (48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 288, 384, 576, 1024, 3072)
# Of what is read and not answered: it teaches little, and a drafter meets it too.
PROMPT_WEIGHT = 0.1

# Ids and loss weights of one document.
Row = tuple[Sequence[int], Sequence[float]]


def answer_row(prompt: list[int], answer: list[int]) -> Row:
    """A prompt with its answer, which weighs 1."""
    return prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)


@dataclass(frozen=True)
class Batch:
    """One step's rows, padded on the right.

    ``tokens`` int64 ``(B, W)``; ``weights`` float32 ``(B, W)``: weight of each token as a target,
    0 on padding. ``length``: how many tokens are not padding; 0 where nobody counted.
    ``numbers``: which rows of a fixed set these are; empty where there is no such set.
    """

    tokens: Tensor
    weights: Tensor
    length: int = 0
    numbers: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, for which a GPU's host does not wait."""
        if device.type == self.tokens.device.type:
            return self
        pair = (x.pin_memory() if device.type == "cuda" else x for x in (self.tokens, self.weights))
        tokens, weights = (x.to(device, non_blocking=True) for x in pair)
        return replace(self, tokens=tokens, weights=weights)


def padded(rows: Sequence[Row], width: int, pad: int, numbers: tuple[int, ...] = ()) -> Batch:
    """``rows``, none of them longer than ``width``, as a batch."""
    tokens = torch.full((len(rows), width), pad)
    weights = torch.zeros(len(rows), width)
    for i, (ids, loss) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        weights[i, : len(ids)] = torch.tensor(loss)
    return Batch(tokens, weights, sum(len(ids) for ids, _ in rows), numbers)


@dataclass
class RowStream:
    """An endless, seeded and resumable stream of batches of ``rows``.

    Rows wait in the bucket of the smallest width that holds them, and a full bucket is a batch:
    with few rows one may hold a row twice.

    Attributes:
        rows: Ids and loss weights; none longer than the widest bucket.
        tokens_per_batch: B × W of every batch, padding included; one row at least.
        pad: Id that fills up a row.
    """

    rows: Sequence[Row]
    seed: int
    tokens_per_batch: int
    pad: int
    widths: tuple[int, ...] = WIDTHS
    epoch: int = 0
    drawn: int = 0
    buckets: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.rows)))
        Random(f"{self.seed} {self.epoch}").shuffle(order)
        return order

    def next(self) -> Batch:
        """The next batch, with the numbers of its rows."""
        while True:
            if self.drawn == len(self.order):
                self.epoch, self.drawn = self.epoch + 1, 0
                self.order = self._shuffled()
            number = self.order[self.drawn]
            self.drawn += 1
            length = len(self.rows[number][0])
            width = next(width for width in self.widths if width >= length)
            bucket = self.buckets.setdefault(width, [])
            bucket.append(number)
            if len(bucket) >= max(1, self.tokens_per_batch // width):
                del self.buckets[width]
                return padded([self.rows[n] for n in bucket], width, self.pad, tuple(bucket))

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""
        return json.dumps([self.epoch, self.drawn, list(self.buckets.items())]).encode()

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""
        self.epoch, self.drawn, buckets = json.loads(state)
        self.buckets = {width: list(numbers) for width, numbers in buckets}
        self.order = self._shuffled()
