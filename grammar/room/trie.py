"""The tokens of a vocabulary as a tree of bytes, level by level."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from overlap_spec.grammar.vocabulary import Vocabulary

Level = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]


class TokenTrie:
    """A tree of the texts of tokens; node 0 is its root, and stands for tokens without text.

    Attributes:
        nodes: How many there are.
        levels: For each depth, its first node, and the parent and the byte of each of its nodes.
        node_of: int64 `(size,)`: the node of each token's text.
        by_text: Texts of tokens.
        longest: Bytes of the longest token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.text
        self.by_text = frozenset(text for text in texts if text)
        self.longest = max(map(len, self.by_text), default=0)
        self.size, self.words = vocabulary.size, vocabulary.words
        self.node_of = np.zeros(len(texts), np.int64)
        self.levels: list[Level] = []
        self.nodes = 1
        tokens = np.array([i for i, text in enumerate(texts) if text], np.int64)
        depth = 0
        while len(tokens):
            parents = self.node_of[tokens]
            read = np.array([texts[token][depth] for token in tokens.tolist()], np.int64)
            pairs, inverse = np.unique(parents * 256 + read, return_inverse=True)
            self.levels.append((self.nodes, pairs >> 8, pairs & 255))
            self.node_of[tokens] = self.nodes + inverse
            self.nodes += len(pairs)
            depth += 1
            left = [token for token in tokens.tolist() if len(texts[token]) > depth]
            tokens = np.array(left, np.int64)


@lru_cache(maxsize=4)
def token_trie(vocabulary: Vocabulary) -> TokenTrie:
    """The tree of a vocabulary, cached."""
    return TokenTrie(vocabulary)
