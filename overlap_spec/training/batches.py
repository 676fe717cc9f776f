"""Documents → token batches in a few fixed shapes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec.training.data import PAD, Document, DocumentMaker
from overlap_spec.training.tokenizer import special_id

# Fine steps where most rows are: padding is work for nothing.
WIDTHS = (48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 288, 384, 576, 1024, 3072)


# Ids and loss weights of one document.
Row = tuple[Sequence[int], Sequence[float]]


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


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[Row]:
    """Ids and loss weights of each document."""
    texts = [text for document in documents for text, _ in document]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    rows: list[Row] = []
    for document in documents:
        ids: list[int] = []
        weights: list[float] = []
        for _, weight in document:
            piece = next(encodings).ids
            ids += piece
            weights += [weight] * len(piece)
        rows.append((ids, weights))
    return rows


@dataclass
class BatchStream:
    """An endless, seeded and resumable stream of batches.

    Documents wait in the bucket of the smallest width that holds them; a full bucket is a batch.

    Attributes:
        tokens_per_batch: B × W of every batch, padding included.
        max_length: Longer documents are dropped.
        replay: Rows (ids, weights) that are drawn again and again beside new documents.
        replay_share: Their share of what is drawn.
    """

    tokenizer: Tokenizer
    gsm8k: list[tuple[str, str]]
    seed: int
    tokens_per_batch: int = 12288
    max_length: int = 4096
    chunk: int = 256
    widths: tuple[int, ...] = WIDTHS
    replay: list[Row] = field(default_factory=list)
    replay_share: float = 0.0
    buckets: dict[int, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.maker = DocumentMaker(self.rng, self.gsm8k)
        self.pad = special_id(self.tokenizer, PAD)
        self.widths = tuple(w for w in self.widths if w <= self.max_length)

    def rows(self, width: int) -> int:
        """Rows of a batch of this width."""
        return max(1, self.tokens_per_batch // width)

    def next(self, warm_up: bool = False) -> Batch:
        """The next batch; ``warm_up`` draws new documents from the copying curriculum."""
        while True:
            full = [w for w, rows in self.buckets.items() if len(rows) >= self.rows(w)]
            if full:
                return self._cut(self.rng.choice(full))
            for row in self._draw(warm_up):
                width = next((w for w in self.widths if w >= len(row[0])), None)
                if width is not None:
                    self.buckets.setdefault(width, []).append(row)

    def _draw(self, warm_up: bool) -> list[Row]:
        again = round(self.chunk * self.replay_share)
        made = [self.maker.make(warm_up) for _ in range(self.chunk - again)]
        return encode_documents(self.tokenizer, made) + self.rng.choices(self.replay, k=again)

    def _cut(self, width: int) -> Batch:
        count = self.rows(width)
        rows, self.buckets[width] = self.buckets[width][:count], self.buckets[width][count:]
        tokens = torch.full((count, width), self.pad)
        loss = torch.zeros(count, width)
        for i, (ids, weights) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
            loss[i, : len(ids)] = torch.tensor(weights)
        return Batch(tokens, loss, sum(len(ids) for ids, _ in rows))

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""
        return pickle.dumps((self.rng.getstate(), self.buckets))

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""
        rng_state, self.buckets = pickle.loads(state)
        self.rng.setstate(rng_state)
