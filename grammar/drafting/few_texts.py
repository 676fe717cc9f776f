"""The whole outputs of a grammar that has few of them, and their trie, for drafts."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from overlap_spec.caches import newest
from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.regex import MOST_CHECKED, parse
from overlap_spec.grammar.automata.regex_ast import Alternation, CharClass, Concat, Node, Repetition
from overlap_spec.grammar.drafting.text_tokens import TextTokens
from overlap_spec.grammar.drafting.token_trie import TokenTrie, make_tries
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.steps import TRIE_NODES

# Texts that a pattern may have.
MOST_TEXTS = 512
# Characters of a grammar that is looked at, and of all texts of a pattern.
LONGEST = 2**16
# Grammars whose tries are kept.
CACHED = 64
# What says nothing of a value.
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id"})


class OutputTries:
    """The tries of grammars that have few outputs. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self.cut, self._lock = TextTokens(vocabulary, encode), threading.Lock()
        self._known: OrderedDict[tuple[str, str], TokenTrie | None] = OrderedDict()

    def of(self, grammar: Grammar) -> TokenTrie | None:
        """The trie of the whole outputs of a grammar that has few; None of any other.

        For drafts alone: texts that the tokenizer cannot cut are left out.
        """
        key = grammar.kind, grammar.source
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        # Not under the lock, which others must not wait for so long.
        cuts = [cut for text in few_texts(grammar) if (cut := self.cut(text))]
        found = make_tries(cuts, TRIE_NODES) if cuts else []
        # A node is the prompt's end.
        fit = len(found) == 1 and len(found[0].tokens) < TRIE_NODES
        with self._lock:
            return newest(self._known, key, lambda: found[0] if fit else None, CACHED)


def few_texts(grammar: Grammar) -> list[str]:
    """All texts of a grammar, if it is known to have few; else none.

    A choice, a schema of an enum, a constant or a boolean, and a pattern of few texts. For drafts
    alone: masks and the target decide.
    """
    if len(grammar.source) > LONGEST:
        return []
    if grammar.kind == "choice":
        return list(json.loads(grammar.source))
    if grammar.kind == "json_schema":
        return _values(json.loads(grammar.source))
    if grammar.kind == "regex" and len(grammar.source) <= MOST_CHECKED:
        try:
            return sorted(set(_few(_of(parse(grammar.source)))))
        except (_TooManyError, GrammarError, RecursionError):
            return []
    return []


class _TooManyError(Exception):
    """More texts than are drafted from."""


def _values(schema: object) -> list[str]:
    if not isinstance(schema, dict):
        return []
    kinds = schema.keys() - NOTES
    if "const" in kinds and kinds <= {"const", "type"}:
        values = [schema["const"]]
    elif "enum" in kinds and kinds <= {"enum", "type"}:
        values = schema["enum"]
    elif kinds == {"type"} and schema["type"] == "boolean":
        values = [True, False]
    else:
        return []
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
    return list(dict.fromkeys(texts))


def _of(node: Node) -> Iterator[str]:
    """The texts that an expression matches in full, some of them twice."""
    if isinstance(node, CharClass):
        for low, high in node.members:
            yield from map(chr, range(low, high + 1))
    elif isinstance(node, Alternation):
        for way in node.ways:
            yield from _of(way)
    elif isinstance(node, Concat):
        yield from _joined([list(_few(_of(part))) for part in node.parts])
    else:
        if not isinstance(node, Repetition) or node.most is None:
            raise _TooManyError
        body = list(_few(_of(node.body)))
        if not any(body):
            yield from body
            return
        if node.most > LONGEST // max(map(len, body)):
            raise _TooManyError
        for count in range(node.least, node.most + 1):
            yield from _joined([body] * count) if len(body) > 1 else [body[0] * count]


def _joined(parts: list[list[str]]) -> list[str]:
    """A text of each part, one after the other, in all ways."""
    count, characters = 1, 0
    for texts in parts:
        count *= len(texts)
        characters += max(map(len, texts), default=0)
        if count * characters > LONGEST or count > MOST_TEXTS:
            raise _TooManyError
    return list(map("".join, product(*parts)))


def _few(texts: Iterator[str]) -> Iterator[str]:
    """The texts, if they are few enough."""
    characters = 0
    for number, text in enumerate(texts):
        characters += len(text)
        if number >= MOST_TEXTS or characters > LONGEST:
            raise _TooManyError
        yield text
