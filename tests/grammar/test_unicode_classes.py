r"""`\p{…}`, `\P{…}` and `\u{…}` mean what ECMA-262 says."""

from typing import Any

import pytest

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from tests.support.grammars import takes


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\p{Letter}cole", ["École"[0] + "cole", "xcole"], ["1cole", "cole"]),
        (r"\p{Lu}\p{Ll}+", ["Ab", "Éß", "Жя"], ["ab", "A1"]),
        (r"\p{digit}+", ["42", "৪২"], ["a"]),
        (r"[^\p{L}_]+", ["12 -"], ["a", "_", "é"]),
        (r"[\p{Nd}\-a]+", ["1-a৪"], ["b"]),
        (r"\P{L}", ["1", "€"], ["a", "é"]),
        (r"\p{gc=Sc}", ["$", "€"], ["a"]),
        (r"\u{1F600}|\u{61}b", ["😀", "ab"], ["a"]),
        (r"\\p{1}\[\p{L}]", ["\\p[a]"], ["a"]),
    ],
)
def test_properties_and_code_points(pattern: str, good: list[str], bad: list[str]) -> None:
    for grammar, around in (
        (Grammar.regex(pattern), "{}"),
        (Grammar.json_schema({"type": "string", "pattern": f"^(?:{pattern})$"}), '"{}"'),
    ):
        written: Any = [one.replace("\\", "\\\\") if around != "{}" else one for one in good]
        assert [one for one in written if not takes(grammar, around.format(one))] == []
        assert [one for one in bad if takes(grammar, around.format(one))] == []


@pytest.mark.parametrize("pattern", [r"\p{Script=Greek}", r"\p{Nope}", r"\p", r"\u{110000}"])
def test_what_is_not_known_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"not supported|not a character"):
        Grammar.regex(pattern)
