"""Generated documents as batches of tokens in a few fixed shapes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from random import Random

from tokenizers import Tokenizer

from examples.embedded_model.data import PAD, Document, DocumentMaker
from examples.embedded_model.tokenizer import special_id
from overlap_spec.training.batches import WIDTHS, Batch, Row, padded


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
    tokens_per_batch: int
    max_length: int
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
                width = self.rng.choice(full)
                count, rows = self.rows(width), self.buckets[width]
                self.buckets[width] = rows[count:]
                return padded(rows[:count], width, self.pad)
            for row in self._draw(warm_up):
                fitting = next((w for w in self.widths if w >= len(row[0])), None)
                if fitting is not None:
                    self.buckets.setdefault(fitting, []).append(row)

    def _draw(self, warm_up: bool) -> list[Row]:
        again = round(self.chunk * self.replay_share)
        made = [self.maker.make(warm_up) for _ in range(self.chunk - again)]
        return encode_documents(self.tokenizer, made) + self.rng.choices(self.replay, k=again)

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on exactly here."""
        return pickle.dumps((self.rng.getstate(), self.buckets))

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""
        rng_state, self.buckets = pickle.loads(state)
        self.rng.setstate(rng_state)
