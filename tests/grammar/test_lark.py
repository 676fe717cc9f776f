"""Lark text is read as EBNF: the same texts, and errors that name the line."""

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from tests.support.grammars import by_bytes, takes


def split(text: str, texts: list[str], name: str) -> tuple[list[str], list[str]]:
    made = by_bytes(name).compile(Grammar.ebnf(text))
    found: tuple[list[str], list[str]] = ([], [])
    for one in texts:
        found[not takes(made, one)].append(one)
    return found


# A calculator, as the guides of these clients have it.
ARITHMETIC = r"""
    ?start: expression

    ?expression: term (("+" | "-") term)*   // sums
    ?term: factor (("*" | "/") factor)*
    ?factor: NUMBER
           | "-" factor
           | "(" expression ")" -> group

    %import common.NUMBER
    %import common.WS_INLINE
    %ignore WS_INLINE
"""
SQL = r"""
start: select_statement
select_statement: "SELECT"i column ("," column)* "FROM"i table [where]
where: "WHERE"i column "=" value
column: NAME
table: NAME
value: ESCAPED_STRING | SIGNED_INT
NAME: LETTER ("_" | LETTER | DIGIT)~0..3
%import common (LETTER, DIGIT)
%import common.ESCAPED_STRING
%import common.SIGNED_INT
%ignore / +/
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "arithmetic": (
        ARITHMETIC, ["1", "1+2 * 3", "-( 4.5/1e3 ) "], ["", "1+", "(1", "1\n+1", "1 2 3+"]
    ),
    "sql": (
        SQL,
        ["select a from b", 'SELECT ab, c FROM t_1 WHERE x="a\\"b"', "sElect a from b where c=-1"],
        ["select from b", "select abcde from b", "select a from b where c"],
    ),
    "terminals": (
        'start: A B? C+ "é\\n" | D\nA.1: "a".."c"\n_B: "x"\nB: _B _B\nC: /[0-9]{2}/\nD: /ab?/i\n',
        ["axx12é\n", "b1234é\n", "AB", "a", "aB"],
        ["x", "a1é\n", "axx12", "b12"],
    ),
    "recursion": (
        "start: list\nlist: \"[\" [item (\",\" item)*] \"]\"\nitem: list | /[a-z]+/\n",
        ["[]", "[a,[b],[[]]]"],
        ["[", "[a,]", "a"],
    ),
    "renamed": (
        '%import common.CNAME -> X\nstart: R X~2\nR: "-"\n', ["-ab", "-a_1"], ["-", "-1a"]
    ),
    "guidance": (
        '%llguidance {}\n\nstart: a "-" b\na[capture]: A\n\nA: "zyx"\n     | "wvu"\n'
        'b[capture="c"]: B\nB: /[x-z]{2}/\n',
        ["zyx-xz", "wvu-yy"],
        ["zyx", "zyx-x", "a-xz"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["reference", "xgrammar", "llguidance"])
@pytest.mark.parametrize("case", CASES)
def test_lark_text_allows_what_its_rules_make(case: str, name: str) -> None:
    text, good, bad = CASES[case]
    assert split(text, [*good, *bad], name) == (good, bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: a\n", "line 1: 'a' is not defined"),
        ("start: A\n\nA: /(a/\n", "line 3: regex '(a': missing )"),
        ("start: A\nA: /a/m\n", "line 2: the flags 'm'"),
        ("start: x{A}\n", "line 1: the template 'x' is not supported"),
        ("start: A\n%declare A\n", "line 2: %declare is not supported"),
        ("start: A\n%import python.A\n", "line 2: %import from 'python'"),
        ("start: A\n%import common.NOPE\n", "'common' has no terminal 'NOPE'"),
        ('start: "a"\nstart: "b"\n', "line 2: 'start' is defined twice"),
        ('start: ("a"\n', "')' is missing"),
        ('%llguidance {"no_forcing": true}\nstart: "a"\n', "line 1: '}' is missing"),
        ('start: a\na[max_tokens=5]: "a"\n', "line 2: the attribute 'max_tokens'"),
        ("start: a\na[capture=5]: A\n", "line 2: a name is missing before '5'"),
        ("start: \"a\" ; 'b'\n", "line 1: \"; 'b'"),
        ('start: "b".."a"\n', "is no range of characters"),
        ('start: "a"~3..1\n', "~3..1 is no range"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "nested too deep"),
    ],
)
def test_errors_name_the_line(text: str, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.ebnf(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ['root ::= "start: a"', 'root ::= "a"\n# start: b\n'])
def test_ebnf_stays_ebnf(text: str) -> None:
    assert Grammar.ebnf(text) == Grammar("ebnf", text)
