"""What type checkers know of the arguments: never run, but checked by `make lint`.

A right use has no error. A wrong name or value is one: an ``ignore`` that ignores nothing would be
an error itself.
"""

import re
from dataclasses import dataclass

from typing_extensions import TypedDict

from overlap_spec import AsyncEngine, Engine, Generator, Output


@dataclass
class Person:
    """A grammar by its type."""

    name: str


class Place(TypedDict):
    """Another one."""

    city: str


def right(engine: Engine) -> tuple[Output, list[Output]]:
    """Types, schemas and patterns as grammars; fields of sampling as keywords."""
    one: Output = engine.generate("a", Person, temperature=0.5, max_tokens=3, raw=True)
    two: list[Output] = engine.generate(["a", "b"], [Person, None], seed=1)
    one = engine.generate("a", {"type": "integer"})
    engine.stream("a", re.compile("a+"), stop=["x"])
    engine.submit("a", Place)
    Generator(engine, Person)("a", top_p=0.5)
    return one, two


async def right_async(engine: AsyncEngine) -> Output:
    """The same of the engine for asyncio."""
    return await engine.generate("a", Person, min_p=0.1)


def wrong(engine: Engine) -> None:
    """Names that there are not, and values of another type."""
    engine.stream("a", max_token=3)  # type: ignore[call-arg]
    engine.stream("a", temperature="hot")  # type: ignore[arg-type]
    engine.submit("a", 5)  # type: ignore[arg-type]
    engine.generate("a", Person, sed=1)  # type: ignore[call-overload]
    Generator(engine, Person)("a", top_pp=0.5)  # type: ignore[call-arg]
