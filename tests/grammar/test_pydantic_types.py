"""Whatever the grammar of a type allows parses as that type, and what pydantic dumps is allowed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import ipaddress
import itertools
import pathlib
import random
import uuid
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pytest
from pydantic import (
    UUID1,
    UUID3,
    UUID4,
    UUID5,
    AnyHttpUrl,
    AnyUrl,
    AnyWebsocketUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    FileUrl,
    FiniteFloat,
    FtpUrl,
    HttpUrl,
    IPvAnyAddress,
    IPvAnyInterface,
    IPvAnyNetwork,
    Json,
    NaiveDatetime,
    NegativeInt,
    NonNegativeFloat,
    PositiveInt,
    PostgresDsn,
    RedisDsn,
    RootModel,
    SecretStr,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    condecimal,
    conint,
    conlist,
    conset,
    constr,
)
from typing_extensions import TypeAliasType, TypedDict

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Matcher, Vocabulary
from overlap_spec.grammar.backends import load
from overlap_spec.grammar.contract import CompiledGrammar

VOCABULARY = Vocabulary((*(bytes([i]) for i in range(256)), b""), 257, (256,))
STOP = 256
T = TypeVar("T")


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Point(BaseModel):
    x: int
    y: float = 0.5


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["a", "b"]
    size: int


class Node(BaseModel):
    value: int
    next: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=0, le=9)  # type: ignore[valid-type]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Box(BaseModel, Generic[T]):
    inside: T


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    first: str = Field(alias="First", max_length=5)
    others: set[int] = Field(default_factory=set, max_length=3)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: bool


class Names(RootModel[list[str]]):
    pass


@dataclasses.dataclass
class Plain:
    a: int
    b: list[Color]


class Typed(TypedDict, total=False):
    a: int
    b: str


class Pair(NamedTuple):
    left: int
    right: str


Ints = TypeAliasType("Ints", "list[int | Ints]")
UTC = dt.UTC
ZONE = dt.timezone(dt.timedelta(hours=-5, minutes=-30))
# Types with values that pydantic dumps.
SCALARS: dict[str, tuple[Any, list[Any]]] = {
    "int": (int, [0, -5, 10**20]),
    "float": (float, [0.0, -1.5, 1e-7, 1e22]),
    "bool": (bool, [True, False]),
    "str": (str, ["", "a\n\"\\é\u2028"]),
    "bytes": (bytes, [b"", b"ab\x00"]),
    "strict int": (StrictInt, [1]),
    "strict str": (StrictStr, ["a"]),
    "strict bool": (StrictBool, [True]),
    "positive": (PositiveInt, [1, 99]),
    "negative": (NegativeInt, [-1, -99]),
    "not negative": (NonNegativeFloat, [0.0, 0.25, 3.0]),
    "finite": (FiniteFloat, [1.5]),
    "bounded": (conint(ge=-3, lt=12), [-3, 11]),
    "interval": (Annotated[float, Field(ge=-1, le=2.5)], [0.4911332491307197, 2.5, -0.999]),
    "even": (conint(multiple_of=2), [0, 4, -2]),
    "Decimal": (Decimal, [Decimal("1.50"), Decimal(-7), Decimal("0.001")]),
    "price": (condecimal(max_digits=5, decimal_places=2), [Decimal("123.45"), Decimal("0.1")]),
    "share": (condecimal(ge=0, le=1), []),
    "pattern": (constr(pattern="^[a-z]{2,4}$"), ["ab", "abcd"]),
    "short": (constr(min_length=1, max_length=3), ["a", "éé\n"]),
    "secret": (SecretStr, []),
    "complex": (complex, [1 + 2j, complex(-1.5, -2)]),
    "date": (dt.date, [dt.date(2024, 2, 29), dt.date(1, 1, 1)]),
    "datetime": (
        dt.datetime,
        [dt.datetime(1, 1, 1), dt.datetime(2020, 1, 2, 3, 4, 5, 678, UTC),
         dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=ZONE)],
    ),
    "aware": (AwareDatetime, [dt.datetime(2020, 1, 1, tzinfo=ZONE)]),
    "naive": (NaiveDatetime, [dt.datetime(2020, 1, 1, 1, 1, 1, 5)]),
    "time": (dt.time, [dt.time(1, 2, 3), dt.time(1, 2, 3, 4, UTC)]),
    "timedelta": (
        dt.timedelta,
        [dt.timedelta(days=400), dt.timedelta(seconds=1.5), -dt.timedelta(days=1, seconds=3),
         dt.timedelta(0), dt.timedelta(hours=2, minutes=3, microseconds=7)],
    ),
    "uuid": (uuid.UUID, [uuid.UUID(int=0), uuid.uuid4()]),
    "uuid1": (UUID1, [uuid.uuid1()]),
    "uuid3": (UUID3, [uuid.uuid3(uuid.NAMESPACE_DNS, "a")]),
    "uuid4": (UUID4, [uuid.uuid4()]),
    "uuid5": (UUID5, [uuid.uuid5(uuid.NAMESPACE_DNS, "a")]),
    "base64": (Base64Bytes, [b"YWI="]),
    "any url": (AnyUrl, ["https://a.example/b?c=d#e", "mailto:a@b.example", "s3://bucket/k"]),
    "http": (HttpUrl, ["http://u:p@a-b.example:8080/x%20y", "https://10.0.0.1"]),
    "any http": (AnyHttpUrl, ["http://localhost/"]),
    "websocket": (AnyWebsocketUrl, ["wss://a.example/x"]),
    "ftp": (FtpUrl, ["ftp://a.example/x"]),
    "file": (FileUrl, ["file:///a/b%20c"]),
    "postgres": (PostgresDsn, ["postgresql://u:p@h1:5432,h2:5433/db"]),
    "redis": (RedisDsn, ["redis://localhost:6379/0"]),
    "ipv4": (ipaddress.IPv4Address, ["10.0.0.1"]),
    "ipv6": (ipaddress.IPv6Address, ["::1", "2001:db8::5"]),
    "ipv4 network": (ipaddress.IPv4Network, ["10.0.0.128/25", "0.0.0.0/0"]),
    "ipv6 network": (ipaddress.IPv6Network, ["2001:db8::/32", "::/0"]),
    "ipv4 interface": (ipaddress.IPv4Interface, ["10.0.0.1/8"]),
    "ipv6 interface": (ipaddress.IPv6Interface, ["::1/64"]),
    "any ip": (IPvAnyAddress, ["10.0.0.1", "::1"]),
    "any interface": (IPvAnyInterface, ["10.0.0.1/8"]),
    "any network": (IPvAnyNetwork, ["10.0.0.0/8"]),
    "path": (pathlib.Path, [pathlib.Path("/a/b")]),
    "enum": (Color, [Color.RED]),
    "int enum": (Level, [Level.HIGH]),
    "literal": (Literal["a", 1, None], ["a", 1, None]),
}  # fmt: skip
WHOLE: dict[str, tuple[Any, list[Any]]] = {
    "model": (Point, [Point(x=1)]),
    "frozen set": (frozenset[Frozen], [{Frozen(name="a", size=1), Frozen(name="b", size=1)}]),
    "recursive": (Node, [Node(value=1, next=Node(value=2))]),
    "discriminated": (
        Annotated[Cat | Dog, Field(discriminator="kind")], [Cat(kind="cat", lives=9)],
    ),
    "generic": (Box[list[Color]], [Box(inside=[Color.RED])]),
    "alias": (Strict, [Strict(First="a", others={1, 2})]),
    "extra": (Open, [Open(a=True, b=1)]),
    "root": (Names, [Names(["a"])]),
    "dataclass": (Plain, [Plain(1, [Color.BLUE])]),
    "typed dict": (Typed, [{"b": "x"}]),
    "named tuple": (Pair, [Pair(1, "a")]),
    "recursive alias": (Ints, [[1, [2, []]]]),
    "tuple": (tuple[int, str], [(1, "a")]),
    "variadic": (tuple[int, ...], [(1, 2)]),
    "enum keys": (dict[Color, int], [{Color.RED: 1}]),
    "uuid keys": (dict[uuid.UUID, bool], [{uuid.UUID(int=1): True}]),
    "bounded list": (conlist(bool, min_length=1, max_length=3), [[True]]),
    "bounded set": (conset(int, min_length=2, max_length=3), [{1, 2}]),
    "set of bools": (set[bool], [{True, False}]),
    "set of tuples": (set[tuple[int, Literal["a", "b"]]], [{(1, "a"), (1, "b")}]),
    "any": (Any, [[1, {"a": None}]]),
    "union": (int | str | None, [1, "a", None]),
}  # fmt: skip
WRAPPERS = {
    "list": (lambda t: list[t], lambda values: values),
    "tuple": (lambda t: tuple[t, bool], lambda values: (values[0], True)),
    "names": (lambda t: dict[str, t], lambda values: {f"k{i}": v for i, v in enumerate(values)}),
    "maybe": (lambda t: t | None, lambda values: values[0]),
    "box": (lambda t: Box[t], lambda values: Box(inside=values[0])),
}  # type: ignore[valid-type]


def every() -> dict[str, tuple[Any, list[Any]]]:
    """All types: written ones, and each scalar in each wrapper."""
    found = SCALARS | WHOLE
    for (name, (kind, values)), (around, (wrap, fill)) in itertools.product(
        SCALARS.items(), WRAPPERS.items()
    ):
        if around != "maybe" or name not in ("secret", "literal"):
            found[f"{around} of {name}"] = (wrap(kind), [fill(values)] if values else [])
    return found


ALL = every()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load("auto")(VOCABULARY), cache_bytes=0, isolated=False)


def walk(matcher: Matcher, rng: random.Random, soft: int) -> str:
    """Bytes at random to the end; past `soft` bytes those that lead to it come first."""
    text, row = bytearray(), np.zeros(VOCABULARY.words, np.int32)
    while True:
        matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        found = np.flatnonzero(bits).tolist()
        assert found, bytes(text)
        if STOP in found and (len(text) > soft or len(found) == 1 or rng.random() < 0.2):
            return text.decode()
        found = [byte for byte in found if byte != STOP]
        if len(text) > soft:
            found = [ord(mark) for mark in '"]}:,' if ord(mark) in found][:1] or found
        else:
            # Bytes of all kinds, not only the many that begin letters of far scripts.
            plain = [byte for byte in found if byte < 128]
            found = plain if plain and rng.random() < 0.9 else found
        assert len(text) < 4000, bytes(text)
        byte = rng.choice(found)
        assert matcher.accept(byte)
        text.append(byte)


def takes(made: CompiledGrammar, text: bytes) -> bool:
    matcher = made.matcher()
    return all(map(matcher.accept, text)) and matcher.is_complete


def check(name: str, walks: int) -> None:
    kind, values = ALL[name]
    adapter, made = TypeAdapter(kind), compiler().compile(Grammar.json_schema(kind))
    rng = random.Random(name)
    for soft in [0, 8, 30, 60][:walks]:
        text = walk(made.matcher(), rng, soft)
        adapter.validate_json(text)
    for value in values:
        # Types that take texts are given as texts.
        dumped = adapter.dump_json(adapter.validate_python(value), by_alias=True)
        assert takes(made, dumped), dumped


@pytest.mark.parametrize("name", [*WHOLE, *SCALARS])
def test_texts_parse_and_dumps_are_allowed(name: str) -> None:
    check(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_types_parse_and_dump(name: str) -> None:
    check(name, 4)


def test_there_are_some_hundred_types() -> None:
    assert len(ALL) >= 300


def test_json_inside_a_string_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match=r"JSON inside a string \(pydantic.Json\)"):
        Grammar.json_schema(Box[Json[int]])
