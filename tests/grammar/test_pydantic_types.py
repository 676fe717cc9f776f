"""Whatever the grammar of a type allows parses as that type, and what pydantic dumps is allowed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import ipaddress
import pathlib
import random
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar

import pytest
from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Discriminator,
    EmailStr,
    Field,
    FileUrl,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    MongoDsn,
    NaiveDatetime,
    NegativeInt,
    NonNegativeFloat,
    OnErrorOmit,
    PositiveInt,
    PostgresDsn,
    RedisDsn,
    RootModel,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    UrlConstraints,
    ValidationError,
    computed_field,
    condecimal,
    conint,
    conlist,
    conset,
    constr,
)
from pydantic.alias_generators import to_camel
from typing_extensions import TypeAliasType, TypedDict

from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler, Matcher
from tests.support.grammars import STOP, by_bytes, legal, takes

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


class Mode(enum.IntFlag):
    READ, WRITE = 1, 2


class Base(BaseModel):
    a: int


class Derived(Base):
    b: Annotated[str, StringConstraints(max_length=4)] = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def d(self) -> int:
        return self.a + 1


class Filled(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")
    first_name: str = Field(max_length=3)
    born_at: dt.date | None = None


def kind_of(value: Any) -> str:
    return "list" if isinstance(value, list) else "int"


Name = NewType("Name", str)


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
    "positive": (PositiveInt, [1, 99]),
    "not negative": (NonNegativeFloat, [0.0, 0.25, 3.0]),
    "bounded": (conint(ge=-3, lt=12), [-3, 11]),
    "interval": (Annotated[float, Field(ge=-1, le=2.5)], [0.4911332491307197, 2.5, -0.999]),
    "even": (conint(multiple_of=2), [0, 4, -2]),
    "Decimal": (Decimal, [Decimal("1.50"), Decimal(-7), Decimal("0.001")]),
    "price": (condecimal(max_digits=5, decimal_places=2), [Decimal("123.45"), Decimal("0.1")]),
    "share": (condecimal(ge=0, le=1), []),
    "pattern": (constr(pattern="^[a-z]{2,4}$"), ["ab", "abcd"]),
    "short": (constr(min_length=1, max_length=3), ["a", "éé\n"]),
    "secret": (SecretStr, []),
    "stripped": (Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True,
        max_length=6)], ["abc"]),
    "new type": (Name, ["a"]),
    "complex": (complex, [1 + 2j, complex(-1.5, -2)]),
    "date": (dt.date, [dt.date(2024, 2, 29), dt.date(1, 1, 1)]),
    "datetime": (dt.datetime, [dt.datetime(1, 1, 1), dt.datetime(2020, 1, 2, 3, 4, 5, 678, UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=ZONE)]),
    "aware": (AwareDatetime, [dt.datetime(2020, 1, 1, tzinfo=ZONE)]),
    "naive": (NaiveDatetime, [dt.datetime(2020, 1, 1, 1, 1, 1, 5)]),
    "time": (dt.time, [dt.time(1, 2, 3), dt.time(1, 2, 3, 4, UTC)]),
    "timedelta": (dt.timedelta, [dt.timedelta(days=400), dt.timedelta(seconds=1.5),
        -dt.timedelta(days=1, seconds=3), dt.timedelta(0),
        dt.timedelta(hours=2, minutes=3, microseconds=7)]),
    "uuid": (uuid.UUID, [uuid.UUID(int=0), uuid.uuid4()]),
    "uuid4": (UUID4, [uuid.uuid4()]),
    "base64": (Base64Bytes, [b"YWI="]),
    "any url": (AnyUrl, ["https://a.example/b?c=d#e", "mailto:a@b.example", "s3://bucket/k"]),
    "http": (HttpUrl, ["http://u:p@a-b.example:8080/x%20y", "https://10.0.0.1"]),
    "mongo": (MongoDsn, ["mongodb://h1:27017,h2:27018/db"]),
    "url with bounds": (Annotated[AnyUrl, UrlConstraints(allowed_schemes=["https"])],
        ["https://a.example/"]),
    "file": (FileUrl, ["file:///a/b%20c"]),
    "postgres": (PostgresDsn, ["postgresql://u:p@h1:5432,h2:5433/db"]),
    "redis": (RedisDsn, ["redis://localhost:6379/0"]),
    "ipv4": (ipaddress.IPv4Address, ["10.0.0.1"]),
    "ipv6": (ipaddress.IPv6Address, ["::1", "2001:db8::5"]),
    "ipv4 network": (ipaddress.IPv4Network, ["10.0.0.128/25", "0.0.0.0/0"]),
    "ipv6 network": (ipaddress.IPv6Network, ["2001:db8::/32", "::/0"]),
    "ipv4 interface": (ipaddress.IPv4Interface, ["10.0.0.1/8"]),
    "any ip": (IPvAnyAddress, ["10.0.0.1", "::1"]),
    "path": (pathlib.Path, [pathlib.Path("/a/b")]),
    "enum": (Color, [Color.RED]),
    "int enum": (Level, [Level.HIGH]),
    "flag": (Mode, [Mode.READ]),
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
    "enum keys": (dict[Color, int], [{Color.RED: 1}]),
    "uuid keys": (dict[uuid.UUID, bool], [{uuid.UUID(int=1): True}]),
    "bounded list": (conlist(bool, min_length=1, max_length=3), [[True]]),
    "bounded set": (conset(int, min_length=2, max_length=3), [{1, 2}]),
    "set of bools": (set[bool], [{True, False}]),
    "set of tuples": (set[tuple[int, Literal["a", "b"]]], [{(1, "a"), (1, "b")}]),
    "any": (Any, [[1, {"a": None}]]),
    "json value": (JsonValue, [{"a": [1, None, "x"]}]),
    "mapping": (Mapping[str, int], [{"a": 1}]),
    "counter": (Counter[str], [{"a": 1}]),
    "camel": (Filled, [Filled(firstName="ab")]),
    "omitted": (list[OnErrorOmit[int]], [[1]]),
    "tagged": (Annotated[Annotated[int, Tag("int")] | Annotated[list[int], Tag("list")],
        Discriminator(kind_of)], [1, [2]]),
    "int keys": (dict[int, bool], [{1: True, 0: False, -12: True}]),
    "negative keys": (dict[NegativeInt, bool], [{-1: True}]),
    "float keys": (dict[float, int], [{1.5: 1, 1e22: 2, -1e-7: 3}]),
    "bool keys": (dict[bool, int], [{True: 1}]),
    "pattern keys": (dict[constr(pattern="^[a-c]+$"), Any], [{"abc": 1}]),
    "datetime keys": (dict[dt.datetime, bool], [{dt.datetime(2020, 1, 1, tzinfo=UTC): True}]),
    "duration keys": (dict[dt.timedelta, int], [{dt.timedelta(days=1): 1}]),
    "date keys": (dict[dt.date, int], [{dt.date(2024, 2, 29): 1}]),
    "union": (int | str | None, [1, "a", None]),
}  # fmt: skip
ALL = SCALARS | WHOLE


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(by_bytes("auto"), cache_bytes=0, isolated=False)


def walk(matcher: Matcher, rng: random.Random, soft: int) -> str:
    """Bytes at random to the end; past `soft` bytes those that lead to it come first."""
    text = bytearray()
    while True:
        found = legal(matcher)
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


@pytest.mark.parametrize("name", ALL)
def test_texts_parse_and_dumps_are_allowed(name: str) -> None:
    kind, values = ALL[name]
    adapter, made = TypeAdapter(kind), compiler().compile(Grammar.json_schema(kind))
    rng = random.Random(name)
    for soft in (0, 8):
        text = walk(made.matcher(), rng, soft)
        adapter.validate_json(text)
    for value in values:
        # Types that take texts are given as texts.
        dumped = adapter.dump_json(adapter.validate_python(value), by_alias=True)
        assert takes(made, dumped), dumped


MAIL = Annotated[str, Field(json_schema_extra={"format": "email"})]
TAKEN = ["maria.lopez@example.com", "a+b@x-y.co.uk", "a@b.locals", "a@test.co", "a'b@C.De"]
NOT_TAKEN = [
    "a@b", "a@localhost", "a@[127.0.0.1]", '"a b"@b.co', "a@b.test", "a@b.TeSt", "a@x.arpa",
    "a@b.c1", "a@-b.co", "a@ab--c.de", "a@xn--a.de", "a..b@c.de", ".a@b.co", f"{'a' * 65}@b.co",
]  # fmt: skip


@pytest.mark.parametrize("most", [None, 30, 254])
def test_an_address_is_one_that_pydantic_takes(most: int | None) -> None:
    """What an `EmailStr` says of itself is the format alone; its validator asks for more."""
    kind = MAIL if most is None else Annotated[MAIL, StringConstraints(max_length=most)]
    made = compiler().compile(Grammar.json_schema(kind))
    texts = [*TAKEN, *NOT_TAKEN]
    # Beside such a bound names end in two or three letters.
    lost = {"a@b.locals"} if most == 30 else set()
    taken = [text for text in texts if takes(made, f'"{text}"'.encode())]
    assert taken == [text for text in TAKEN if text not in lost]
    rng = random.Random(str(most))
    addresses = [walk(made.matcher(), rng, soft) for soft in (0, 20, 40, 80)]
    assert all(most is None or len(text) <= most + 2 for text in addresses)
    with suppress(ImportError):
        adapter = TypeAdapter(EmailStr)
        for address in (*addresses, *(f'"{text}"'.encode() for text in TAKEN)):
            adapter.validate_json(address)
        for text in NOT_TAKEN:
            with pytest.raises(ValidationError):
                adapter.validate_python(text)


def test_a_computed_field_is_no_part_of_what_is_parsed() -> None:
    dumped = TypeAdapter(Derived).dump_json(Derived(a=1, b="x"))
    for additional, taken in (("closed", False), ("schema", True)):
        grammar = Grammar.json_schema(Derived, additional_properties=additional)  # type: ignore[arg-type]
        assert takes(compiler().compile(grammar), dumped) == taken


def test_bounds_on_keys_are_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="keys that are numbers may be bounded by 0 only"):
        Grammar.json_schema(dict[conint(ge=3), bool])  # type: ignore[misc]


def test_short_urls_are_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="a URL of at most 60 characters is not supported"):
        Grammar.json_schema(Annotated[AnyUrl, UrlConstraints(max_length=60)])


def test_json_inside_a_string_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match=r"JSON inside a string \(pydantic.Json\)"):
        Grammar.json_schema(Box[Json[int]])
