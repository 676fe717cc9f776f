"""The llguidance backend: an Earley parser over lexemes, which are matched by derivatives.

Grammars are translated to Lark, split into lexemes so that the library's greedy lexer reads them
exactly. A regular grammar is a single lexeme. The library compiles within its parser limits and has
no serialised form: the Lark text is stored and sent instead.

Its calls release the GIL. A matcher stays in an error state, so it is never fed a token that its
mask forbids, and errors are checked after each call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from overlap_spec.errors import GrammarError, GrammarFailed
from overlap_spec.grammar import walk
from overlap_spec.grammar.contract import Backend, CompiledGrammar, Links, Matcher, Row
from overlap_spec.grammar.lowering import to_ebnf
from overlap_spec.grammar.parsing.exclusions import excluded
from overlap_spec.grammar.parsing.expressions import (
    Chain,
    Expression,
    Ref,
    Repeat,
    parts_of,
    references,
)
from overlap_spec.grammar.parsing.lexemes import Lexemes, cut
from overlap_spec.grammar.parsing.regular import EpsilonFree, literal, to_regex
from overlap_spec.grammar.parsing.slice_hints import later, letters_first
from overlap_spec.grammar.parsing.syntax import read
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.vocabulary import Vocabulary

_DEEPEST = 5
_LOWER, _LETTERS = "[a-z]", "[A-Za-z]"
# A pattern's dot does not match the two line ends of Unicode.
_INSIDE = r'[^"\\\x00-\x1f\x7f\u2028\u2029]'
# The library allows all tokens of a slice at once if it can show that the lexeme continues with any
# of them, and walks the others. A token belongs to the first slice that it matches: narrow classes
# serve names and patterns, and short texts serve the last characters of a count.
_SLICES = [
    *(f"{chars}{{1,{most}}}" for most in (6, 10) for chars in (_LOWER, _LETTERS, _INSIDE)),
    f"{_LETTERS}{{1,16}}",
    f"{_INSIDE}{{1,16}}",
    f"{_INSIDE}+",
]
# Marks of the library's own limits in its errors.
OVER_LIMIT = ("too many", "too complex", "too large", "limit")
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class LLGuidanceBackend(Backend):
    """Compiles Lark with llguidance for the exact bytes of a vocabulary."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        wrapper = TokenizerWrapper(_Tokenizer(vocabulary))
        self._tokenizer = LLTokenizer(
            wrapper,
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.stop_ids),
            slices=_SLICES,
        )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compile_lowered(grammar, to_ebnf(grammar))

    def compile_lowered(self, grammar: Grammar, ebnf: str) -> CompiledGrammar:
        return self.deserialize(grammar, to_lark(ebnf).text.encode())

    def deserialize(self, grammar: Grammar, data: bytes) -> CompiledGrammar:
        lark = data.decode()
        library = LLMatcher(self._tokenizer, lark, log_level=0, limits=LLParserLimits())
        if library.is_error():
            raise GrammarError(
                f"llguidance cannot compile this {grammar.kind} grammar: {_reason(library)}",
                grammar.kind,
            )
        return _Compiled(library, self.vocabulary, data)


class _Tokenizer:
    """The library's view of a vocabulary. It encodes only to force tokens, which is off."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = list(vocabulary.text)
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("tokens are never forced")


class _Compiled(CompiledGrammar):
    backend = "llguidance"

    def __init__(self, library: LLMatcher, vocabulary: Vocabulary, lark: bytes) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._lark = lark

    @property
    def memory_bytes(self) -> int:
        # An estimate: the library does not say. Its lexer adds states in use, of 1-2 kB each.
        return 64 * 2**10 + 20 * len(self._lark)

    def matcher(self) -> Matcher:
        return _LLGuidanceMatcher(self._library, self._vocabulary, [], False)

    def serialize(self) -> bytes:
        return self._lark


class _LLGuidanceMatcher(Matcher):
    def __init__(
        self, fresh: LLMatcher, vocabulary: Vocabulary, history: list[int], terminated: bool
    ) -> None:
        self.vocabulary = vocabulary
        self._fresh = fresh
        self._library = fresh.deep_copy()
        self._history = history
        # Stop tokens are tracked here: the library accepts one without a change of state.
        self._terminated = terminated

    def accept(self, token_id: int) -> bool:
        if self._terminated or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.stop_ids:
            self._terminated = accepted = self.is_complete
        elif self.vocabulary.text[token_id]:
            accepted = self._library.try_consume_tokens([token_id]) == 1
            self._check()
        else:
            accepted = False
        if accepted:
            self._history.append(token_id)
        return accepted

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._history):
            raise ValueError(f"cannot roll back {count} of {len(self._history)} tokens")
        if not count:
            return
        self._terminated = False
        del self._history[-count:]
        self._library = self._again()

    def fill(self, row: Row) -> None:
        walk.check_row(row, self.vocabulary.words)
        if self._terminated:
            row.fill(0)
            return
        self._fill(row)

    def fill_tree(self, tokens: Links, first_child: Links, next_sibling: Links, rows: Row) -> None:
        walk.check_tree(tokens, first_child, next_sibling, rows, self.vocabulary.words)
        rows.fill(0)
        if self._terminated:
            return
        self._fill(rows[0])
        drafted, child, sibling = tokens.tolist(), first_child.tolist(), next_sibling.tolist()
        open_nodes = [(child[0], 0, self._library)]
        while open_nodes:
            node, parent, library = open_nodes.pop()
            if node == -1:
                continue
            open_nodes.append((sibling[node], parent, library))
            token = drafted[node]
            if not walk.allowed(rows[parent], token) or token in self.vocabulary.stop_ids:
                continue
            own = library.deep_copy()
            if own.try_consume_tokens([token]) != 1:
                raise RuntimeError(f"token {token} is allowed by its mask row but was rejected")
            self._mask(own, rows[node])
            open_nodes.append((child[node], node, own))

    def forced_bytes(self, path: Sequence[int] = ()) -> bytes:
        if self._terminated:
            return b""
        library = self._library
        if path:
            library = library.deep_copy()
            if library.try_consume_tokens(list(path)) != len(path):
                raise RuntimeError(f"llguidance rejected legal tokens: {list(path)}")
        forced: bytes = library.compute_ff_bytes()
        return forced

    @property
    def is_terminated(self) -> bool:
        return self._terminated

    @property
    def is_complete(self) -> bool:
        return self._terminated or bool(self._library.is_accepting())

    @property
    def accepted_tokens(self) -> int:
        return len(self._history)

    def fork(self) -> Matcher:
        copy = _LLGuidanceMatcher(
            self._fresh, self.vocabulary, self._history.copy(), self._terminated
        )
        copy._library = self._library.deep_copy()
        return copy

    def _fill(self, row: Row) -> None:
        if not self._mask(self._library, row):
            self._library = self._again()

    def _mask(self, library: LLMatcher, row: Row) -> bool:
        """Write the mask of a state; False if the library is now in an error state, as it is if no
        token of the vocabulary is legal."""
        library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if library.is_error():
            if not _reason(library).startswith("NoExtension"):
                raise _failure(library)
            row.fill(0)
            return False
        row &= self.vocabulary.text_row
        if library.is_accepting():
            row |= self.vocabulary.stop_row
        return True

    def _again(self) -> LLMatcher:
        """A library matcher at this position, rebuilt from the start.

        The library's own rollback is not exact: inside a lexeme, masks then differ from those of
        a matcher that only went forward. A copy costs 1.5 µs, and each token half of that.
        """
        library = self._fresh.deep_copy()
        if library.try_consume_tokens(self._history) != len(self._history):
            raise RuntimeError("llguidance rejected tokens that it had accepted before")
        return library

    def _check(self) -> None:
        if self._library.is_error():
            raise _failure(self._library)


def _failure(library: LLMatcher) -> Exception:
    """The error of a library matcher: its grammar's fault where it is over one of its limits."""
    reason = _reason(library)
    if any(mark in reason for mark in OVER_LIMIT):
        return GrammarFailed(
            f"the grammar is too much for llguidance: {reason}; simplify it (long repetitions are "
            "the usual cause)"
        )
    return RuntimeError(f"llguidance failed: {reason}")


@dataclass(frozen=True)
class Lark:
    """A grammar in llguidance's dialect of Lark.

    Attributes:
        text: The grammar.
        by_characters: Whether its lexemes are single characters; a mask then costs milliseconds.
    """

    text: str
    by_characters: bool = False


@lru_cache(maxsize=4)
def to_lark(ebnf: str) -> Lark:
    """Translate EBNF text to equivalent Lark.

    Raises:
        GrammarError: the text has an error or is too large.
    """
    syntax = read(ebnf)
    grammar = EpsilonFree(syntax)
    if "root" not in grammar.rules:
        return Lark(f'{_OPTIONS}start: ""\n')
    lexemes = cut(grammar, syntax.recursive)
    return Lark(_LarkWriter(lexemes, grammar.root_nullable).text, lexemes.by_characters)


class _LarkWriter:
    """Writes a grammar over lexemes as Lark: rules in lower case, lexemes in upper case."""

    def __init__(self, lexemes: Lexemes, may_be_empty: bool) -> None:
        self.names = {name: f"r{i}" for i, name in enumerate(lexemes.parsed)}
        self.names |= {name: f"L{i}" for i, name in enumerate(lexemes.lexed)}
        own_names = self.names.copy()
        self.lines: list[str] = []
        rules = {**lexemes.parsed, **lexemes.lexed}
        for name in lexemes.names:
            self._beside(name, rules)
        used = {"root": None}
        pending = ["root"]
        while pending:
            name = pending.pop()
            own = own_names[name]
            written = self._but(rules[name], rules) if name in lexemes.lexed else None
            inner = set() if written else references(rules[name])
            written = written or self._of(own, rules[name], 0)
            self.lines.append(f"{own}: {written}")
            new = sorted(inner - used.keys(), reverse=True)
            used |= dict.fromkeys(new)
            pending += new
        start = f"start: {self.names['root']}" + (' | ""' if may_be_empty else "")
        self.text = _OPTIONS + "\n".join([start, *self.lines]) + "\n"

    def _beside(self, lexeme: str, rules: dict[str, Expression]) -> None:
        """Add a second lexeme for some of a lexeme's texts; rules then refer to either."""
        found = later(rules[lexeme], rules)
        if found is not None:
            own = self.names[lexeme]
            self.lines.append(f"LATER_{own}: {self._of(f'LATER_{own}', found, 0)}")
            self.names[lexeme] = f"either_{own.lower()}"
            self.lines.append(f"{self.names[lexeme]}: {own} | LATER_{own}")

    def _but(self, expression: Expression, rules: dict[str, Expression]) -> str | None:
        """A quoted lexeme written as "any string except these"; None if it is no such thing.

        Covers the whole lexeme with its quotes; otherwise the library does not profit.
        """
        parts = expression.parts if isinstance(expression, Chain) else ()
        if len(parts) != 3 or references(parts[0]) or references(parts[2]):
            return None
        inside, may_be_empty = parts[1], False
        if isinstance(inside, Repeat) and (inside.least, inside.most) == (0, 1):
            inside, may_be_empty = inside.body, True
        if isinstance(inside, Ref):
            inside = rules[inside.name]
        found = excluded(inside)
        if found is None:
            return None
        base, texts = found
        if may_be_empty:
            base = Repeat(base.body, 0, None)
        left, middle, right = (
            to_regex(part, self.names.__getitem__) for part in (parts[0], base, parts[2])
        )
        if not texts:
            return f"/{left}{middle}{right}/"
        names = "|".join(map(literal, texts))
        return f"/{left}{middle}{right}/ & ~/{left}(?:{names}){right}/"

    def _of(self, owner: str, expression: Expression, depth: int) -> str:
        if not references(expression):
            return f"/{to_regex(letters_first(expression), self.names.__getitem__)}/"
        if isinstance(expression, Ref):
            return self.names[expression.name]
        if depth == _DEEPEST:
            # The library does not parse deeply nested parentheses.
            name = f"{owner}_{len(self.lines)}"
            self.lines.append("")
            at = len(self.lines) - 1
            self.lines[at] = f"{name}: {self._of(name, expression, 0)}"
            return name
        if isinstance(expression, Repeat):
            most = "" if expression.most is None else expression.most
            body = self._of(owner, expression.body, depth + 1)
            return f"({body}){{{expression.least},{most}}}"
        mark = " " if isinstance(expression, Chain) else " | "
        inside = mark.join(self._of(owner, p, depth + 1) for p in parts_of(expression))
        return f"({inside})" if inside else '""'


def _reason(library: LLMatcher) -> str:
    return json.dumps(library.get_error().partition("\n")[0])[1:-1]


BACKEND = LLGuidanceBackend
