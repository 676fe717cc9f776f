"""Reads Lark text: what the clients of Outlines and vLLM send as a grammar.

Read as a context-free grammar over characters, without a lexer: any text that its rules can make is
allowed, also where Lark's lexer would prefer another terminal. `%ignore` allows its terminal before
every terminal in rules, and at the end. The start rule is `start`. Priorities, aliases, `?` and `!`
shape Lark's trees alone, and are left out, as are the names of captures that guidance gives rules
(`[capture]`) and its empty header, `%llguidance {}`. Templates, `%declare`, `%extend`, `%override`,
and imports from elsewhere than `common` are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.automata.charset import ALL, intersect, union
from overlap_spec.grammar.automata.regex import parse
from overlap_spec.grammar.automata.regex_ast import (
    EMPTY,
    CharClass,
    Node,
    Ref,
    Repetition,
    alternate,
    concat,
    mapped,
)
from overlap_spec.grammar.ir.rules import literal
from overlap_spec.grammar.ir.syntax import Syntax, whole

_START = re.compile(r"^[ \t]*[!?]*start\s*(\.-?\d+)?\s*:", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f\r]+|//[^\n]*|\#[^\n]*|\\\r?\n)|(?P<line>\n)"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)"""
    r"""|(?P<directive>%[a-z]+)|(?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*|_[A-Za-z0-9_]*)"""
    r"""|(?P<number>-?\d+)|(?P<mark>\.\.|->|[:|()\[\]?*+~,.{}=])""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\((?P<code>x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|.)")
_DEEPEST = 100
_IGNORED = Ref("ignored")
# Lark's library `common`, as regular expressions.
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "CPP_COMMENT": "//[^\\n]*",
    "CR": "\\r",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "FLOAT": r"[0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": "\\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"[0-9]+([eE][+\-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SH_COMMENT": "#[^\\n]*",
    "SIGNED_FLOAT": (
        r"[+\-]?([0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)"
    ),
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": (
        r"[+\-]?([0-9]+([eE][+\-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)"
    ),
    "SQL_COMMENT": "--[^\\n]*",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


def is_lark(text: str) -> bool:
    """Whether a grammar's text is Lark: it defines `start` with a colon, and nothing with `::=`."""
    return _START.search(text) is not None and "::=" not in text


def read(text: str) -> Syntax:
    """The grammar of Lark text.

    Raises:
        GrammarError: names the line and what is wrong there, or not supported.
    """
    reader = _Reader(list(_tokens(text)))
    reader.read()
    return reader.syntax()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    at, line, depth = 0, 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(line, f"{text[at : at + 20]!r} is not Lark")
        kind, found = str(match.lastgroup), match[0]
        depth += (found in ("(", "[")) - (found in (")", "]")) if kind == "mark" else 0
        # An alternative on a line of its own continues the rule above; so does an open bracket.
        joined = kind == "line" and (
            depth > 0 or re.match(r"(?:[ \t\r\n]|//[^\n]*|#[^\n]*)*\|", text[match.end() :])
        )
        if kind != "blank" and not joined:
            yield _Token(kind, found, line)
        line += found.count("\n")
        at = match.end()
    yield _Token("line", "\n", line)


def _error(line: int, reason: str) -> GrammarError:
    return GrammarError(f"Lark grammar, line {line}: {reason}", "ebnf")


@dataclass
class _Reader:
    tokens: list[_Token]
    at: int = 0
    bodies: dict[str, Node] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)
    depth: int = 0

    @cached_property
    def ignores(self) -> bool:
        """Whether anything is ignored."""
        return any(token.text == "%ignore" for token in self.tokens)

    @property
    def next(self) -> _Token:
        return self.tokens[min(self.at, len(self.tokens) - 1)]

    def take(self, *marks: str) -> _Token | None:
        """The next token if it is one of the marks."""
        if self.next.kind == "mark" and self.next.text in marks:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def need(self, mark: str) -> None:
        if self.take(mark) is None:
            raise _error(self.next.line, f"{mark!r} is missing before {self.next.text!r}")

    def take_kind(self, kind: str) -> _Token:
        if self.next.kind != kind:
            raise _error(self.next.line, f"a {kind} is missing before {self.next.text!r}")
        self.at += 1
        return self.tokens[self.at - 1]

    def take_name(self) -> _Token:
        return self.take_kind("name")

    def read(self) -> None:
        """Read all statements."""
        while self.at < len(self.tokens):
            if self.next.kind == "line":
                self.at += 1
                continue
            if self.next.kind == "directive":
                self.directive()
            else:
                self.definition()
            if self.at < len(self.tokens) and self.next.kind != "line":
                raise _error(self.next.line, f"{self.next.text!r} is out of place")

    def directive(self) -> None:
        token = self.next
        self.at += 1
        if token.text == "%ignore":
            self.ignored.append(self.expansions(True))
        elif token.text == "%import":
            self.imports(token.line)
        elif token.text == "%llguidance" and self.take("{"):
            # Settings of its parser would stand inside.
            self.need("}")
        else:
            raise _error(token.line, f"{token.text} is not supported")

    def imports(self, line: int) -> None:
        library = ""
        while self.take("."):
            library += "."
        library += self.take_name().text
        names: list[str] = []
        while self.take("."):
            names.append(self.take_name().text)
        if self.take("("):
            wanted = [self.take_name().text]
            while self.take(","):
                wanted.append(self.take_name().text)
            self.need(")")
        else:
            wanted = names[-1:]
            names = names[:-1]
        if library != "common" or names or not wanted:
            path = ".".join([library, *names])
            raise _error(line, f"%import from {path!r} is not supported, only from 'common'")
        for name in wanted:
            if name not in _COMMON:
                raise _error(line, f"'common' has no terminal {name!r}")
            own = self.take_name().text if self.take("->") else name
            self.define(own, line, _regex(_COMMON[name], "", line))

    def definition(self) -> None:
        token = self.take_name()
        name = token.text.lstrip("!?")
        if self.take("{"):
            raise _error(token.line, f"the template {name!r} is not supported")
        if self.take("["):
            self.attributes()
        if self.take("."):
            self.at += 1
        self.need(":")
        self.define(name, token.line, self.expansions(_is_terminal(name)))

    def attributes(self) -> None:
        """Read a rule's attributes, of which one changes no text: the name of a capture."""
        token = self.take_name()
        if token.text != "capture":
            raise _error(token.line, f"the attribute {token.text!r} is not supported")
        if self.take("="):
            if self.next.kind != "string":
                raise _error(token.line, f"a name is missing before {self.next.text!r}")
            self.at += 1
        self.need("]")

    def define(self, name: str, line: int, body: Node) -> None:
        if name in self.bodies:
            raise _error(line, f"{name!r} is defined twice")
        self.bodies[name] = body

    def expansions(self, inside: bool) -> Node:
        """Alternatives; `inside` a terminal nothing is ignored."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _error(self.next.line, "nested too deep")
        ways = [self.sequence(inside)]
        while self.take("|"):
            ways.append(self.sequence(inside))
        self.depth -= 1
        return alternate(*ways)

    def sequence(self, inside: bool) -> Node:
        parts = []
        while self.next.kind in ("string", "regex", "name") or self.next.text in ("(", "["):
            parts.append(self.repeated(inside))
        if self.take("->"):
            self.take_name()
        return concat(*parts)

    def repeated(self, inside: bool) -> Node:
        atom = self.atom(inside)
        sign = self.take("?", "*", "+")
        if sign:
            return Repetition(atom, int(sign.text == "+"), 1 if sign.text == "?" else None)
        if not self.take("~"):
            return atom
        least = self.number()
        most = self.number() if self.take("..") else least
        if most < least:
            raise _error(self.next.line, f"~{least}..{most} is no range")
        return Repetition(atom, least, most)

    def number(self) -> int:
        return int(self.take_kind("number").text)

    def atom(self, inside: bool) -> Node:
        token = self.next
        if self.take("("):
            found = self.expansions(inside)
            self.need(")")
            return found
        if self.take("["):
            found = self.expansions(inside)
            self.need("]")
            return Repetition(found, 0, 1)
        self.at += 1
        if token.kind == "name":
            if self.next.text == "{":
                raise _error(token.line, f"the template {token.text!r} is not supported")
            self.used.setdefault(token.text, token.line)
            found = _named(token.text)
            return found if inside or not _is_terminal(token.text) else self.after_ignored(found)
        if token.kind == "regex":
            source, _, flags = token.text[1:].rpartition("/")
            found = _regex(source.replace("\\/", "/"), flags, token.line)
        elif self.take(".."):
            found = self.span(token)
        else:
            found = _literal(token)
        return found if inside or found == EMPTY else self.after_ignored(found)

    def after_ignored(self, terminal: Node) -> Node:
        return concat(_IGNORED, terminal) if self.ignores else terminal

    def span(self, first: _Token) -> Node:
        last = self.next
        self.at += 1
        ends = [_string(token) for token in (first, last) if token.kind == "string"]
        if len(ends) != 2 or any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
            raise _error(first.line, f"{first.text}..{last.text} is no range of characters")
        return CharClass(intersect(((ord(ends[0]), ord(ends[1])),), ALL))

    def syntax(self) -> Syntax:
        """The whole grammar."""
        for name, line in self.used.items():
            if name not in self.bodies:
                raise _error(line, f"{name!r} is not defined")
        if "start" not in self.bodies:
            raise _error(1, "there is no rule 'start'")
        start = _named("start")
        rules: dict[str, Node] = {"root": concat(start, _IGNORED) if self.ignores else start}
        rules[_IGNORED.name] = Repetition(alternate(*self.ignored), 0, None)
        rules |= {_named(name).name: body for name, body in self.bodies.items()}
        return whole(rules, {})


def _is_terminal(name: str) -> bool:
    return name.lstrip("_").isupper()


def _named(name: str) -> Ref:
    return Ref(f"lark-{name}")


def _regex(source: str, flags: str, line: int) -> Node:
    if flags.strip("i"):
        raise _error(line, f"the flags {flags!r} of /{source}/ are not supported, only 'i'")
    try:
        node = parse(source)
    except GrammarError as error:
        raise _error(line, str(error)) from error
    return _any_case(node) if flags else node


def _any_case(node: Node) -> Node:
    """An expression that matches letters of ASCII in either case."""
    if isinstance(node, CharClass):
        ranges = list(node.members)
        for low, high in node.members:
            for first, last, step in ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20)):
                bottom, top = max(low, first), min(high, last)
                if bottom <= top:
                    ranges.append((bottom + step, top + step))
        return CharClass(union([tuple(ranges)]))
    return mapped(node, _any_case)


def _string(token: _Token) -> str:
    inside = token.text.removesuffix("i")[1:-1]
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}

    def unescaped(match: re.Match[str]) -> str:
        if match["code"]:
            return chr(int(match["code"][1:], 16))
        return escapes.get(match[1], match[1])

    return _ESCAPE.sub(unescaped, inside)


def _literal(token: _Token) -> Node:
    try:
        fixed = _string(token)
        fixed.encode()
    except (ValueError, UnicodeEncodeError) as error:
        raise _error(token.line, f"{token.text} is not text") from error
    node = literal(fixed)
    return _any_case(node) if token.text.endswith("i") else node
