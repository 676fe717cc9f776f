"""A vocabulary and greedy encoding for any tokenizer file that maskbench is given."""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import fail
from bench.padding.tokenizer import pad_tokenizer
from overlap_spec.config import EMBEDDED
from overlap_spec.grammar.vocabulary import Vocabulary

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Tokens:
    """A vocabulary, its encoder, and its name in the report."""

    name: str
    vocabulary: Vocabulary
    encode: Encode


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--tokenizer`` and ``--vocab``."""
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json or a Tekken file")
    parser.add_argument("--vocab", type=int, metavar="N", help="rows of the output layer")


def read(path: Path | None, size: int | None, seed: int) -> Tokens:
    """The tokenizer of a file, or the embedded model's padded to a size.

    Args:
        path: A `tokenizer.json`, a Tekken file, or None.
        size: Rows of the model's output layer; None means 131,072 for the embedded model's, and
            the size of the file's vocabulary otherwise.
        seed: For the tokens that padding invents.
    """
    if path is None:
        return _embedded(size or 131_072, seed)
    spec = json.loads(path.read_text(encoding="utf-8"))
    if "model" in spec:
        return _hugging_face(path, spec, size)
    if not isinstance(spec.get("vocab"), list) or "config" not in spec:
        fail(f"{path.name} is neither a tokenizer.json nor a Tekken file")
    return _tekken(path, spec, size)


def _embedded(size: int, seed: int) -> Tokens:
    source = EMBEDDED / "target"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        pad_tokenizer(source, Path(folder), config["vocab_size"], size, seed)
        path = Path(folder) / "tokenizer.json"
        stop = config["eos_token_id"]
        stops = tuple(stop) if isinstance(stop, list) else (stop,)
        return _load(f"embedded, padded to {size}", path, size, stops)


def _hugging_face(path: Path, spec: dict[str, Any], size: int | None) -> Tokens:
    added = spec.get("added_tokens") or []
    ids = [*spec["model"]["vocab"].values(), *(token["id"] for token in added)]
    # An ordinary token may be written like one: Gemma has `</s>` among those of HTML.
    ends = [t["id"] for t in added if t["content"] in _ENDS and t.get("special", True)]
    if not ends:
        fail(f"{path.name} has no end token among {', '.join(sorted(_ENDS))}")
    return _load(path.name, path, size or max(ids) + 1, tuple(ends))


_ENDS = frozenset({"</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<eos>"})


def _load(name: str, path: Path, size: int, stops: tuple[int, ...]) -> Tokens:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(path))
    if size < library.get_vocab_size():
        fail(f"--vocab {size} is less than the {library.get_vocab_size()} tokens of {name}")
    vocabulary = Vocabulary.from_tokenizer_json(path, size, stops)
    return Tokens(
        name, vocabulary, lambda text: list(library.encode(text, add_special_tokens=False).ids)
    )


def _tekken(path: Path, spec: dict[str, Any], size: int | None) -> Tokens:
    config = spec["config"]
    special = int(config["default_num_special_tokens"])
    rows = int(size or config["default_vocab_size"])
    ranked = sorted(spec["vocab"], key=lambda entry: entry["rank"])[: rows - special]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in ranked]
    # The format numbers `<unk>`, `<s>`, `</s>` first, in this order.
    vocabulary = Vocabulary((*[b""] * special, *tokens), rows, (2,), frozenset(range(special)))
    numbers = {token: special + i for i, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        # Longest match: not the model's own split, but the same bytes in tokens of real lengths.
        raw, at, ids = text.encode(), 0, []
        while at < len(raw):
            end = min(len(raw), at + longest)
            while raw[at:end] not in numbers:
                end -= 1
            ids.append(numbers[raw[at:end]])
            at = end
        return ids

    return Tokens(path.name, vocabulary, encode)
