"""Best-effort outputs are validated at their end, beside the steps and within limits."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from overlap_spec import Engine, Generator, Grammar, SamplingParams
from overlap_spec.errors import GrammarError, RequestFailed
from overlap_spec.grammar import GrammarCompiler, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.isolation.check import is_best_effort, violation
from overlap_spec.grammar.isolation.limits import CompileFailure, CompileLimits
from overlap_spec.server.sglang import GenerateBody, SGLangFormatter
from overlap_spec.stats import RequestStats
from overlap_spec.types import Output, Verdict
from tests.support.serving import children
from tests.support.tiers import few

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# No backend holds texts apart, and none reads a look-behind.
EMPTY, LETTER = {"type": "string", "maxLength": 0}, {"type": "string", "pattern": "^a$"}
PAIR = {"type": "array", "minItems": 2, "uniqueItems": True, "items": False}
WRONG, RIGHT = PAIR | {"prefixItems": [EMPTY, EMPTY]}, PAIR | {"prefixItems": [EMPTY, LETTER]}
WRONG_TEXT, RIGHT_TEXT = '["",""]', '["","a"]'
WHY = "$: ['', ''] has non-unique elements"
HANGS = {"type": "string", "minLength": 40, "maxLength": 50, "pattern": r"(?<!x)^((.|\n)+)+QQQQ$"}


def loose(schema: Any) -> Grammar:
    return Grammar.json_schema(schema, best_effort=True)


@pytest.fixture(scope="module", params=few((True, False), False), ids=["isolated", "here"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    vocabulary = Vocabulary((b"a", b""), 2, (1,))
    limits = CompileLimits(time_s=2.0)
    backend = load("reference")(vocabulary)
    with GrammarCompiler(backend, isolated=request.param, limits=limits) as made:
        yield made


@pytest.mark.parametrize(
    ("schema", "text", "reason"),
    [
        (RIGHT, RIGHT_TEXT, None),
        (WRONG, WRONG_TEXT, WHY),
        (WRONG, '["', "it is not complete JSON: Unterminated"),
        ({"properties": {"a": {"uniqueItems": True}}}, '{"a":[1,1.0]}', "$.a: [1, 1] has non-"),
        ({"type": "number", "multipleOf": 0.1}, "0.3", None),
        ({"type": "number", "multipleOf": 0.1}, "0.35", "$: 0.35 is not a multiple of 0.1"),
        ({"type": "integer"}, "1.0", None),
        ({"type": "number", "maximum": 3}, "1e999999999", "$: 1E+999999999 is greater"),
    ],
    ids=str,
)
def test_violations_have_a_place_and_numbers_are_exact(
    schema: Any, text: str, reason: str | None
) -> None:
    found = violation(loose(schema), text)
    assert found == reason if reason is None else (found or "").startswith(reason)


def test_the_check_finds_the_answer_behind_thinking_and_beside_calls() -> None:
    for grammar in (
        loose(WRONG).after_thinking(),
        Grammar.tools([TOOL], otherwise=loose(WRONG)),
        Grammar.tools([TOOL], otherwise=loose(WRONG)).after_thinking(begin="<think>"),
    ):
        text = "hm</think>\n" if grammar.kind == "after_thinking" else ""
        begin = "<think>" if grammar.kind == "after_thinking" else ""
        assert is_best_effort(grammar)
        assert violation(grammar, f"{begin}{text}{WRONG_TEXT}") == WHY
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert violation(Grammar.tools([TOOL], otherwise=loose(WRONG)), call) is None
    assert not is_best_effort(Grammar.tools([TOOL], otherwise=Grammar.json_schema({})))


@pytest.mark.parametrize(
    ("schema", "text", "kind", "words"),
    [
        (HANGS, json.dumps("a" * 40), "timeout", "longer than 2 s"),
        ({"$ref": "http://127.0.0.1:1/x"}, "1", "crash", "Unresolvable"),
        ({"type": "array"}, "[" * 10**5, "crash", "RecursionError"),
    ],
    ids=["hostile pattern", "remote reference", "deep text"],
)
def test_a_check_that_comes_to_nothing_says_so(
    compiler: GrammarCompiler, schema: Any, text: str, kind: str, words: str
) -> None:
    check = compiler.check(loose(schema), text)
    assert check is not None
    with pytest.raises(CompileFailure, match=words) as caught:
        check.result(20)
    assert caught.value.kind == kind
    again = compiler.check(loose(WRONG), WRONG_TEXT)
    assert again is not None
    assert again.result(20) == WHY
    assert compiler.check(Grammar.json_schema({}), "1") is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_check_whose_process_is_killed_twice_blames_no_text() -> None:
    vocabulary = Vocabulary((b"a", b""), 2, (1,))
    with GrammarCompiler(
        load("reference")(vocabulary), isolated=False, limits=CompileLimits(time_s=30)
    ) as compiler:
        before = set(children(os.getpid()))
        check = compiler.check(loose(HANGS), json.dumps("a" * 40))
        assert check is not None
        # The check is tried once more before it is given up.
        while not check.done():
            for pid in set(children(os.getpid())) - before:
                os.kill(pid, signal.SIGKILL)
                before.add(pid)
            time.sleep(0.02)
        with pytest.raises(CompileFailure, match=r"ended .*for the second time") as caught:
            check.result(20)
        assert caught.value.kind == "unavailable"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_checks_start_no_interpreter_each() -> None:
    """A compiler that compiles in this process checks in the workers of one server."""
    vocabulary = Vocabulary((b"a", b""), 2, (1,))
    backend = load("reference")(vocabulary)
    before = set(children(os.getpid()))
    with GrammarCompiler(backend, isolated=False) as compiler:
        for _ in range(3):
            check = compiler.check(loose(WRONG), WRONG_TEXT)
            assert check is not None
            assert check.result(20) == WHY
            assert len(set(children(os.getpid())) - before) == 1


def test_a_closed_compiler_checks_nothing() -> None:
    vocabulary = Vocabulary((b"a", b""), 2, (1,))
    for isolated in (True, False):
        compiler = GrammarCompiler(load("reference")(vocabulary), isolated=isolated)
        compiler.close()
        check = compiler.check(loose(WRONG), WRONG_TEXT)
        assert check is not None
        with pytest.raises(CompileFailure, match="closed"):
            check.result(0)


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3, grammar_compile_timeout_s=2.0) as made:
        yield made


def test_outputs_tell_whether_they_are_valid(engine: Engine) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        engine.generate("x", Grammar.json_schema(WRONG))
    grammars = [loose(WRONG), loose(RIGHT), Grammar.json_schema({"const": "ab"}), None]
    outputs = engine.generate(["x"] * 4, grammars, SamplingParams(max_tokens=20))
    assert [o.text for o in outputs[:3]] == [WRONG_TEXT, RIGHT_TEXT, '"ab"']
    assert [o.verdict for o in outputs] == [Verdict(False, WHY), Verdict(True), None, None]
    assert outputs[0].parsed == ["", ""]
    cut = engine.generate("x", loose(WRONG), SamplingParams(max_tokens=1, complete=False))
    assert (cut.finish_reason, cut.verdict) == ("length", None)


def test_the_last_piece_tells_it_too(engine: Engine) -> None:
    *before, last = engine.stream("x", loose(WRONG))
    assert [delta.verdict for delta in before] == [None] * len(before)
    assert (last.finish_reason, last.verdict) == ("stop", Verdict(False, WHY))


def test_others_run_on_beside_a_check_and_its_end_is_bounded(engine: Engine) -> None:
    hung = engine.submit("x", loose(HANGS))
    while engine.output_processor.validation(hung) is None:
        engine.step()
    assert engine.generate("y", Grammar.choice(["yes"])).text == "yes"
    assert hung.output is None
    while hung.output is None:
        engine.step()
        time.sleep(0.01)
    engine.release([hung])
    assert hung.output.verdict is not None
    assert not hung.output.verdict.valid
    assert "longer than 2 s" in (hung.output.verdict.reason or "")
    assert engine.core.scheduler.allocator.in_use == 0


def test_an_abort_ends_a_check(engine: Engine) -> None:
    handle = engine.submit("x", loose(HANGS))
    while engine.output_processor.validation(handle) is None:
        engine.step()
    engine.abort(handle)
    assert handle.output is not None
    assert handle.output.finish_reason == "stop"
    assert handle.output.verdict == Verdict(
        False, "the request was aborted before its output was checked"
    )
    engine.release([handle])


def test_a_generator_gives_no_value_that_is_not_valid(engine: Engine) -> None:
    assert Generator(engine, loose(RIGHT))("x") == ["", "a"]
    with pytest.raises(RequestFailed, match="non-unique"):
        Generator(engine, loose(WRONG))("x")


def test_in_sglangs_shape() -> None:
    formatter = SGLangFormatter(cast("Any", None), GenerateBody(text="x"), ["id"], True)
    output = Output("", (), "stop", RequestStats(), verdict=Verdict(True))
    meta = formatter.whole([output])["meta_info"]
    assert meta["verdict"] == {"valid": True, "reason": None}
    without = formatter.whole([replace(output, verdict=None)])
    assert "verdict" not in without["meta_info"]
