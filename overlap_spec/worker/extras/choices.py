"""Weighing the texts of choices: passes of the target over their tries, behind the prompt.

A text's weight is the probability of its tokens and of the output's end after them, as the model
has it: without mask, bias, penalties or temperature. It is that of the text by itself, though all
texts of a trie share one pass. The output may be chosen by these weights (`Grammar.faithful`), and
may tell them (`Grammar.probabilities`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from overlap_spec.errors import GrammarError, InvalidRequest, NumericFault
from overlap_spec.grammar.drafting.text_tokens import TextTokens
from overlap_spec.grammar.drafting.token_trie import TokenTrie, make_tries
from overlap_spec.kernels import KeySpan
from overlap_spec.kernels.sampling import WHOLE, draw, filter_probs, noise_keys
from overlap_spec.steps import Int64s, RowResult
from overlap_spec.types import ChoiceProbability, Delta, Output, Request
from overlap_spec.worker.batch import uploaded
from overlap_spec.worker.extras.base import (
    Ask,
    Extra,
    Row,
    Runner,
    Surroundings,
    row_extras,
    told_of,
)
from overlap_spec.worker.kv_pool import PagedAttend

# Nodes of one pass, and of all passes of a request.
PASS_NODES, MOST_NODES = 256, 4096
# Choices whose tokens are kept.
CACHED = 64
# Rows whose logits are held at once.
ROWS = 64


class Asked(NamedTuple):
    """What a pass weighs: a trie, and the tokens of which one ends the output."""

    trie: TokenTrie
    stop_ids: tuple[int, ...]


class Told(NamedTuple):
    """Of some texts, by number: the log-probability of each, and with which tokens it would be the
    output, the likeliest stop token behind them."""

    texts: Int64s
    logprobs: np.ndarray[tuple[int], np.dtype[np.float64]]
    tokens: tuple[tuple[int, ...], ...]


class Weighed:
    """The texts of a choice behind one prompt, each cut into tokens in one way. All requests for
    the same share it: one of them, ``leader``, has the tries weighed, and the others wait for that.

    Attributes:
        logprobs: float64 ``(m,)``, of each text; ``tokens``: as :class:`Told` has them.
        planned, known: Tries that are in a step or were, and those whose texts are weighed.
    """

    def __init__(self, texts: tuple[str, ...], tries: tuple[TokenTrie, ...]) -> None:
        self.texts, self.tries = texts, tries
        self.leader: int | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self.logprobs = np.zeros(len(self.texts))
        self.tokens: list[tuple[int, ...]] = [()] * len(self.texts)
        self.planned = self.known = 0


class Shelf:
    """What the requests of one engine share: tokens of choices, and what is weighed of them."""

    def __init__(self, engine: Surroundings) -> None:
        self._cut, self._longest = TextTokens(engine.vocabulary, engine.encode), engine.longest
        self.stop_ids = tuple(engine.vocabulary.stop_ids)
        self._cuts = lru_cache(CACHED)(self._cut_texts)
        # Those of the requests that are open.
        self._weighed: WeakValueDictionary[tuple[object, ...], Weighed] = WeakValueDictionary()

    def find(self, request: Request) -> Weighed:
        """What is to be weighed for a request. GrammarError: a text has no tokens of exactly its
        bytes, or does not fit; there are more tokens than are weighed."""
        key = request.prompt_ids, request.page_salt, request.grammar.source
        found = self._weighed.get(key)
        if found is None:
            room = self._longest - len(request.prompt_ids)
            found = self._weighed[key] = self._make(request.grammar.source, room)
        return found

    def _cut_texts(self, source: str) -> tuple[tuple[str, ...], list[list[int]]]:
        texts = tuple(json.loads(source))
        return texts, [self._cut(text) for text in texts]

    def _make(self, source: str, room: int) -> Weighed:
        texts, cuts = self._cuts(source)
        width = min(PASS_NODES, room)
        for text, tokens in zip(texts, cuts, strict=True):
            name = f"choice {text[:40]!r}"
            if not tokens:
                why = "cannot be weighed: this tokenizer has no tokens of exactly its bytes"
                raise GrammarError(f"{name} {why}", "choice")
            if len(tokens) > width:
                why = f"and at most {width} of one text can be weighed behind this prompt"
                raise GrammarError(f"{name} takes {len(tokens)} tokens, {why}", "choice")
        tries = make_tries(cuts, width)
        total = sum(len(trie.tokens) for trie in tries)
        if total > MOST_NODES:
            raise GrammarError(
                f"{len(texts)} choices take {total} tokens to weigh, and at most {MOST_NODES} are "
                "weighed: send fewer or shorter texts, or leave out probabilities and faithful",
                "choice",
            )
        return Weighed(texts, tuple(tries))


class Choices(Extra):
    """Has the texts of a choice weighed; tells how probable each is, or chooses by that."""

    def __init__(self, request: Request, engine: Surroundings) -> None:
        if engine.has_states:
            # Each pass would change them.
            raise InvalidRequest(
                f"{self.name}: whole texts cannot be weighed with this model, whose layers keep "
                "states: leave out probabilities and faithful",
                self.name,
            )
        self._request = request
        self.shelf: Shelf = engine.share(self.name, Shelf)
        self.weighed: Weighed = self.shelf.find(request)
        self._told: tuple[float, ...] = ()

    # Plan

    @property
    def passes(self) -> int:
        weighed = self.weighed
        if weighed.known == len(weighed.tries):
            return 0
        return max(1, len(weighed.tries) - weighed.planned)

    @property
    def most_behind(self) -> int:
        return max(trie.size - 1 for trie in self.weighed.tries)

    @property
    def next_behind(self) -> int | None:
        weighed = self.weighed
        if weighed.leader not in (None, self._request.id):
            return None
        return len(weighed.tries[weighed.planned].tokens)

    def ask_pass(self) -> Asked:
        weighed = self.weighed
        weighed.leader = self._request.id
        weighed.planned += 1
        return Asked(weighed.tries[weighed.planned - 1], self.shelf.stop_ids)

    def leave(self) -> None:
        if self.weighed.leader == self._request.id:
            # Nothing of it is under way: what was planned is known.
            self.weighed.leader = None

    # Compute

    @staticmethod
    def compute(runner: Runner, hidden: Tensor, asked: Sequence[Ask]) -> tuple[Tensor, ...]:
        """One pass: of each trie's nodes their log-probability after their parents, then of each
        of its texts those of the stop tokens after it: float32 ``(n,)``. Later tokens overwrite the
        slots behind the prompt that it writes."""
        device, target, layout = runner.device, runner.target, _Layout(asked)
        places, positions, owners, lengths, tokens, bounds, rows, ends, order = _upload(
            device,
            *(layout.places, layout.positions, layout.owners, layout.prefixes, layout.tokens),
            *(layout.bounds, layout.rows, layout.ends, layout.order),
        )
        logits = target.logits(hidden[ends])
        pages = runner.tables.pages[rows, : -(-layout.most_keys // runner.pool.page_size)]
        mask, longest = uploaded(torch.from_numpy(layout.mask), device), layout.mask.shape[1]
        span = KeySpan(pages, lengths, positions, mask, offsets=bounds, longest=longest)
        attend = PagedAttend(runner.pool, runner.token_slots(owners, places), span)
        behind, _ = target(tokens, positions, attend, ())
        parts = [_gathered(logits, *_upload(device, *layout.asked_of_roots))]
        for start in range(0, len(layout.tokens), ROWS):
            some = target.logits(behind[start : start + ROWS])
            parts.append(_gathered(some, *_upload(device, *layout.asked(start, start + ROWS))))
        every = torch.cat(parts)
        return (torch.empty_like(every).index_copy_(0, order, every),)

    # Read

    @staticmethod
    def read(found: Sequence[Tensor], asked: Sequence[Asked]) -> list[Told]:
        scores, told, at = found[0].numpy(), [], 0
        for trie, stops in asked:
            count = len(trie.tokens)
            along = scores[at : at + count].astype(np.float64)
            ends = scores[at + count : at + count + len(trie.ends) * len(stops)]
            at += count + len(ends)
            for node, parent in enumerate(trie.parents.tolist()):
                if parent >= 0:
                    along[node] += along[parent]
            last = ends.reshape(-1, len(stops)).astype(np.float64)
            logprobs = along[trie.ends] + np.logaddexp.reduce(last, axis=1)
            best = last.argmax(1).tolist()
            tokens = tuple(
                (*[int(trie.tokens[node]) for node in trie.path(end)], stops[stop])
                for end, stop in zip(trie.ends.tolist(), best, strict=True)
            )
            told.append(Told(trie.texts, logprobs, tokens))
        return told

    # Attach

    def hear(self, told: Told) -> None:
        weighed = self.weighed
        weighed.logprobs[told.texts] = told.logprobs
        for text, tokens in zip(told.texts.tolist(), told.tokens, strict=True):
            weighed.tokens[text] = tokens
        weighed.known += 1

    def begin(self, row: RowResult, step: int) -> RowResult:
        """Where the choice is faithful, the whole output comes at once."""
        weighed, request = self.weighed, self._request
        if not np.isfinite(weighed.logprobs).all():
            weighed.forget()
            return row._replace(error=NumericFault())
        self._told = tuple(weighed.logprobs.tolist())
        if not request.grammar.faithful:
            return row
        tokens = weighed.tokens[pick(weighed.logprobs, request)]
        # The whole text was drafted, so to speak; no mask chose its tokens one by one.
        drafts = len(tokens) - 1
        told = Row(step, tokens, drafts, drafts, False, None, None)
        parts = row_extras(request.sampling)
        return row._replace(tokens=tokens, extras=told_of(parts, told))

    def complete(self, last: Delta, output: Output) -> tuple[Delta, Output]:
        """The texts' probabilities, if they were asked for and came to be known."""
        if not self._told or not self._request.grammar.probabilities:
            return last, output
        best = max(self._told)
        shares = [math.exp(value - best) for value in self._told]
        parts = zip(self.weighed.texts, self._told, shares, strict=True)
        total = math.fsum(shares)
        choices = tuple(ChoiceProbability(text, own, share / total) for text, own, share in parts)
        return last._replace(choices=choices), replace(output, choices=choices)


def _upload(device: torch.device, *arrays: Int64s) -> list[Tensor]:
    """int64 arrays on the device, in one copy."""
    whole = uploaded(torch.from_numpy(np.concatenate(arrays)), device)
    return list(whole.split([len(array) for array in arrays]))


class _Layout:
    """The numbers of a pass over several tries, which lie end to end."""

    def __init__(self, asked: Sequence[Ask]) -> None:
        tries, chunks = [ask.what.trie for ask in asked], [ask.chunk for ask in asked]
        sizes = np.array([len(trie.tokens) for trie in tries], np.int64)
        first = np.cumsum(sizes) - sizes
        self.ends = np.array([ask.first + len(ask.chunk.tokens) - 1 for ask in asked], np.int64)
        self.rows = np.array([chunk.row for chunk in chunks], np.int64)
        self.prefixes = np.array([chunk.start + len(chunk.tokens) for chunk in chunks], np.int64)
        self.tokens = np.concatenate([trie.tokens for trie in tries])
        self.owners = np.repeat(self.rows, sizes)
        before = np.repeat(self.prefixes, sizes)
        self.places = before + np.arange(sizes.sum()) - np.repeat(first, sizes)
        self.positions = before + np.concatenate([trie.depths for trie in tries]) - 1
        self.bounds = np.append(first, sizes.sum())
        self.most_keys = int((self.prefixes + sizes.max()).max())
        self.mask = np.zeros((len(self.tokens), sizes.max()), bool)
        at, wanted = [], []
        for number, (ask, start) in enumerate(zip(asked, first.tolist(), strict=True)):
            trie, stops = ask.what.trie, np.array(ask.what.stop_ids, np.int64)
            # Every node sees itself and what is above it.
            for node, parent in enumerate(trie.parents.tolist(), start):
                if parent >= 0:
                    self.mask[node] = self.mask[start + parent]
                self.mask[node, node - start] = True
            # Below 0: after a chunk.
            at += [np.where(trie.parents < 0, -1 - number, start + trie.parents)]
            at += [np.repeat(start + trie.ends, len(stops))]
            wanted += [trie.tokens, np.tile(stops, len(trie.ends))]
        every = np.concatenate(at)
        # Those of one row together; where each of them goes.
        self.order = np.argsort(np.where(every < 0, -1, every), kind="stable").astype(np.int64)
        self._at, self._wanted = every[self.order], np.concatenate(wanted)[self.order]
        self._roots = int((every < 0).sum())

    @property
    def asked_of_roots(self) -> tuple[Int64s, Int64s]:
        """Chunks, and tokens after them."""
        return -1 - self._at[: self._roots], self._wanted[: self._roots]

    def asked(self, start: int, end: int) -> tuple[Int64s, Int64s]:
        """Nodes from ``start`` to ``end`` - 1, counted from ``start``, and tokens after them."""
        nodes = self._at[self._roots :]
        low, high = self._roots + np.searchsorted(nodes, (start, end))
        return self._at[low:high] - start, self._wanted[low:high]


def _gathered(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of ``tokens (n,)`` in ``rows (n,)`` of ``logits``: float32 ``(n,)``."""
    exact = logits.float()
    return exact[rows, tokens] - exact.logsumexp(-1)[rows]


def pick(logprobs: np.ndarray[tuple[int], np.dtype[np.float64]], request: Request) -> int:
    """The text that a request gets: the most probable one at temperature 0, else a draw, where
    temperature, top-k, top-p and min-p act on the texts as they would on tokens."""
    asked = request.sampling
    heat = 1.0 if asked.temperature is None else asked.temperature
    if heat == 0:
        return int(logprobs.argmax())
    probs = (torch.from_numpy(logprobs) / heat).softmax(0).float()[None]
    top_k = len(logprobs) if asked.top_k in (None, -1) else asked.top_k
    top_p = 2.0 if asked.top_p is None or asked.top_p >= 1 else asked.top_p
    probs = filter_probs(probs, *(torch.tensor([x]) for x in (top_k, top_p, asked.min_p)))
    seed, place = torch.tensor([request.seed]), torch.tensor([len(request.prompt_ids)])
    return int(draw(probs, noise_keys(seed, place, WHOLE)))
