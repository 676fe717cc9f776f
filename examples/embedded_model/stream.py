"""Generated documents as batches of tokens in a few fixed shapes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from queue import Empty, Full
from random import Random
from typing import Any

import numpy as np
import torch
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


# Batches that wait in each process.
AHEAD = 8


class WorkerStream:
    """Batches of several processes, each with a seed of its own, taken in turn.

    Without the curriculum the same seed and number of processes give the same batches; a switch of
    the curriculum shows once what was ahead is used up.

    Args:
        make: Makes a :class:`BatchStream` of a ``seed``, in each process its own; it is pickled.
        workers: How many processes.
    """

    def __init__(self, make: Callable[..., BatchStream], seed: int, workers: int) -> None:
        self.make, self.seed, self.workers, self.taken = make, seed, workers, 0
        self.processes: list[Any] = []

    def _start(self, warm_up: bool) -> None:
        # A fork would share what this process holds of the GPU.
        context = get_context("spawn")
        self.warm_up = context.Value("b", warm_up)
        self.queues = [context.Queue(AHEAD) for _ in range(self.workers)]
        first = self.taken
        for number, queue in enumerate(self.queues):
            # After a stop the seeds are new: nothing is learnt twice, nothing need be skipped.
            seed = Random(f"{self.seed} {number} {first}").getrandbits(62)
            process = context.Process(
                target=_write, args=(self.make, seed, queue, self.warm_up), daemon=True
            )
            process.start()
            self.processes.append(process)

    def next(self, warm_up: bool = False) -> Batch:
        """The next batch; ``warm_up`` as of :class:`BatchStream`.

        Raises:
            RuntimeError: The process whose turn it is has ended.
        """
        if not self.processes:
            self._start(warm_up)
        self.warm_up.value = warm_up
        turn = self.taken % self.workers
        while True:
            try:
                tokens, weights, length = self.queues[turn].get(timeout=1)
                break
            except Empty:
                if not self.processes[turn].is_alive():
                    raise RuntimeError(f"process {turn} that writes documents has ended") from None
        self.taken += 1
        return Batch(torch.from_numpy(tokens).long(), torch.from_numpy(weights), length)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        self.processes = []

    def state(self) -> bytes:
        """What :meth:`restore` needs to go on, with other documents than before."""
        return pickle.dumps(self.taken)

    def restore(self, state: bytes) -> None:
        """Go on from :meth:`state`."""
        self.close()
        self.taken = pickle.loads(state)


def _write(make: Callable[..., BatchStream], seed: int, queue: Any, warm_up: Any) -> None:
    """One process: batches into its queue, as arrays, until it or its parent is ended."""
    parent = parent_process()
    assert parent is not None
    # Nobody reads any more where it ends.
    queue.cancel_join_thread()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stream = make(seed=seed)
    while True:
        batch = stream.next(bool(warm_up.value))
        arrays = batch.tokens.numpy().astype(np.int32), batch.weights.numpy(), batch.length
        while True:
            try:
                queue.put(arrays, timeout=1)
                break
            except Full:
                if not parent.is_alive():
                    return
