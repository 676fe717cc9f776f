"""A matcher around another one, at the same position, whose masks it narrows."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.matching import walk


class Around(Matcher):
    """What a matcher has of the one inside it: all but what it narrows."""

    def __init__(self, inner: Matcher) -> None:
        self.vocabulary, self.inner = inner.vocabulary, inner

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.fill_tree(self, tokens, first_child, next_sibling, rows)

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        """The inner one's: where that has one way to go on, this has no other."""
        return self.inner.forced_bytes(path)

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_terminated

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete

    @property
    def is_free(self) -> bool:
        return self.inner.is_free

    @property
    def accepted_tokens(self) -> int:
        return self.inner.accepted_tokens
