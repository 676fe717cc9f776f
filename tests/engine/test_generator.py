"""An engine and an output type, called often."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from overlap_spec import AsyncEngine, Engine, Generator, Grammar, SamplingParams
from overlap_spec.errors import GrammarError, RequestFailed

Small = Annotated[int, Field(ge=0, le=99)]


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: Small
    y: Small


@dataclass
class Pair:
    __pydantic_config__ = ConfigDict(extra="forbid")
    left: Small
    right: bool


class Answer(Enum):
    YES = "yes"
    NO = "no"


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3) as made:
        yield made


@pytest.mark.parametrize(
    ("output_type", "check"),
    [
        (Point, lambda v: isinstance(v, Point)),
        (Pair, lambda v: isinstance(v, Pair) and isinstance(v.right, bool)),
        (Answer, lambda v: v in (Answer.YES, Answer.NO)),
        (Literal["left", "right"], lambda v: v in ("left", "right")),
        (bool, lambda v: isinstance(v, bool)),
        (Small, lambda v: 0 <= v <= 99),
        (re.compile(r"[a-c]{4}"), lambda v: re.fullmatch("[a-c]{4}", v)),
        ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
          "additionalProperties": False}, lambda v: v == {"a": 1}),
        (Grammar.choice(["one"]), lambda v: v == "one"),
    ],
)  # fmt: skip
def test_values_of_a_type(engine: Engine, output_type: Any, check: Any) -> None:
    generator = Generator(engine, output_type)
    assert check(generator("go"))
    assert all(map(check, generator(["go", "on"], {"temperature": 1.0, "seed": 3})))


def test_free_text_and_defaults(engine: Engine) -> None:
    generator = Generator(engine, str, SamplingParams(max_tokens=7))
    assert isinstance(generator("go"), str)
    assert generator("go") == engine.generate("go", None, {"max_tokens": 7}).text
    assert generator("go", {"max_tokens": 2}) != generator("go")


def test_the_grammar_is_compiled_once_and_at_once(engine: Engine) -> None:
    before = engine.compiler.snapshot()["compiles"]
    generator = Generator(engine, re.compile("[x-z]{5}"))
    assert engine.compiler.snapshot()["compiles"] == before + 1
    generator(["a", "b", "c"])
    assert engine.compiler.snapshot()["compiles"] == before + 1
    with pytest.raises(GrammarError):
        Generator(engine, Grammar.ebnf("root ::= ("))
    with pytest.raises(GrammarError):
        Generator(engine, object())


def test_an_unfinished_value_is_an_error(engine: Engine) -> None:
    with pytest.raises(RequestFailed, match="raise max_tokens"):
        Generator(engine, Point)("go", {"max_tokens": 2, "complete": False})


@pytest.mark.ci
def test_with_an_async_engine_the_call_is_awaited(tiny: dict[str, str]) -> None:
    async def work() -> tuple[Any, Any]:
        settings = {"num_steps": 3, "adaptive": "static"}
        async with AsyncEngine(**tiny, **settings) as engine:
            generator = Generator(engine, Point)
            return await generator("go"), await generator(["go", "on"])

    one, many = asyncio.run(work())
    assert isinstance(one, Point)
    assert many[0] == one
    assert isinstance(many[1], Point)
