"""Tool calls: the texts allowed in every format, and replies parsed however they are cut."""

import itertools
import json
import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar
from overlap_spec.grammar.reasoning.markers import known_markers
from overlap_spec.grammar.tools import formats as tool_formats
from overlap_spec.grammar.tools.format import ToolFormat
from overlap_spec.grammar.tools.formats import load_format
from overlap_spec.grammar.tools.stream import (
    CallArguments,
    CallStart,
    CallStream,
    ContentDelta,
    ToolCall,
    ToolReply,
    parse_reply,
)
from tests.support.grammars import by_bytes

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "…", **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", CITY, strict=True), tool("now")]
PARIS, NONE = '{"city":"Paris"}', "{}"
# Two calls as the models of each format write them.
CALLS = {
    "embedded": '{"name":"get_weather","arguments":{"city":"Paris"}}{"name":"now","arguments":{}}',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city":"Paris"}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city":"Paris"}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_v11": '[TOOL_CALLS]get_weather[ARGS]{"city":"Paris"}[TOOL_CALLS]now[ARGS]{}',
}


@cache
def compiled(grammar: Grammar):
    return by_bytes().compile(grammar)


def reach(grammar: Grammar, text: str) -> tuple[int, bool]:
    matcher = compiled(grammar).matcher()
    taken = sum(1 for _ in itertools.takewhile(matcher.accept, text.encode()))
    return taken, matcher.is_complete


def takes(grammar: Grammar, text: str) -> bool:
    return reach(grammar, text) == (len(text.encode()), True)


def one_call(format: str) -> str:
    form = load_format(format)
    return f"{form.openings[0]}{form.begin}get_weather{form.middle}{PARIS}{form.end}{form.close}"


@pytest.fixture(params=tool_formats.names())
def format(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_format_is_tested(format: str) -> None:
    form = load_format(format)
    assert set(CALLS) == set(tool_formats.names())
    assert known_markers() >= {*form.markers, "</think>", "[THINK]"}
    for opening in form.openings:
        assert sum((opening + form.begin).startswith(start) for start in form.starts) == 1


def test_calls_are_taken_and_read_back(format: str) -> None:
    grammar = Grammar.tools(TOOLS, format=format)
    assert takes(grammar, CALLS[format])
    want = ToolReply("", (ToolCall("get_weather", PARIS), ToolCall("now", NONE)))
    assert grammar.parse(CALLS[format]) == want
    assert pickle.loads(pickle.dumps(grammar)) == grammar


def test_choices(format: str) -> None:
    one, two = one_call(format), CALLS[format]
    cases = {
        "auto": (True, True, True),
        "required": (False, True, True),
        "none": (True, False, False),
        "get_weather": (False, True, False),
    }
    for choice, want in cases.items():
        grammar = Grammar.tools(TOOLS, choice=choice, format=format)
        assert tuple(takes(grammar, text) for text in ("Hello.", one, two)) == want, choice
    named = {"type": "function", "function": {"name": "now"}}
    assert not takes(Grammar.tools(TOOLS, choice=named, format=format), one)
    single = Grammar.tools(TOOLS, choice="required", format=format, parallel=False)
    assert takes(single, one)
    assert not takes(single, two)


def test_allowed_tools() -> None:
    for mode in ("auto", "required"):
        grammar = Grammar.tools(TOOLS, choice=allowed(mode, "now"))
        assert grammar == Grammar.tools(TOOLS[1:], choice=mode)


def test_wrong_calls_are_refused_at_the_first_wrong_byte(format: str) -> None:
    grammar = Grammar.tools(TOOLS, format=format)
    one = one_call(format)
    name, value = one.index("get_weather"), one.index("Paris")
    changes = [
        (one.replace("get_weather", "get_whether"), name + 5),
        (one.replace('"city"', '"cito"'), one.index("city") + 3),
        (one.replace('"Paris"', "null"), value - 1),
        (one.replace("Paris", "Paris and so on"), value + 9),
        (one.replace("}", ',"a":1}', 1), one.index("}") + 2),
        (one[: value - 2] + "{", value - 2),
    ]
    for text, taken in changes:
        assert reach(grammar, text) == (taken, False), text


def test_free_text_never_holds_what_starts_a_call(format: str) -> None:
    form = load_format(format)
    grammar = Grammar.tools(TOOLS, choice="none", format=format)
    for start in form.starts:
        assert reach(grammar, start)[0] == len(start) - 1
        text = f"so {start} it"
        assert takes(grammar, text) is not form.anywhere
    auto = Grammar.tools(TOOLS, format=format)
    assert takes(auto, "Hi. " + one_call(format)) is form.anywhere or not form.anywhere
    for text in ("", "a < b [TOOL_CALL", "<tool_cal", "x"):
        assert takes(auto, text) is not any(text.startswith(start) for start in form.starts)
    if form.anywhere:
        reply = auto.parse("Hi. " + CALLS[format])
        assert (reply.content, len(reply.calls)) == ("Hi. ", 2)


def test_the_other_openings() -> None:
    llama = Grammar.tools(TOOLS, format="llama3-json")
    assert takes(llama, "<|python_tag|>" + CALLS["llama3_json"])
    assert reach(llama, "<|python_tag|>x") == (14, False)
    assert len(llama.parse("<|python_tag|>" + CALLS["llama3_json"]).calls) == 2
    mistral = Grammar.tools(TOOLS, format="mistral")
    assert takes(mistral, CALLS["mistral"].replace("] [", "][", 1))


def test_strict_tools_are_exact_and_others_are_as_exact_as_can_be() -> None:
    hard = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "uniqueItems": True}},
        "required": ["b"],
    }
    begin = '{"name":"f","arguments":'
    loose = Grammar.tools([tool("f", hard)], format="embedded")
    assert takes(loose, begin + '{"a":1,"b":[2,2]}}')
    assert not takes(loose, begin + '{"a":"x","b":[]}}')
    unread = Grammar.tools([tool("f", {"minProperties": 3, "maxProperties": 2})], format="embedded")
    assert takes(unread, begin + '{"a":1}}')
    assert not takes(unread, begin + "1}")
    for grammar in (
        Grammar.tools([tool("f", hard)], format="embedded", strict=True),
        Grammar.tools([tool("f", hard, strict=True)], format="embedded"),
    ):
        with pytest.raises(GrammarError, match="uniqueItems"):
            compiled(grammar)


def test_an_answer_instead_of_calls(format: str) -> None:
    answer = Grammar.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}})
    grammar = Grammar.tools(TOOLS, format=format, otherwise=answer)
    assert takes(grammar, '{"ok":true}')
    assert takes(grammar, CALLS[format])
    assert not takes(grammar, "Hello.")
    assert grammar.parse('{"ok":true}') == ToolReply('{"ok":true}', parsed={"ok": True})
    assert len(grammar.parse(CALLS[format]).calls) == 2
    assert grammar.inner == answer
    assert grammar != Grammar.tools(TOOLS, format=format)
    with pytest.raises(ValueError, match="Expecting"):
        grammar.parse("Hello.")


def test_types_reach_through_what_wraps_them() -> None:
    inner = Grammar.json_schema(list[int])
    grammar = Grammar.tools(TOOLS, otherwise=inner).after_thinking()
    assert grammar.parse("hm</think>[1]").parsed == [1]
    assert takes(grammar, "hm</think>\n[1]")
    assert takes(grammar, "hm</think>" + CALLS["hermes"])


REPLIES = [
    ("hermes", "", "", []),
    ("hermes", "a <tool_", "a <tool_", []),
    ("hermes", "<<tool_call>{}", "<<tool_call>{}", []),
    ("hermes", '<tool_call> {"name" :"f","arguments": \n{"a":"}\\"</tool_call>"}}', "", ["f"]),
    ("hermes", '<tool_call>{"na<tool_call>{"name":"f","arguments":{}}', '<tool_call>{"na', ["f"]),
    ("hermes", '<tool_call>{"name":"f","arguments":3', '<tool_call>{"name":"f","arguments":3', []),
    ("hermes", CALLS["hermes"] + "\n done", "\n done", ["get_weather", "now"]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}, "id": 1}</tool_call>', None, ["f"]),
    ("embedded", '{"a":1}', '{"a":1}', []),
    ("embedded", ' {"name":"f","arguments":{}}', ' {"name":"f","arguments":{}}', []),
    ("embedded", 'x{"name":"f","arguments":{}}', 'x{"name":"f","arguments":{}}', []),
    ("embedded", '{"name":"f","arguments":{}} and', " and", ["f"]),
    ("llama3_json", '{"name":"f","parameters":{}};{"name":"g","parameters":{}}', "", ["f", "g"]),
    ("llama3_json", '{"name":"f","parameters":{}}\n{"name":"g","parameters":{}}', "", ["f", "g"]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", 'Hi[TOOL_CALLS] [{"name": "f", "arguments": {}}] bye', "Hi bye", ["f"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]', ", 3]", ["f"]),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS] {"a":[1]}!', "!", ["f"]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "names"), REPLIES)
def test_replies(format: str, text: str, content: str | None, names: list[str]) -> None:
    reply = parse_reply(text, format)
    assert [call.name for call in reply.calls] == names
    assert content is None or reply.content == content
    for call in reply.calls:
        assert call.is_whole
        assert isinstance(json.loads(call.arguments), dict)
    for cut in range(len(text) + 1):
        check_stream(format, [text[:cut], text[cut:]], reply)
    check_stream(format, list(text), reply)


def check_stream(format: str, pieces: list[str], reply: ToolReply) -> None:
    """The stream's events add up to the reply, in order, and hold nothing back at its end."""
    stream = CallStream(format)
    events = [event for piece in pieces for event in stream.push(piece)] + stream.finish()
    content, calls = "", list[list[str]]()
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    assert content == reply.content
    assert calls == [[call.name, call.arguments] for call in reply.calls]
    assert stream.reply == reply


def test_markers_are_never_content_on_their_way(format: str) -> None:
    text = CALLS[format]
    stream = CallStream(format)
    for char in text:
        assert not any(isinstance(event, ContentDelta) for event in stream.push(char))
    assert stream.finish() == []


def test_a_reply_that_is_cut_off_keeps_what_it_has(format: str) -> None:
    text = one_call(format)
    cut = text[: text.index("Paris") + 2]
    assert parse_reply(cut, format).calls == (ToolCall("get_weather", '{"city":"Pa', False),)
    with pytest.raises(ValueError, match="get_weather is cut off"):
        Grammar.tools(TOOLS, format=format).parse(cut)
    assert parse_reply(text[: text.index(PARIS) + len(PARIS)], format).calls[0].is_whole


TEXT = st.text('ab"\\{}[]<>é\n', max_size=6)
VALUES = TEXT | st.integers() | st.lists(TEXT, max_size=2) | st.dictionaries(TEXT, TEXT, max_size=2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_calls_come_back_however_they_are_cut(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(tool_formats.names()))
    form = load_format(name)
    arguments = data.draw(st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=3))
    indent = data.draw(st.sampled_from([None, 1]))
    texts = [json.dumps(each, indent=indent, ensure_ascii=False) for each in arguments]
    content = data.draw(st.text("ab <[{", max_size=6)) if form.anywhere or not texts else ""
    calls = form.separator.join(
        f"{form.begin}f{i}{form.middle}{t}{form.end}" for i, t in enumerate(texts)
    )
    whole = content + (
        data.draw(st.sampled_from(form.openings)) + calls + form.close if texts else ""
    )
    reply = parse_reply(whole, name)
    want = tuple(ToolCall(f"f{i}", text) for i, text in enumerate(texts))
    assert reply == ToolReply(content, want)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    check_stream(name, pieces, reply)


NONSENSE = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name":', '"f"', "<tool", "{}"),
    *('"arguments":', '"parameters":', *",{}[];<a \n", '"', "\\"),
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(tool_formats.names()),
    st.lists(st.sampled_from(NONSENSE), max_size=14),
    st.integers(1, 9),
)
def test_nonsense_is_read_alike_however_it_is_cut(format: str, parts: list[str], size: int) -> None:
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    check_stream(format, pieces, parse_reply(text, format))


def test_the_embedded_model_calls_a_tool() -> None:
    from overlap_spec import Engine

    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": unit},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tools = [tool("get_weather", schema, strict=True), tool("now")]
    message = {"role": "user", "content": "What is the weather in Paris in celsius?"}
    with Engine() as engine:
        grammar = Grammar.tools(tools, format="embedded")
        out = engine.generate([message], grammar, {"max_tokens": 60}, tools=tools)
    assert out.finish_reason == "stop"
    assert out.parsed == parse_reply(out.text, "embedded")
    [call] = out.parsed.calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris", "unit": "celsius"}


OWN = ToolFormat(("@",), True, "@", "(", ")", markers=("@",))


def test_formats_of_ones_own() -> None:
    grammar = Grammar.tools([tool("f")], format=f"{__name__}:OWN")
    assert takes(grammar, "x@f({})@f({})")
    assert [call.name for call in grammar.parse("x@f({})@f({})").calls] == ["f", "f"]
    for broken in (f"{__name__}:TOOLS", "no.such.module:X", "hermes2", 3):
        with pytest.raises(
            GrammarError, match=r"not a tool format|No module|known are: embedded|name"
        ):
            load_format(broken)  # type: ignore[arg-type]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("tools", "more", "message"),
    [
        ([], {}, "at least one"),
        ([{"type": "custom", "function": {}}], {}, r"tools\[0\]\.type: 'custom'"),
        ([tool("a b")], {}, r"function\.name: 'a b'"),
        ([tool("f"), tool("f")], {}, r"tools\[1\]\.function\.name: 'f' is a duplicate"),
        ([tool("f", [])], {}, "parameters: must be an object"),
        ([tool("f", {"type": "string"})], {}, r"parameters\.type"),
        ([tool("f", {"properties": 3})], {}, r"parameters: \$\.properties"),
        (TOOLS, {"choice": "f"}, "'f' is not one of the tools"),
        (TOOLS, {"choice": {"type": "function", "function": {"name": "f"}}}, "'f' is not"),
        (TOOLS, {"choice": allowed("auto", "f")}, r"allowed_tools\.tools\[0\]: 'f' is not"),
        (TOOLS, {"format": "xml"}, "unknown tool format 'xml'"),
        (TOOLS, {"otherwise": Grammar.json_object(), "choice": "required"}, "otherwise needs"),
    ],
)
def test_broken_tools_name_the_field(tools: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Grammar.tools(tools, **more)
