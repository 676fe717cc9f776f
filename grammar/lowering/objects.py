"""Object shapes as rules: named members in order, then free members by their keys."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from overlap_spec.grammar.automata import dfa
from overlap_spec.grammar.automata.charset import ALL
from overlap_spec.grammar.automata.dfa import Dfa, TooLargeError
from overlap_spec.grammar.automata.escape import Escape, in_json, once_in_json
from overlap_spec.grammar.automata.regex import Pattern
from overlap_spec.grammar.automata.regex_ast import Node, Repetition
from overlap_spec.grammar.ir.rules import Holding, Rules, choice, literal, sequence
from overlap_spec.grammar.ir.tokens import Except
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.any_order import Orders
from overlap_spec.grammar.lowering.intersect import member, names_of
from overlap_spec.grammar.lowering.layout import Layout
from overlap_spec.grammar.lowering.members import Member, Members, Tail
from overlap_spec.grammar.lowering.resolver import Resolver
from overlap_spec.grammar.lowering.shapes import (
    ANY,
    NOTHING,
    Consts,
    Expr,
    Keys,
    Objects,
    Strings,
    all_of,
    negated,
)
from overlap_spec.grammar.lowering.strings import (
    any_key,
    automaton,
    found_in,
    repeated,
    string_language,
)
from overlap_spec.grammar.lowering.values import Once, Values, language_is_endless
from overlap_spec.grammar.schemas.source import json_path

_MOST_KINDS = 64
_PLAIN: tuple[Any, ...] = (None, "", True, [], {})
Predicate = str | Expr


class Writer(Protocol):
    """Writes the rules of members."""

    rules: Rules
    layout: Layout
    resolver: Resolver
    values: Values
    orders: Orders | None
    apart: bool
    looks: bool

    def value(self, expr: Expr, path: str, depth: int, once: Once = Once.NO) -> Node | None:
        """The expression of a value, written once where asked; None if no value is valid."""


@dataclass(frozen=True)
class FreeKeys:
    """Free keys: the predicates that they match, and their texts (None: all but named ones)."""

    matches: frozenset[Predicate]
    texts: Dfa | None


@dataclass
class ObjectWriter:
    """Writes one object shape."""

    writer: Writer
    shape: Objects
    path: str
    depth: int
    once: Once = Once.NO

    def rule(self) -> list[Node]:
        """Expressions whose union is the shape.

        Raises:
            GrammarError: a keyword that cannot be enforced exactly.
        """
        found = [self._whole(shape) for shape in self._cases()]
        return [rule for rule in found if rule is not None]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The keys of named members, in order."""
        return names_of(self.shape)

    def _cases(self) -> Iterator[Objects]:
        """Cases: each required member of `some` is either a certain named one or a free one."""
        shape, has_key = self.shape, self.writer.resolver.has_key
        choices = [
            [*(name for name in self.names if has_key(keys, name)), None] for keys, _ in shape.some
        ]
        if math.prod(map(len, choices)) > _MOST_KINDS:
            raise keywords.refusal("not", self.path, "combines into too many cases")
        for chosen in itertools.product(*choices):
            named, required, free = dict(shape.named), list(shape.required), []
            for name, some in zip(chosen, shape.some, strict=True):
                if name is None:
                    free.append(some)
                else:
                    named[name] = all_of(named.get(name, ANY), some[1])
                    required.append(name)
            wanted = tuple(dict.fromkeys(required))
            yield replace(shape, named=tuple(named.items()), required=wanted, some=tuple(free))

    def _whole(self, shape: Objects) -> Node | None:
        writer = self.writer
        members = []
        for name in self.names:
            expr = member(shape, name, writer.resolver)
            here = json_path(self.path, "properties", name)
            rule = writer.value(expr, here, self.depth + 1, self.once)
            if rule is not None:
                key = writer.layout.value(name, 0)
                rule = sequence(key, writer.layout.colon(), rule)
            elif name in shape.required:
                return None
            members.append(Member(rule, name in shape.required))
        tail = self._tail(shape.some)
        if shape.some and tail is None:
            return None
        if tail is not None and shape.least > len(shape.required) + 1:
            self._look()
        if writer.orders is not None and self.once is Once.NO:
            counts = shape.least, shape.most
            return writer.orders.object(members, tail, counts, self.depth, self.path)
        build = Members(writer.layout, "{}", self.depth, shape.least, shape.most)
        return build.object(members, tail)

    def _look(self) -> None:
        """Leave it to the matcher to refuse a free key that repeats, and would count once.

        Raises:
            Refusal: it could come to a text from which only equal keys follow.
        """
        if not self.writer.apart:
            reason = "is supported in whole schemas only, with free keys"
            raise keywords.refusal("minProperties", self.path, reason)
        texts = [kind.texts for kind in self._kinds if kind.texts is not None]
        if not all(map(language_is_endless, texts)):
            raise keywords.refusal("minProperties", self.path, "may leave no free key to add")
        self.writer.looks = True

    @property
    def is_free(self) -> bool:
        """Whether there may be free keys."""
        return any(self._held(kind) != NOTHING for kind in self._kinds)

    def free_values(self) -> list[Expr]:
        """The values that members with free keys may have."""
        return list(dict.fromkeys(self._held(kind) for kind in self._kinds))

    def _tail(self, some: tuple[tuple[Keys, Expr], ...]) -> Tail | None:
        if len(some) > 1 and self.shape.most != 1:
            some = _without_implied(some)
            if len(some) > 1:
                keyword = "patternProperties" if some[0][0].patterns else "not"
                raise keywords.refusal(keyword, self.path, "requires two free members at once")
        every = self._members([(kind, self._held(kind)) for kind in self._kinds])
        if every is None or not some:
            return None if every is None else Tail(every)
        # Where there is room for one member only, it is all of those that are required.
        wanted = [k for k in self._kinds if all(_covers(keys, k) for keys, _ in some)]
        must = [(k, all_of(self._held(k), *(expr for _, expr in some))) for k in wanted]
        others = [(k, self._held(k)) for k in self._kinds if k not in wanted]
        # A repeated key must not override the required one.
        found = self._members(must)
        return None if found is None else Tail(every, found, self._members([*others, *must]))

    def _held(self, kind: FreeKeys) -> Expr:
        return all_of(*(expr for keys, expr in self.shape.rules if _covers(keys, kind)))

    def _members(self, kinds: list[tuple[FreeKeys, Expr]]) -> Node | None:
        """Free members of several kinds; kinds with equal values share a rule."""
        groups: dict[Expr, list[FreeKeys]] = {}
        for kind, expr in kinds:
            groups.setdefault(expr, []).append(kind)
        ways = []
        for expr, members in groups.items():
            here = json_path(self.path, "additionalProperties")
            value = self.writer.value(expr, here, self.depth + 1, self.once)
            if value is not None:
                ways.append(sequence(self._key(members), self.writer.layout.colon(), value))
        if len(groups) == len(ways) > 1 and len(kinds) == len(self._kinds):
            ways += self._visible(groups)
        return choice(ways) if ways else None

    def _visible(self, exprs: Iterable[Expr]) -> list[Node]:
        """Some of the members again, where all keys are free and only their values differ.

        A backend with a lexer has a lexeme for each kind of keys, and none of them may go on with
        any text. The keys with a character that no name has are a loop of all characters before
        it; their value is one that all kinds allow. It reads this loop off them.
        """
        has = self.writer.resolver.has
        texts = (json.dumps(v) for v in _PLAIN if all(has(expr, v) for expr in exprs))
        value = next(texts, None)
        if value is None:
            return []
        used = set("".join(self.names))
        rare = next(point for point in range(0x10FFFF, 0, -1) if chr(point) not in used)
        char, last = in_json(ALL), in_json(((rare, rare),))
        assert char is not None
        assert last is not None
        key = self.writer.rules.quoted(sequence(Repetition(char, 0, None), last))
        return [sequence(key, self.writer.layout.colon(), literal(value))]

    def _key(self, kinds: list[FreeKeys]) -> Node:
        texts = [kind.texts for kind in kinds if kind.texts is not None]
        if len(texts) < len(kinds):
            if counts_keys(self.shape) and not self.names:
                return self.writer.rules.quoted(repeated(ALL, once_in_json, 0, None))
            return self.writer.rules.quoted(any_key(self.names))
        escape = once_in_json if counts_keys(self.shape) else in_json
        lone = self._lone(kinds, escape)
        if lone is not None:
            return self.writer.rules.quoted(lone)
        keys = dfa.any_of(texts)
        return self.writer.rules.quoted(Except.of(keys, any_form=False) or keys, escape)

    def _lone(self, kinds: list[FreeKeys], escape: Escape) -> Node | Except | None:
        """An expression for the keys, if one pattern or one kind of strings is all that they are:
        it has better rules than an automaton."""
        if len(kinds) != 1 or len(self._predicates) != 1 or len(kinds[0].matches) != 1:
            return None
        (predicate,) = kinds[0].matches
        if isinstance(predicate, str):
            pattern = Pattern(predicate, "schema")
            if pattern.looks_around or any(map(pattern.matches, self.names)):
                return None
            return pattern.found(escape)
        resolver = self.writer.resolver
        if any(resolver.has(predicate, name) for name in self.names):
            return None
        found = [shape for shape in resolver.shapes(predicate) if shape.kind == "string"]
        if len(found) != 1 or not isinstance(found[0], Strings):
            return None
        language = string_language(found[0], self.path, escape)
        return None if isinstance(language, Dfa | Holding) else language

    @cached_property
    def _predicates(self) -> tuple[Predicate, ...]:
        rules = [keys for keys, _ in (*self.shape.rules, *self.shape.some)]
        found = (predicate for keys in rules for predicate in (*keys.patterns, *keys.exprs))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _kinds(self) -> list[FreeKeys]:
        """Free keys, split by the predicates that they match."""
        kinds = [FreeKeys(frozenset(), None)]
        if not self._predicates:
            return kinds
        try:
            named = dfa.neither(dfa.from_texts(self.names)) if self.names else dfa.EVERY
            kinds = [FreeKeys(frozenset(), named)]
            for predicate in self._predicates:
                inside, outside = _split(predicate, self.writer.resolver)
                parts = [
                    FreeKeys(kind.matches | extra, dfa.both(kind.texts or dfa.EVERY, texts))
                    for kind in kinds
                    for extra, texts in (({predicate}, inside), (frozenset(), outside))
                ]
                kinds = [kind for kind in parts if kind.texts and not kind.texts.is_empty]
                if len(kinds) > _MOST_KINDS:
                    raise TooLargeError
        except TooLargeError as error:
            keyword = "patternProperties" if isinstance(predicate, str) else "propertyNames"
            raise keywords.refusal(keyword, self.path, "needs too large an automaton") from error
        return kinds


def _split(predicate: Predicate, resolver: Resolver) -> tuple[Dfa, Dfa]:
    """Texts that match, and texts that do not."""
    if isinstance(predicate, str):
        return found_in(predicate), dfa.neither(found_in(predicate))
    return _texts(predicate, resolver), _texts(negated(predicate), resolver)


def _texts(expr: Expr, resolver: Resolver) -> Dfa:
    found = []
    for shape in resolver.shapes(expr):
        if isinstance(shape, Strings):
            found.append(automaton(shape))
        elif isinstance(shape, Consts) and shape.kind == "string":
            found.append(dfa.from_texts(json.loads(text) for _, text in shape.values))
    return dfa.any_of(found) if found else dfa.NONE


def counts_keys(shape: Objects) -> bool:
    """Whether a free key that repeats would make the count of members wrong."""
    return shape.least > len(shape.required) + 1


def _covers(keys: Keys, kind: FreeKeys) -> bool:
    """Whether a set of keys contains the free keys of a kind."""
    return (not kind.matches.isdisjoint((*keys.patterns, *keys.exprs))) != keys.inverted


def _without_implied(some: tuple[tuple[Keys, Expr], ...]) -> tuple[tuple[Keys, Expr], ...]:
    """Required members without those that another one is for certain."""
    kept = list(some)
    for one in some:
        if any(_implies(other, one) for other in kept if other is not one):
            kept.remove(one)
    return tuple(kept)


def _implies(one: tuple[Keys, Expr], other: tuple[Keys, Expr]) -> bool:
    (keys, expr), (others, wanted) = one, other
    inside = keys == others or (
        keys.inverted
        and others.inverted
        and keys.names >= others.names
        and set(keys.patterns) >= set(others.patterns)
        and set(keys.exprs) >= set(others.exprs)
    )
    return inside and (wanted in (ANY, expr))
