"""State of the running requests on the device: one row a request, fixed tables for all rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap_spec.types import BANNED_TOKENS, MOST_BANNED, Request
from overlap_spec.worker.extras.base import Extra, row_extras

# More drafts than a run can have.
DEEPEST = 2**31


class SamplingFeatures(NamedTuple):
    """What the requests of a step ask for beyond an argmax: the rest is skipped."""

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False
    banned: bool = False
    min_tokens: bool = False
    top_logprobs: int | None = None
    extras: frozenset[type[Extra]] = frozenset()

    @property
    def by_node(self) -> bool:
        """Whether the choice at a node depends on its row and position."""
        return self.sampled or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether the choice is not among the model's own logits."""
        return self.penalised or self.biased or self.banned or self.min_tokens

    @property
    def tells(self) -> bool:
        """Whether more is asked of a result than its tokens."""
        return self.top_logprobs is not None or bool(self.extras)

    @property
    def reads_tree(self) -> bool:
        """Whether an optional part reads the drafted trees."""
        return bool(self.extras) and any(part.reads_tree for part in self.extras)


PLAIN = SamplingFeatures()


class RowTables(nn.Module):
    """Committed lengths, roots, page tables and sampling settings of ``max_rows`` rows.

    ``committed`` int64 ``(R,)``: tokens whose target keys are cached, which is the root's position.
    ``roots`` int64 ``(R,)``: last committed tokens. ``pages`` int64 ``(R, P)``. What only some
    requests need is allocated on first use. R is ``max_rows + 1``: the last, :attr:`padding_row`,
    belongs to no request, and its pages are page 0. It fills batches up to a recorded size.
    """

    committed: Tensor
    roots: Tensor
    pages: Tensor
    depth_limit: Tensor
    temperature: Tensor
    seed: Tensor

    def __init__(self, max_rows: int, max_pages: int, vocab_size: int, device: torch.device):
        def table(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_rows + 1, *shape, dtype=dtype, device=device)

        super().__init__()
        self.device, self.vocab_size, self.padding_row = device, vocab_size, max_rows
        for name in ("committed", "roots", "seed", "depth_limit"):
            self.register_buffer(name, table(torch.int64))
        self.register_buffer("pages", table(torch.int64, max_pages))
        self.register_buffer("temperature", table(torch.float32))
        self.top_p, self.min_p = (table(torch.float32) for _ in range(2))
        self.top_k, self.min_position = (table(torch.int64) for _ in range(2))
        self.repetition, self.presence, self.frequency = (table(torch.float32) for _ in range(3))
        self._wide: dict[str, Tensor] = {}
        self._features: dict[int, SamplingFeatures] = {}
        self._kinds: dict[SamplingFeatures, SamplingFeatures] = {}

    def wide(
        self, name: str, dtype: torch.dtype, value: int = 0, shape: Sequence[int] = ()
    ) -> Tensor:
        """A table ``(R, *shape)``, else ``(R, vocab)``, made on first use, full of ``value``."""
        if name not in self._wide:
            shape = self.padding_row + 1, *(shape or (self.vocab_size,))
            self._wide[name] = torch.full(shape, value, dtype=dtype, device=self.device)
        return self._wide[name]

    @property
    def output_counts(self) -> Tensor:
        """int32 ``(R, vocab)``: occurrences in the output."""
        return self.wide("output_counts", torch.int32)

    @property
    def in_prompt(self) -> Tensor:
        """bool ``(R, vocab)``: whether the prompt holds the token."""
        return self.wide("in_prompt", torch.bool)

    @property
    def banned(self) -> Tensor:
        """int64 ``(R, MOST_BANNED, BANNED_TOKENS)``: sequences that the output may not have, each
        at its row's end; -1 before them, and where there is none."""
        return self.wide("banned", torch.int64, -1, (MOST_BANNED, BANNED_TOKENS))

    @property
    def recent(self) -> Tensor:
        """int64 ``(R, BANNED_TOKENS - 1)``: the last tokens of the output, the root's included; -1
        before its start. Of rows with banned sequences."""
        return self.wide("recent", torch.int64, -1, (BANNED_TOKENS - 1,))

    def assign(self, row: int, request: Request) -> None:
        """Note on the host what the row's new request asks for; :meth:`write` must follow."""
        s = request.sampling
        sampled = s.temperature != 0
        filtered = s.top_k not in (None, -1) or s.top_p not in (None, 1) or s.min_p > 0
        penalties = (s.presence_penalty, s.frequency_penalty, (s.repetition_penalty or 1.0) - 1)
        single = _single(request)
        features = SamplingFeatures(
            sampled=sampled,
            filtered=sampled and filtered,
            penalised=any(penalties),
            biased=bool(s.logit_bias or single) or s.allowed_token_ids is not None,
            banned=len(single) < len(request.banned),
            min_tokens=s.min_tokens > 0,
            top_logprobs=s.logprobs,
            extras=row_extras(s),
        )
        # Equal ones are one object, so that a step compares as many as differ.
        self._features[row] = self._kinds.setdefault(features, features)

    def features(self, rows: Iterable[int]) -> SamplingFeatures:
        """What a step over ``rows`` cannot skip."""
        each = list({id(n): n for n in map(self._features.__getitem__, rows)}.values()) or [PLAIN]
        if len(each) == 1:
            return each[0]
        *asked, tops, extras = zip(*each, strict=True)
        most = max((top for top in tops if top is not None), default=None)
        return SamplingFeatures._make([*map(any, asked), most, frozenset().union(*extras)])

    def features_of(self, row: int) -> SamplingFeatures:
        """What the row's request asks for."""
        return self._features[row]

    def write(self, row: int, request: Request, output_ids: tuple[int, ...]) -> None:
        """Give ``row`` on the device to a request whose output so far is ``output_ids``."""
        s = request.sampling
        # A number written to one index would make CUDA wait; to a slice it does not.
        here = slice(row, row + 1)
        top_p = 1.0 if s.top_p is None else s.top_p
        self.committed[here] = 0
        self.temperature[here] = 1.0 if s.temperature is None else s.temperature
        self.min_p[here] = s.min_p
        # At 1.0 every token stays, however the running sum rounds.
        self.top_p[here] = top_p if top_p < 1.0 else 2.0
        self.top_k[here] = self.vocab_size if s.top_k in (None, -1) else s.top_k
        self.seed[here] = request.seed
        self.depth_limit[here] = DEEPEST if s.speculate else 0
        self.repetition[here] = 1.0 if s.repetition_penalty is None else s.repetition_penalty
        self.presence[here], self.frequency[here] = s.presence_penalty, s.frequency_penalty
        self.min_position[here] = len(request.prompt_ids) + s.min_tokens
        self._write_wide(row, request, output_ids)

    def _write_wide(self, row: int, request: Request, output_ids: tuple[int, ...]) -> None:
        features = self._features[row]
        if features.penalised:
            counts, prompt = self.output_counts[row].zero_(), self.in_prompt[row].zero_()
            ones = torch.ones(len(output_ids), dtype=counts.dtype, device=self.device)
            counts.index_add_(0, self._ids(output_ids), ones)
            prompt.index_fill_(0, self._ids(request.prompt_ids), True)
        if features.biased:
            bias = self.wide("bias", torch.float32)[row]
            allowed = request.sampling.allowed_token_ids
            bias.fill_(0.0 if allowed is None else -torch.inf)
            if allowed is not None:
                bias.index_fill_(0, self._ids(allowed), 0.0)
            for token, value in request.sampling.logit_bias.items():
                bias[token : token + 1] += value
            bias.index_fill_(0, self._ids(_single(request)), -torch.inf)
        elif "bias" in self._wide:
            # It is added to every row of a step in which any request has one.
            self._wide["bias"][row].zero_()
        if features.banned:
            longer = [each for each in request.banned if len(each) > 1]
            ends = [[-1] * (BANNED_TOKENS - len(each)) + [*each] for each in longer]
            self.banned[row].fill_(-1)[: len(ends)] = self._ids(ends)
            last = output_ids[1 - BANNED_TOKENS :]
            before = (-1,) * (BANNED_TOKENS - 1 - len(last))
            self.recent[row] = self._ids((*before, *last))
        elif "banned" in self._wide:
            # It holds in every row of a step in which any request has one.
            self._wide["banned"][row].fill_(-1)
        if features.min_tokens:
            stops = self.wide("stops", torch.bool)[row].zero_()
            stops.index_fill_(0, self._ids(sorted(request.stop_ids)), True)

    def _ids(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        pinned = self.device.type == "cuda"
        found = torch.tensor(ids, dtype=torch.int64, pin_memory=pinned)
        return found.to(self.device, non_blocking=True)

    def count_output(self, rows: Tensor, emitted: Tensor, lengths: Tensor) -> None:
        """Add ``emitted[b, :lengths[b] + 1]`` to the output of ``rows[b]``; negatives are none."""
        index = torch.arange(emitted.shape[1], device=self.device)
        real = (index <= lengths[:, None]) & (emitted >= 0)
        counts = self.output_counts
        flat = rows[:, None] * self.vocab_size + emitted.clamp(min=0)
        counts.view(-1).index_add_(0, flat.flatten(), real.flatten().to(counts.dtype))

    def push_output(self, rows: Tensor, emitted: Tensor, lengths: Tensor) -> None:
        """Let :attr:`recent` of ``rows[b]`` go on by ``emitted[b, :lengths[b] + 1]``."""
        recent = self.recent
        known = torch.cat([recent[rows], emitted], 1)
        first = (lengths + 1)[:, None]
        recent[rows] = known.gather(1, first + torch.arange(recent.shape[1], device=self.device))


def _single(request: Request) -> list[int]:
    """Tokens that are banned wherever they stand."""
    return [each[0] for each in request.banned if len(each) == 1]
