"""The depth-first walk over a draft tree, and one along forced bytes, for any matcher.

The oracles of native walks, and the implementations of backends without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.rows import allowed, which_allowed

LONGEST_FORCED = 257


def check_row(row: Row, words: int) -> None:
    """Check one mask row's shape and dtype.

    Raises:
        ValueError: it is not int32 `(words,)`, C-contiguous.
    """
    if row.shape != (words,) or row.dtype != np.int32 or not row.flags.c_contiguous:
        raise ValueError(f"a mask row must be int32 ({words},), C-contiguous")


def check_tree(
    tokens: Links, first_child: Links, next_sibling: Links, rows: Row, words: int
) -> None:
    """Check the shapes and dtypes of a tree and its rows, and the order of links.

    Raises:
        ValueError: names what is wrong.
    """
    n = len(tokens)
    if n == 0:
        raise ValueError("a draft tree needs at least one node, the last committed token")
    if rows.shape != (n, words) or rows.dtype != np.int32 or not rows.flags.c_contiguous:
        raise ValueError(
            f"mask rows must be int32 ({n}, {words}), C-contiguous; got {rows.dtype} {rows.shape}"
        )
    for name, links in (("first_child", first_child), ("next_sibling", next_sibling)):
        if links.shape != (n,):
            raise ValueError(f"{name} has shape {links.shape}, tokens has ({n},)")
        for node, link in enumerate(links.tolist()):
            if link != -1 and not node < link < n:
                raise ValueError(
                    f"{name}[{node}] is {link}; a link is -1 or a later node below {n}"
                )


def fill_tree(
    matcher: Matcher, tokens: Links, first_child: Links, next_sibling: Links, rows: Row
) -> None:
    """Write one mask row per node; see `contract.Matcher.fill_tree`.

    Raises:
        ValueError: the tree violates the contract.
        RuntimeError: the matcher rejected a token that its own row allows.
    """
    check_tree(tokens, first_child, next_sibling, rows, matcher.vocabulary.words)
    rows.fill(0)
    if matcher.is_terminated:
        return
    start = matcher.accepted_tokens
    try:
        matcher.fill(rows[0])
        _descend(matcher, tokens.tolist(), first_child.tolist(), next_sibling.tolist(), rows)
    finally:
        matcher.rollback(matcher.accepted_tokens - start)


def _descend(
    matcher: Matcher, tokens: list[int], first_child: list[int], next_sibling: list[int], rows: Row
) -> None:
    path = [0]
    node = first_child[0]
    while True:
        if node == -1:
            done = path.pop()
            if not path:
                return
            matcher.rollback(1)
            node = next_sibling[done]
            continue
        token = tokens[node]
        if not allowed(rows[path[-1]], token):
            node = next_sibling[node]
            continue
        if not matcher.accept(token):
            raise RuntimeError(f"token {token} is allowed by its mask row but was rejected")
        if matcher.is_terminated:
            matcher.rollback(1)
            node = next_sibling[node]
            continue
        matcher.fill(rows[node])
        path.append(node)
        node = first_child[node]


def forced_bytes(matcher: Matcher, path: Sequence[int]) -> bytes:
    """As `contract.Matcher.forced_bytes`, by masks: some microseconds a byte, and at most
    :data:`LONGEST_FORCED`; none where the vocabulary lacks the token of some byte.

    Raises:
        RuntimeError: the matcher rejected a token of the path.
    """
    found, tokens = bytearray(), matcher.vocabulary.byte_tokens
    if (tokens < 0).any():
        return b""
    ahead = matcher.fork()
    for token in path:
        if not ahead.accept(token):
            raise RuntimeError(f"the matcher rejected the legal token {token}")
    row = np.zeros(matcher.vocabulary.words, np.int32)
    while len(found) < LONGEST_FORCED and not ahead.is_complete:
        ahead.fill(row)
        (legal,) = np.nonzero(which_allowed(row, tokens))
        if len(legal) != 1 or not ahead.accept(int(tokens[legal[0]])):
            break
        found.append(int(legal[0]))
    return bytes(found)
