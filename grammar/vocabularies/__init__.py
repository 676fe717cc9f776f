"""Tokens of other libraries' tokenizers, one file a library; the file name is the library's.

No file imports its library for more than what an object of it needs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tokens:
    """What a tokenizer tells of its tokens: the bytes of each id, `b""` for one that is no text;
    the ids that no text may hold; the ids that it ends an output with."""

    texts: dict[int, bytes]
    special: set[int] = field(default_factory=set)
    stop: set[int] = field(default_factory=set)


def names() -> list[str]:
    """Libraries whose tokenizers are read."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def read(tokenizer: Any, as_text: Collection[str]) -> Tokens:
    """The tokens of a tokenizer, whose class tells the library.

    Args:
        as_text: Contents of special tokens that count as text.

    Raises:
        CheckpointError: it has tokens whose bytes it does not tell.
        TypeError: it is of no such library.
    """
    known = names()
    for kind in type(tokenizer).__mro__:
        library = kind.__module__.partition(".")[0]
        if library in known:
            module = importlib.import_module(f"{__name__}.{library}")
            found: Tokens = module.read(tokenizer, as_text)
            return found
    raise TypeError(
        f"a {type(tokenizer).__module__}.{type(tokenizer).__name__} is no tokenizer of "
        f"{', '.join(known)}: pass its tokens' bytes, Vocabulary(tokens, size, stop_ids)"
    )
