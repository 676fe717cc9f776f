"""A format that nobody knows is told, wherever an output is."""

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from overlap_spec import Engine
from overlap_spec.grammar import Grammar
from tests.support.serving import shared_server

SCHEMA = {"enum": ["a"], "format": "sku"}
TOLD = ("$: format 'sku' is not known, so it is not enforced",)


def test_an_unknown_format_is_told_with_its_first_path() -> None:
    schema = {
        "properties": {"a": {"items": [{"format": "sku"}, {"format": "date"}]}, "b": SCHEMA},
        "$defs": {"x y": {"not": {"format": "other"}}},
        "examples": [{"format": "no schema"}],
        "default": {"format": "no schema"},
    }
    found = Grammar.json_schema({"$schema": "http://json-schema.org/draft-07/schema#", **schema})
    assert found.warnings == (
        "$.$defs['x y'].not: format 'other' is not known, so it is not enforced",
        "$.properties.a.items[0]: format 'sku' is not known, so it is not enforced",
    )
    assert found.after_thinking().warnings == found.warnings
    many = {"anyOf": [{"format": f"f{i}"} for i in range(99)]}
    assert len(Grammar.json_schema(many).warnings) == 16


def test_known_formats_and_hints_are_not_told() -> None:
    names = ("date", "uuid4", "int32", "double", "password")
    assert Grammar.json_schema({"anyOf": [{"format": name} for name in names]}).warnings == ()


def test_schemas_inside_tags_and_tools_are_read_too() -> None:
    tag = {"type": "tag", "begin": "<a>", "end": "</a>"}
    form = {"type": "or", "elements": [{**tag, "content": {"type": "json_schema",
            "json_schema": SCHEMA}}]}  # fmt: skip
    (found,) = Grammar.structural_tag({"type": "structural_tag", "format": form}).warnings
    assert found.startswith("$.elements[0].content.json_schema: format 'sku'")
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": SCHEMA}}}}
    told = Grammar.tools([tool], otherwise=Grammar.json_schema(SCHEMA)).warnings
    assert told == (*TOLD, "$.f.properties.a: format 'sku' is not known, so it is not enforced")


def test_outputs_carry_the_warnings(tiny: dict[str, str]) -> None:
    with Engine(**tiny, num_steps=3) as engine:
        outputs = [engine.generate("x", Grammar.json_schema(s)) for s in (SCHEMA, {"const": 1})]
        deltas = list(engine.stream("x", Grammar.json_schema(SCHEMA)))
    assert [output.warnings for output in outputs] == [TOLD, ()]
    assert [delta.warnings for delta in deltas] == [*[()] * (len(deltas) - 1), TOLD]


# What the grammar tells of an output: a schema, how it is asked for, the text, and what is told.
EMPTY = {"type": "string", "maxLength": 0}
TWINS = {"type": "array", "minItems": 2, "uniqueItems": True, "items": False}
TWINS["prefixItems"] = [EMPTY, EMPTY]
WHY = "$: ['', ''] has non-unique elements"
CASES = {
    "warnings": (SCHEMA, [], '"a"', list(TOLD), 0, f"warning: {TOLD[0]}\n"),
    "verdict": (
        TWINS, ["--best-effort"], '["",""]', {"valid": False, "reason": WHY}, 2,
        f"error: the output is not valid: {WHY}\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_tells_it(
    tiny: dict[str, str], run: Callable[[str], tuple[int, str, str]], name: str
) -> None:
    schema, flags, text, _, status, told = CASES[name]
    flags = ["--model", tiny["model"], "--draft", tiny["draft"], *flags, "--schema"]
    asked = shlex.join(["generate", "x", *flags, json.dumps(schema)])
    assert run(asked) == (status, f"{text}\n", told)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", CASES)
def test_over_http(name: str, path: str, stream: bool) -> None:
    server = shared_server()
    schema, _, _, told, *_ = CASES[name]
    form = {"name": "a", "schema": schema, "strict": name == "warnings"}
    prompt: dict[str, Any] = {"prompt": "x"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    asked = prompt | {"response_format": {"type": "json_schema", "json_schema": form}}
    reply = server.post(path, asked | {"stream": stream})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [c for line in lines or [reply.text] for c in json.loads(line)["choices"]]
    assert [c.get(name) for c in choices if c["finish_reason"]] == [told]
