"""Embeds EBNF text in a larger grammar, with its rules renamed."""

from __future__ import annotations

import re

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.lowering.ebnf import Rules

_TOKEN = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])"""
    r"""|(?P<blank>(?:\s|\#[^\n]*)+)"""
    r"""|(?P<head>[A-Za-z_][\w.\-]*)\s*::="""
    r"""|(?P<name>[A-Za-z_][\w.\-]*)(?P<call>\()?""",
    re.DOTALL,
)
_MACROS = ("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch")


def splice(rules: Rules, ebnf: str, param: str) -> str:
    """Add the rules of a grammar; returns the new name of its `root`.

    Raises:
        GrammarError: no rule `root`, an undefined rule, or a construct that is supported in whole
            grammars only.
    """
    heads = [match for match in _TOKEN.finditer(ebnf) if match["head"]]
    names: dict[str, str] = {}
    for head in heads:
        if head["head"] in names:
            raise GrammarError(f"the EBNF grammar defines {head['head']} twice", param)
        names[head["head"]] = rules.reserve()
    if "root" not in names:
        raise GrammarError("the EBNF grammar has no rule named root", param)

    def renamed(match: re.Match[str]) -> str:
        name = match["name"]
        if match["blank"]:
            return " "
        if name is None or (name == "Regex" and match["call"]):
            return match[0]
        if name in _MACROS and match["call"]:
            raise GrammarError(f"{name}(…) is not supported inside another grammar", param)
        if name not in names:
            raise GrammarError(f"the EBNF grammar has no rule named {name}", param)
        return names[name] + (match["call"] or "")

    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = ebnf[head.end() : following.start() if following else len(ebnf)]
        rules.define(names[head["head"]], _TOKEN.sub(renamed, body).strip())
    return names["root"]
