"""What generate takes: fields of sampling as keywords, types as grammars, and what is not known."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from overlap_spec import AsyncEngine, Engine, Generator, Grammar, SamplingParams
from overlap_spec.engine.input_processor import SamplingOptions
from overlap_spec.errors import ConfigError, GrammarError, InvalidRequest, RequestFailed

Small = Annotated[int, Field(ge=0, le=99)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: Small
    y: Small


@dataclass
class Pair:
    __pydantic_config__ = ConfigDict(extra="forbid")
    left: Small
    right: bool


class Size(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    wide: Small


class Answer(Enum):
    YES = "yes"
    NO = "no"


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3) as made:
        yield made


def test_fields_of_sampling_are_keywords(engine: Engine) -> None:
    wanted = engine.generate("go", None, GREEDY)
    assert engine.generate("go", temperature=0.0, max_tokens=8).text == wanted.text
    assert (
        "".join(d.text for d in engine.stream("go", temperature=0.0, max_tokens=8)) == wanted.text
    )
    both = engine.generate(["go", "go"], None, [GREEDY, {"temperature": 0.0}], max_tokens=3)
    assert [len(output.token_ids) for output in both] == [3, 3], "a keyword goes before sampling"
    assert both[0].token_ids == wanted.token_ids[:3]
    assert GREEDY.max_tokens == 8
    generator = Generator(engine, str, GREEDY)
    assert generator("go") == wanted.text
    assert generator("go", max_tokens=3) == both[0].text


def test_keywords_are_all_fields_of_sampling() -> None:
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(
        SamplingOptions.__annotations__
    )


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        ({"enum": [3]}, lambda v: v == 3),
        (Point, lambda v: isinstance(v, Point)),
        (Pair, lambda v: isinstance(v, Pair) and isinstance(v.right, bool)),
        (Size, lambda v: 0 <= v["wide"] <= 99),
        (Answer, lambda v: v in (Answer.YES, Answer.NO)),
        (Literal["up", "down"], lambda v: v in ("up", "down")),
        (re.compile("[ab]{3}"), lambda v: re.fullmatch("[ab]{3}", v)),
        (bool, lambda v: isinstance(v, bool)),
        (Small, lambda v: 0 <= v <= 99),
        (Grammar.choice(["one"]), lambda v: v == "one"),
    ],
)
def test_a_schema_or_a_type_is_a_grammar(engine: Engine, grammar: Any, check: Any) -> None:
    free, held = engine.generate(["go", "go"], [None, grammar], max_tokens=40)
    assert free.parsed is None
    assert check(held.parsed)
    generator = Generator(engine, grammar)
    assert check(generator("go"))
    assert all(map(check, generator(["go", "on"], {"temperature": 1.0, "seed": 3})))


def test_a_generator_compiles_once_and_at_once(engine: Engine) -> None:
    before = engine.compiler.snapshot()["compiles"]
    generator = Generator(engine, re.compile("[x-z]{5}"))
    assert engine.compiler.snapshot()["compiles"] == before + 1
    generator(["a", "b", "c"])
    assert engine.compiler.snapshot()["compiles"] == before + 1
    for wrong in (Grammar.ebnf("root ::= ("), object()):
        with pytest.raises(GrammarError):
            Generator(engine, wrong)
    with pytest.raises(RequestFailed, match="raise max_tokens"):
        Generator(engine, Point)("go", {"max_tokens": 2, "complete": False})


def test_what_was_compiled_ahead_is_not_compiled_again(engine: Engine) -> None:
    engine.compile(Pair)
    before = engine.compiler.snapshot()["compiles"]
    engine.generate("x", Pair, GREEDY, max_tokens=32)
    assert engine.compiler.snapshot()["compiles"] == before
    with pytest.raises(GrammarError, match="free text"):
        engine.compile(None)


def test_str_is_free_text_and_a_text_is_no_grammar(engine: Engine) -> None:
    wanted = engine.generate("go", None, GREEDY)
    assert engine.generate("go", str, GREEDY).text == wanted.text
    for given in ("[ab]+", '{"type": "integer"}'):
        with pytest.raises(GrammarError, match=r"say Grammar\.json_schema\(text\)") as caught:
            engine.generate("go", given)  # type: ignore[call-overload]
        assert caught.value.param == "grammar"
    with pytest.raises(GrammarError):
        engine.generate("go", object())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("schema", "grammar"),
        ("gramar", "grammar"),
        ("sampling_params", "sampling"),
    ],
)
def test_an_unknown_argument_is_named_with_what_was_meant(
    engine: Engine, name: str, meant: str
) -> None:
    calls: list[Any] = [engine.generate, engine.submit, Generator(engine, bool)]
    for call in [*calls, lambda *args, **more: list(engine.stream(*args, **more))]:
        with pytest.raises(InvalidRequest, match=f"{name}'; did you mean '{meant}'") as caught:
            call("go", **{name: 3})
        assert caught.value.param == name
    assert engine.core.scheduler.allocator.in_use == 0


def test_a_wrong_value_is_named(engine: Engine) -> None:
    for name, value, said in (
        ("top_p", 2, "a finite number in [0.0, 1.0]: 2"),
        ("temperature", float("nan"), "a finite number of at least 0.0: nan"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(f"{name} must be {said}")) as caught:
            engine.generate("go", **{name: value})
        assert caught.value.param == name


def test_unknown_settings_are_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="'num_step'; did you mean 'num_steps'"):
        Engine(num_step=3)
    with pytest.raises(ConfigError, match="'max_model_len'; did you mean 'context_length'"):
        AsyncEngine(max_model_len=3)
    with pytest.raises(InvalidRequest, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1})


def test_none_in_a_field_asks_for_nothing() -> None:
    given = {field.name: None for field in dataclasses.fields(SamplingParams)}
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams)])
def test_a_value_of_another_kind_is_refused_by_its_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: object()})
    assert refused.value.param == name
