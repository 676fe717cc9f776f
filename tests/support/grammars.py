"""Random grammars, a vocabulary of bytes, one with a few longer tokens, and what masks allow."""

import json
import random
from functools import cache

import numpy as np

from overlap_spec.grammar import Backend, CompiledGrammar, Grammar, Matcher, Vocabulary
from overlap_spec.grammar.backends import load

STOP, SPECIAL, LONG = 256, 257, 258
# Every byte, a stop and a special token, and some longer ones; "{" once more as a second token.
TEXTS = [*(bytes([b]) for b in range(256)), b"", b"<s>", b'{"', b'":', b'":"', b"name", b"na", b"{"]
VOCABULARY = Vocabulary(tuple(TEXTS), len(TEXTS), (STOP,), frozenset({SPECIAL}))
# Bytes alone, with the same stop token.
BYTES = Vocabulary((*(bytes([b]) for b in range(256)), b""), 257, (STOP,))


@cache
def by_bytes(name: str = "xgrammar") -> Backend:
    """A backend whose tokens are bytes."""
    return load(name)(BYTES)


def takes(grammar: Grammar | CompiledGrammar, text: str | bytes) -> bool:
    """Whether a grammar, or what was compiled of it for bytes, has a text."""
    compiled = by_bytes().compile(grammar) if isinstance(grammar, Grammar) else grammar
    matcher, raw = compiled.matcher(), text.encode() if isinstance(text, str) else text
    return all(map(matcher.accept, raw)) and matcher.is_complete


def bits(row: np.ndarray) -> list[int]:
    """The tokens of a mask row."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def row_of(matcher: Matcher) -> np.ndarray:
    """A matcher's mask row, in a buffer that held something."""
    row = np.full(matcher.vocabulary.words, 0x5A5A5A5A, np.int32)
    matcher.fill(row)
    return row


def legal(matcher: Matcher) -> list[int]:
    """The tokens that a matcher allows."""
    return bits(row_of(matcher))


def encode(text: str) -> list[int]:
    """Longest match, from the left."""
    data, found = text.encode(), []
    while data:
        token = max(range(len(TEXTS)), key=lambda t: len(TEXTS[t]) * data.startswith(TEXTS[t]))
        found.append(token)
        data = data[len(TEXTS[token]) :]
    return found


def ids(*texts: str) -> list[int]:
    return [TEXTS.index(text.encode()) for text in texts]


def random_ebnf(rng: random.Random) -> str:
    """An EBNF text of a few letters, whose rules may refer to each other and to the start."""
    names = ["root", *(f"r{i}" for i in range(rng.randint(0, 3)))]
    return "\n".join(f"{name} ::= {_body(rng, names, 2)}" for name in names)


def _body(rng: random.Random, names: list[str], depth: int) -> str:
    kind = rng.randint(0, 7 if depth else 2)
    if kind <= 1:
        return json.dumps("".join(rng.choice("abc") for _ in range(rng.randint(1, 3))))
    if kind == 2:
        return rng.choice([*names, "[ab]", "[^c]"])
    parts = [_body(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind <= 4:
        return f"({' '.join(parts)})"
    if kind <= 6:
        return f"({' | '.join(parts)})"
    return f"({parts[0]}){rng.choice(['?', '*', '{2}'])}"
