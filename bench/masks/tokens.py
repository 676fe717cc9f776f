"""A vocabulary and greedy encoding for any tokenizer file that maskbench is given."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.common import fail
from bench.padded_tokenizer import pad_tokenizer
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
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--vocab", type=int, metavar="N", help="rows of the output layer")


def read(path: Path | None, size: int | None, seed: int) -> Tokens:
    """The tokenizer of a file, or the embedded model's padded to a size.

    Args:
        path: A `tokenizer.json`, or None.
        size: Rows of the model's output layer; None means 131,072 for the embedded model's, and
            the size of the file's vocabulary otherwise.
        seed: For the tokens that padding invents.
    """
    if path is None:
        return _embedded(size or 131_072, seed)
    spec = json.loads(path.read_text(encoding="utf-8"))
    if "model" not in spec:
        fail(f"{path.name} is no tokenizer.json")
    added = spec.get("added_tokens") or []
    ids = [*spec["model"]["vocab"].values(), *(token["id"] for token in added)]
    # An ordinary token may be written like one: Gemma has `</s>` among those of HTML.
    ends = [t["id"] for t in added if t["content"] in _ENDS and t.get("special", True)]
    if not ends:
        fail(f"{path.name} has no end token among {', '.join(sorted(_ENDS))}")
    return _load(path.name, path, size or max(ids) + 1, tuple(ends))


def _embedded(size: int, seed: int) -> Tokens:
    source = EMBEDDED / "target"
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        pad_tokenizer(source, Path(folder), config["vocab_size"], size, seed)
        path = Path(folder) / "tokenizer.json"
        stop = config["eos_token_id"]
        stops = tuple(stop) if isinstance(stop, list) else (stop,)
        return _load(f"embedded, padded to {size}", path, size, stops)


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
