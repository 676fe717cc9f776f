"""One model's tokens in another's vocabulary, compared by their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import read_json

# Of the target's tokens, what a draft model must at least have.
LEAST_SHARE = 0.5


class VocabularyMap(NamedTuple):
    """How a draft model's tokens are the target's; int64, on the CPU.

    Attributes:
        read: ``(target vocabulary,)``: what the model reads for each of the target's tokens; for
            one that it lacks, the token with the longest end of its text.
        drafted: ``(n,)``: the model's own tokens that the target has too, ascending; None: all, by
            the same ids.
        offsets: ``(n,)``: target id = index in ``drafted`` + its offset.
        share: Of the target's tokens those that the model has.
    """

    read: Tensor
    drafted: Tensor | None
    offsets: Tensor | None
    share: float


def map_vocabulary(draft: Path, target: Path, own_size: int, size: int) -> VocabularyMap:
    """Compare the ``tokenizer.json`` of a draft model and its target.

    Args:
        own_size, size: Rows of the draft model's embedding and of the target's; either may be
            padded.

    Raises:
        CheckpointError: a file is missing or has no vocabulary, or they have too little in common;
            names the first token that differs.
    """
    own, wanted = (token_texts(folder / "tokenizer.json") for folder in (draft, target))
    read = torch.arange(size).clamp(max=own_size - 1)
    if own == wanted:
        return VocabularyMap(read, None, None, 1.0)
    known: dict[str, int] = {}
    for number in sorted(own):
        if number < own_size:
            known.setdefault(own[number], number)
    pairs: dict[int, int] = {}
    shared = 0
    for number in sorted(wanted):
        text = wanted[number]
        if text in known:
            shared += 1
            if number < size:
                pairs.setdefault(known[text], number)
        end = next((text[i:] for i in range(len(text)) if text[i:] in known), None)
        if number < size and end is not None:
            read[number] = known[end]
    share = shared / len(wanted)
    if share < LEAST_SHARE:
        number = min(n for n in own.keys() | wanted.keys() if own.get(n) != wanted.get(n))
        mine, its = own.get(number), wanted.get(number)
        raise CheckpointError(
            f"{draft}: a draft model must have the target's vocabulary or at least "
            f"{LEAST_SHARE:.0%} of it, and has {share:.1%}; the first difference is token "
            f"{number}, {'absent' if mine is None else repr(mine)} here and "
            f"{'absent' if its is None else repr(its)} in the target"
        )
    drafted = torch.tensor(sorted(pairs))
    targets = torch.tensor([pairs[number] for number in sorted(pairs)])
    return VocabularyMap(read, drafted, targets - torch.arange(len(targets)), share)


def token_texts(file: Path) -> dict[int, str]:
    """Each token's text as ``tokenizer.json`` spells it, by id.

    Raises:
        CheckpointError: the file is absent, broken, or has no vocabulary.
    """
    if not file.exists():
        raise CheckpointError(f"{file} is missing: vocabularies cannot be compared")
    data = read_json(file)
    vocabulary: Any = (data.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        texts = {int(number): str(text) for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        texts = {number: str(piece[0]) for number, piece in enumerate(vocabulary)}
    else:
        raise CheckpointError(f"{file} has no model.vocab")
    added = data.get("added_tokens") or []
    return {**texts, **{int(token["id"]): str(token["content"]) for token in added}}
