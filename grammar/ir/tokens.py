"""Regular pieces of text that lowering knows as one, for backends to write as suits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from overlap_spec.grammar.automata.charset import ALL, Ranges, intersect, negate, union
from overlap_spec.grammar.automata.dfa import Dfa
from overlap_spec.grammar.automata.dfa_to_regex import to_node
from overlap_spec.grammar.automata.escape import Escape, in_json, plain
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Repetition, alternate, concat

_MOST_TEXTS = 2_000


@dataclass(frozen=True)
class Except:
    """Any text of a set of characters but some, inside a JSON string.

    Each character has one written form, so that a text that is left out cannot return in escaped
    form.

    Args:
        texts: What is left out, unescaped.
        heads: Those of them that a text may begin with; None means all. If it is some, the last of
            the members is in no text that is left out: hints rely on it.
    """

    members: Ranges
    texts: tuple[str, ...]
    heads: Ranges | None = None

    @classmethod
    def of(cls, dfa: Dfa, any_form: bool = True) -> Except | None:
        """The texts of an automaton as all of a set of characters, which may begin with some of
        it, but some; None if they are not.

        Args:
            any_form: Whether each character may have any of its written forms: then None, too, if
                the set is that of all characters, which have several.
        """
        free = [
            s for s, moves in enumerate(dfa.moves) if dfa.final[s] and list(dfa.targets(s)) == [s]
        ]
        if len(free) != 1 or free == [0]:
            return None
        members = dfa.targets(free[0])[free[0]]
        if any_form and members == ALL:
            return None
        heads = union(((low, high),) for low, high, _ in dfa.moves[0])
        texts: list[str] = []
        pending = [(0, "")]
        for state, text in pending:
            spans = [(low, high) for low, high, _ in dfa.moves[state]]
            ways = [move for move in dfa.moves[state] if move[2] != free[0]]
            count = len(pending) + sum(high - low + 1 for low, high, _ in ways)
            # In a circle, texts grow beyond the number of states.
            if (
                union([tuple(spans)]) != (members if text else heads)
                or count > _MOST_TEXTS
                or len(text) > len(dfa.moves)
            ):
                return None
            if not dfa.final[state]:
                texts.append(text)
            for low, high, to in ways:
                pending += [(to, text + chr(point)) for point in range(low, high + 1)]
        if heads == members:
            return cls(members, tuple(texts))
        if union((heads, members)) != members:
            return None
        last = chr(members[-1][1])
        return None if last in "".join(texts) else cls(members, tuple(texts), heads)

    @property
    def least(self) -> int:
        """Fewest characters: 0 or 1."""
        return int("" in self.texts)

    @property
    def loop(self) -> Repetition:
        """An expression for all texts of at least so many characters, none left out."""
        if self.heads is None:
            return Repetition(_any_one(self.members), self.least, None)
        rest = Repetition(_any_one(self.members), 0, None)
        return Repetition(concat(_any_one(self.heads), rest), self.least, 1)

    @cached_property
    def written(self) -> tuple[Node, ...]:
        """What is left out, except the empty text, as it is written."""
        chars = ([in_json(((ord(char), ord(char)),)) for char in text] for text in self.texts)
        # A lone surrogate is not a character, and cannot be in a text.
        return tuple(
            concat(*(char for char in found if char)) for found in chars if found and all(found)
        )

    @cached_property
    def node(self) -> Node:
        """An node: a tree of all that differs from what is left out."""
        trie: dict[str, Any] = {}
        for name in self.texts:
            node = trie
            for char in name:
                node = node.setdefault(char, {})
            node[""] = {}
        return _outside(trie, self.members, self.members if self.heads is None else self.heads)


def _outside(node: dict[str, Any], members: Ranges, heads: Ranges) -> Node:
    ways: list[Node] = []
    children = {char: child for char, child in node.items() if char}
    points = negate(union(((ord(char), ord(char)),) for char in children))
    other = in_json(intersect(heads, points))
    if other:
        ways.append(concat(other, Repetition(_any_one(members), 0, None)))
    for char, child in children.items():
        written = in_json(intersect(heads, ((ord(char), ord(char)),)))
        if written:
            ways.append(concat(written, _outside(child, members, members)))
    if "" not in node:
        ways.append(EMPTY)
    return alternate(*ways)


@lru_cache(8)
def _any_one(members: Ranges) -> Node:
    # One written form per character, even if the set is that of all.
    sets: Iterable[Ranges] = (members[:1], members[1:]) if members == ALL else (members,)
    parts = [in_json(part) for part in sets]
    return alternate(*(part for part in parts if part))


@dataclass(frozen=True)
class Token:
    """A regular piece of text.

    Args:
        language: An expression; or a non-empty automaton over characters, which `escape` writes;
            or all texts but some.
    """

    language: Node | Dfa | Except
    escape: Escape = plain

    @cached_property
    def node(self) -> Node | None:
        """An expression for the token; None for an automaton that is too large for one."""
        if isinstance(self.language, Dfa):
            return to_node(self.language, self.escape)
        return self.language.node if isinstance(self.language, Except) else self.language
