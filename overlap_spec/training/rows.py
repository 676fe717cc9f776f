"""Batches of a fixed set of rows, in seeded order, epoch after epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from overlap_spec.training.batches import WIDTHS, Batch, Row


@dataclass
class RowStream:
    """An endless, seeded and resumable stream of batches of ``rows``.

    As in :class:`overlap_spec.training.batches.BatchStream`, rows wait in the bucket of the
    smallest width that holds them, and a full bucket is a batch: with few rows one may hold a row
    twice.

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
                return self._cut(width, bucket)

    def _cut(self, width: int, numbers: list[int]) -> Batch:
        tokens = torch.full((len(numbers), width), self.pad)
        weights = torch.zeros(len(numbers), width)
        for i, number in enumerate(numbers):
            ids, loss = self.rows[number]
            tokens[i, : len(ids)] = torch.tensor(ids)
            weights[i, : len(ids)] = torch.tensor(loss)
        length = sum(len(self.rows[number][0]) for number in numbers)
        return Batch(tokens, weights, length, tuple(numbers))

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""
        return json.dumps([self.epoch, self.drawn, list(self.buckets.items())]).encode()

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""
        self.epoch, self.drawn, buckets = json.loads(state)
        self.buckets = {width: list(numbers) for width, numbers in buckets}
        self.order = self._shuffled()
