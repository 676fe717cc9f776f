"""Regular expressions for JSON strings and for the keys of open objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from overlap_spec.grammar.automata import dfa
from overlap_spec.grammar.automata.charset import ALL, Ranges
from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError
from overlap_spec.grammar.automata.escape import ANY_TEXT, Escape, in_json, plain
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.automata.regex_ast import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Repetition,
    alternate,
    concat,
    mapped,
    parts_of,
)
from overlap_spec.grammar.ir.rules import Holding
from overlap_spec.grammar.ir.tokens import Except
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.shapes import Strings
from overlap_spec.grammar.schemas import formats

# Turns of a repetition, and alternatives of a pattern, up to which each is spelt out.
_FEW_TURNS, _MOST_WAYS = 3, 32


def string_language(
    shape: Strings, path: str, escape: Escape = in_json
) -> Node | Dfa | Except | Holding | None:
    """The strings of a shape: an expression for the text between the quotes, all texts but some,
    those that hold some character, or an automaton over the characters if there is none of these;
    None if no string is valid.

    Raises:
        GrammarError: a pattern that is not supported, or that needs too large an automaton.
    """
    least, most = shape.least, shape.most
    if not shape.patterns and not shape.without:
        if least > 0 or most is not None:
            if not shape.outside:
                return repeated(ALL, escape, least, most)
        elif shape.outside:
            return Except(ALL, tuple(shape.outside))
        else:
            return repeated(ALL, escape, 0, None)
    elif len(shape.patterns) == 1 and not shape.without and not shape.outside:
        found = _pattern(Pattern(shape.patterns[0], "schema"), least, most, escape)
        if found is not None:
            return found
    try:
        holding = _holding(shape, escape)
        if holding is not None:
            return holding
        made = automaton(shape)
    except TooLargeError as error:
        shorter = _shortened(shape, escape)
        if shorter is not None:
            return shorter
        raise keywords.refusal(
            "pattern", path, "needs too large an automaton with the bounds beside it"
        ) from error
    return None if made.is_empty else made


def repeated(members: Ranges, escape: Escape, least: int, most: int | None) -> Node:
    """`least` to `most` characters of a set."""
    char = escape(members)
    assert char is not None
    return Repetition(char, least, most)


def automaton(shape: Strings) -> Dfa:
    """The strings of a shape as an automaton over their characters.

    Raises:
        GrammarError: a pattern that is not supported.
        TooLargeError: too many states.
    """
    found = dfa.EVERY
    for pattern in shape.patterns:
        found = dfa.both(found, found_in(pattern))
    for pattern in shape.without:
        found = dfa.both(found, dfa.neither(found_in(pattern)))
    if shape.outside:
        found = dfa.both(found, dfa.neither(dfa.from_texts(shape.outside)))
    if shape.least or shape.most is not None:
        found = dfa.both(found, dfa.lengths(shape.least, shape.most))
    return found


@lru_cache(512)
def found_in(pattern: str) -> Dfa:
    """Texts that contain a match of a pattern."""
    return Pattern(pattern, "schema").automaton()


def _holding(shape: Strings, escape: Escape) -> Holding | None:
    if len(shape.patterns) != 1 or shape.without or shape.outside or shape.most is None:
        return None
    found = Holding.of(found_in(shape.patterns[0]), shape.least, shape.most)
    return None if found is None or escape(found.members) is None else found


def _shortened(shape: Strings, escape: Escape) -> Node | Dfa | None:
    """Some texts of a format, where all are too many for an automaton that counts as well."""
    parts = tuple(formats.part(pattern) or pattern for pattern in shape.patterns)
    if len(parts) == 1 and not shape.without and not shape.outside and shape.most is not None:
        found = formats.within(parts[0], shape.most)
        if found and found.width()[0] >= shape.least:
            return found.found(escape)
    try:
        return None if parts == shape.patterns else automaton(replace(shape, patterns=parts))
    except TooLargeError:
        return None


def any_key(taken: Iterable[str]) -> Node | Except:
    """Any key except the taken ones, as the text between the quotes."""
    texts = tuple(taken)
    return Except(ALL, texts) if texts else ANY_TEXT


def _pattern(pattern: Pattern, least: int, most: int | None, escape: Escape) -> Node | None:
    """An expression for a pattern with length bounds; None if that needs an automaton."""
    if pattern.looks_around:
        return None
    low, high = pattern.width()
    if least <= low and (most is None or (high is not None and high <= most)):
        return pattern.found(escape)
    ways = _of_length(pattern.found(plain), least, most)
    return alternate(*(_written(way, escape) for way in ways)) if ways else None


def _of_length(node: Node, least: int, most: int | None) -> list[Node]:
    """The texts of an expression over characters that have so many, as alternatives; none where no
    bounds of its repetitions tell how many."""
    found: list[Node] = []
    for parts in _spelt(node):
        widths = [_width(part) for part in parts]
        fixed, loops = sum(width or 0 for width in widths), widths.count(None)
        low, high = least - fixed, None if most is None else most - fixed
        if loops > 1:
            return []
        if loops:
            at = widths.index(None)
            loop = parts[at]
            assert isinstance(loop, Repetition)
            tops = [bound for bound in (loop.most, high) if bound is not None]
            low, high = max(loop.least, low), min(tops, default=None)
            if high is None or low <= high:
                counted = Repetition(loop.body, low, high)
                found.append(concat(*parts[:at], counted, *parts[at + 1 :]))
        elif low <= 0 and (high is None or high >= 0):
            found.append(concat(*parts))
    return found


def _spelt(node: Node) -> list[tuple[Node, ...]]:
    """An expression as alternatives of parts that have one width, or repeat one character; none if
    that are too many, or cannot be said so."""
    if _width(node) is not None:
        return [(node,)]
    if isinstance(node, Alternation):
        ways = [_spelt(way) for way in node.ways]
        return [parts for way in ways for parts in way] if all(ways) else []
    if isinstance(node, Concat):
        found: list[tuple[Node, ...]] = [()]
        for part in node.parts:
            found = [(*head, *tail) for head in found for tail in _spelt(part)]
            if not 0 < len(found) <= _MOST_WAYS:
                return []
        return found
    assert isinstance(node, Repetition)
    least, most, width = node.least, node.most, _width(node.body)
    if most is not None and most - least <= _FEW_TURNS:
        turns = range(least, most + 1)
        if width is not None:
            return [(Repetition(node.body, count, count),) for count in turns]
        if most <= _MOST_WAYS:
            ways = [_spelt(concat(*[node.body] * count)) for count in turns]
            return [parts for way in ways for parts in way] if all(ways) else []
    return [(node,)] if width == 1 else []


def _width(node: Node) -> int | None:
    """How many characters all texts of an expression have; None if not all have as many."""
    if isinstance(node, CharClass):
        return 1
    widths = [_width(part) for part in parts_of(node)]
    if None in widths:
        return None
    known = [width for width in widths if width is not None]
    if isinstance(node, Concat):
        return sum(known)
    if isinstance(node, Repetition):
        return node.least * known[0] if node.least == node.most else None
    return known[0] if len(set(known)) == 1 else None


def _written(node: Node, escape: Escape) -> Node:
    """An expression over characters as it is written."""
    if isinstance(node, CharClass):
        return escape(node.members) or CharClass(())
    return mapped(node, lambda part: _written(part, escape))
