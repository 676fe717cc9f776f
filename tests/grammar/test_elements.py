"""Arguments written as elements: what is let through, and that xgrammar lets it through too."""

import random
from typing import Any, get_args

import pytest
import xgrammar as xgr

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, Matcher
from overlap_spec.grammar.lowering.elements import STYLES as WRITTEN
from overlap_spec.grammar.tools.structural_tag import Style
from tests.support.grammars import BYTES, STOP, by_bytes, legal

STRING, INT = {"type": "string"}, {"type": "integer"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": STRING,
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "tags": {"type": "array", "items": STRING},
        "unit": {"enum": ["C", "F"]},
        "place": {"type": "object", "properties": {"x": STRING}, "required": ["x"],
                  "additionalProperties": False},
        "sure": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-Z<]+$"},
    },
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
QWEN = "<parameter={}>{}</parameter>"
GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
COHERE = '<cofl:value name="{}" type="{}">{}</cofl:value>'
ITEM = '<cofl:value type="raw">{}</cofl:value>'
KIMI = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
GOOD = {
    "qwen_xml": [QWEN.format("city", "\nNew <York>\n") + "\n" + QWEN.format("days",
        "\n12\n") + "\n", QWEN.format("city", "") + QWEN.format("tags", '["a","</parameter>"]'),
        QWEN.format("city", "a") + QWEN.format("place", '{"x":""}') + QWEN.format("code", "A<")],
    "glm_xml": [GLM.format("city", "x y") + "\n" + GLM.format("sure", "true"),
        GLM.format("city", '"') .replace("\n", "") + GLM.format("unit", "F")],
    "cohere_xml": [
        COHERE.format("city", "raw", "x") + COHERE.format("tags", "list", ITEM.format("a") * 3),
        COHERE.format("city", "raw", "x")
        + COHERE.format("place", "dict", COHERE.format("x", "raw", "")),
        COHERE.format("city", "raw", "x") + COHERE.format("days", "json", 7),
    ],
    "kimi_k3_xml": [KIMI.format("city", "string", "x") + KIMI.format("days", "number", 3),
        KIMI.format("city", "string", "") + KIMI.format("tags", "array", '["a"]')],
}  # fmt: skip
BAD = {
    "qwen_xml": [
        "", QWEN.format("days", 2), QWEN.format("city", "a") * 2, QWEN.format("City", "a"),
        QWEN.format("city", "a") + QWEN.format("days", 21),
        QWEN.format("city", "a") + QWEN.format("unit", '"C"'),
        QWEN.format("city", "a") + QWEN.format("code", "a"),
        QWEN.format("city", "</parameter>"),
    ],
    "glm_xml": [GLM.format("city", "a") + GLM.format("sure", "yes")],
    "cohere_xml": [COHERE.format("city", "json", '"x"'),
        COHERE.format("city", "raw", "x") + COHERE.format("tags", "list", '["a"]'),
        COHERE.format("city", "raw", "x") + COHERE.format("place", "dict", "")],
    "kimi_k3_xml": [KIMI.format("city", "object", "x")],
}  # fmt: skip


def matcher(schema: Any, style: str, name: str = "auto") -> Matcher:
    form = {"type": "json_schema", "json_schema": schema, "style": style}
    tag = Grammar.structural_tag({"type": "structural_tag", "format": form})
    return by_bytes(name).compile(tag).matcher()


def takes(made: Matcher, text: str) -> bool:
    return all(map(made.accept, text.encode())) and made.is_complete


@pytest.mark.parametrize("name", ["reference", "xgrammar", "llguidance"])
@pytest.mark.parametrize("style", GOOD)
def test_elements_are_held(style: str, name: str) -> None:
    assert [t for t in GOOD[style] if not takes(matcher(SCHEMA, style, name), t)] == []
    assert [t for t in BAD[style] if takes(matcher(SCHEMA, style, name), t)] == []


@pytest.mark.parametrize("style", GOOD)
def test_the_library_that_named_the_styles_lets_them_through(style: str) -> None:
    form = {"type": "json_schema", "json_schema": SCHEMA, "style": style}
    tag = {"type": "structural_tag", "format": form}
    info = xgr.TokenizerInfo(
        list(BYTES.tokens), xgr.VocabType.RAW, vocab_size=257, stop_token_ids=[STOP]
    )
    theirs = xgr.GrammarCompiler(info).compile_structural_tag(tag)
    rng = random.Random(style)
    for _ in range(6):
        text = walk(matcher(SCHEMA, style), WRITTEN[style].end, rng)
        assert xgr.GrammarMatcher(theirs).accept_string(text), text


def goes_on(mine: Matcher, text: bytes) -> bool:
    ahead = mine.fork()
    return all(map(ahead.accept, text))


def walk(mine: Matcher, end: str, rng: random.Random) -> bytes:
    """Bytes at random to the end; now and then what closes a text, where it is legal."""
    text = bytearray()
    while True:
        found = legal(mine)
        if STOP in found and (rng.random() < 0.3 or len(found) == 1 or len(text) > 600):
            return bytes(text)
        chosen = bytes([rng.choice([byte for byte in found if byte < 128])])
        if rng.random() < 0.2:
            closing = (mark.encode() for mark in (end, '"', "]", "}"))
            chosen = next((c for c in closing if goes_on(mine, c)), chosen)
        assert all(map(mine.accept, chosen))
        text += chosen
        assert len(text) < 5000


def test_lists_inside_themselves_and_several_kinds_of_one_member() -> None:
    tree = {
        "type": "object",
        "properties": {"a": {"type": ["string", "integer", "null"]}, "t": {"$ref": "#"}},
    }
    inner = COHERE.format("t", "dict", COHERE.format("a", "json", "null"))
    assert takes(matcher(tree, "cohere_xml"), COHERE.format("t", "dict", inner))
    assert takes(matcher(tree, "kimi_k3_xml"), KIMI.format("a", "number", 1))
    assert takes(matcher(tree, "kimi_k3_xml"), KIMI.format("a", "string", 1))
    assert not takes(matcher(tree, "kimi_k3_xml"), KIMI.format("a", "null", 1))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (STRING, "needs a schema that allows objects"),
        ({"type": "object", "properties": {"a b": True}}, "cannot be written as an element"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"enum": [{"a": 1}]}, "fixes objects"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "items"),
    ],
)
def test_what_no_element_can_hold_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        matcher(schema, "cohere_xml")


def test_styles_are_read_by_name() -> None:
    assert set(get_args(Style)) == {"json", *WRITTEN}
    with pytest.raises(GrammarError, match="'yaml' - at"):
        matcher(SCHEMA, "yaml")
