"""Values that fill the slots of templates, each with the way a text writes it.

A filler is a pair (value, text): the JSON value of the answer and its wording in the document.
Word lists are split by hash into training and held-out values.
"""

from __future__ import annotations

import hashlib
import re
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

PHRASINGS = Path(__file__).parent / "phrasings"
Filler = tuple[Any, str]

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
_ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "dr", "gr", "kl", "pr", "sh", "st", "th", "tr")
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ia", "oo"]
_CODAS = ["", "", "n", "r", "l", "s", "k", "m", "x", "th", "nd"]
HELD_OUT_SHARE = 0.2
INVENTED_SHARE = 0.4


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


def read_lines(name: str) -> list[str]:
    """The lines of a file in ``phrasings/``, without comments and empty lines."""
    text = (PHRASINGS / name).read_text("utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


@cache
def word_lists() -> dict[str, tuple[list[str], list[str]]]:
    """Kind → (training values, held-out values)."""
    lists: dict[str, tuple[list[str], list[str]]] = {}
    for line in read_lines("fillers.txt"):
        kind, _, values = line.partition(": ")
        known: list[str] = []
        held_out: list[str] = []
        for value in values.split(", "):
            outside = share_of(f"{kind}/{value}") < HELD_OUT_SHARE
            (held_out if outside else known).append(value)
        lists[kind] = (known, held_out)
    return lists


@cache
def plain_words() -> tuple[str, ...]:
    """Lower-case words of all phrasings, without those of held-out fillers, sorted."""
    reserved = {
        word for _, held_out in word_lists().values() for v in held_out for word in v.split()
    }
    names = sorted(path.name for path in PHRASINGS.glob("*.txt"))
    # Evaluation draws from these words: what is for training alone must not change its cases.
    names = [name for name in names if not name.startswith(("varied_", "fresh"))]
    text = " ".join(line for name in names for line in read_lines(name))
    return tuple(sorted(set(re.findall(r"\b[a-z]{3,}\b", text)) - reserved))


def invented_word(rng: Random) -> str:
    """A capitalised word of two or three syllables that no list holds."""
    parts = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    ]
    return "".join(parts).capitalize()


class Fillers:
    """Draws fillers from training or from held-out word lists.

    Args:
        rng: Source of all choices.
        held_out: Whether word lists give their held-out values; training draws invent a share
            of the open-class words instead, so that copying does not depend on the lists.
    """

    NAMES: ClassVar = {"first", "last", "city", "company", "street", "brand", "hotel", "venue"}
    # Lower-case kinds, with the number of words that an invented value may have.
    WORDS: ClassVar = {
        "noun": 1,
        "adjective": 1,
        "material": 1,
        "color": 1,
        "food": 1,
        "dish": 1,
        "job": 2,
        "hobby": 1,
        "skill": 1,
        "topic": 1,
        "room": 1,
        "software": 2,
        "symptom": 3,
        "task": 3,
        "phrase": 4,
        "message": 5,
    }

    def __init__(self, rng: Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def word(self, kind: str) -> str:
        """One value of the word list ``kind``."""
        if not self.held_out and self.rng.random() < INVENTED_SHARE:
            if kind in self.NAMES:
                return invented_word(self.rng)
            if kind in self.WORDS:
                count = self.rng.randint(1, self.WORDS[kind])
                return " ".join(self._plain_word() for _ in range(count))
        known, held_out = word_lists()[kind]
        return self.rng.choice(held_out if self.held_out and held_out else known)

    def _plain_word(self) -> str:
        if self.rng.random() < 0.5:
            return invented_word(self.rng).lower()
        return self.rng.choice(plain_words())

    def draw(self, kind: str) -> Filler:
        """A filler of ``kind``: a word list's name, ``name:argument``, or a method below."""
        name, _, argument = kind.partition(":")
        maker = getattr(self, f"_{name}", None)
        if maker is not None:
            made: Filler = maker(argument) if argument else maker()
            return made
        value = self.word(kind)
        return value, value

    def _joined(self, texts: list[str]) -> str:
        if len(texts) == 1:
            return texts[0]
        if self.rng.random() < 0.2:
            return ", ".join(texts)
        return ", ".join(texts[:-1]) + self.rng.choice((" and ", " and ", ", and ")) + texts[-1]

    def _bounds(self, argument: str) -> tuple[float, float]:
        negative = argument.startswith("-")
        low, _, high = argument.removeprefix("-").partition("-")
        return (-float(low) if negative else float(low)), float(high)

    def _person(self) -> Filler:
        name = f"{self.word('first')} {self.word('last')}"
        if self.rng.random() < 0.12:
            name = self.word("first")
        return name, name

    def _persons(self) -> Filler:
        names = [self._person()[0] for _ in range(self.rng.choice((1, 2, 2, 3)))]
        return names, self._joined(names)

    def _client(self) -> Filler:
        return self._person() if self.rng.random() < 0.5 else self._firm()

    def _firm(self) -> Filler:
        name = self.word("company")
        if self.rng.random() < 0.5:
            name = f"{name} {self.word('firm')}"
        return name, name

    def _thing(self) -> Filler:
        name = self.word("noun")
        extra = self.rng.random()
        if extra < 0.35:
            name = f"{self.word('adjective')} {name}"
        elif extra < 0.5:
            name = f"{self.word('material')} {name}"
        return name, name

    def _title(self) -> Filler:
        first = self.word("topic") if self.rng.random() < 0.7 else self.word("city")
        name = f"{first} {self.word('event')}".title()
        return name, name

    def _dishname(self) -> Filler:
        name = f"{self.word('food')} {self.word('dish')}"
        return name, name

    def _int(self, argument: str) -> Filler:
        low, high = self._bounds(argument)
        value = self.rng.randint(int(low), int(high))
        if 1 < value <= 12 and self.rng.random() < 0.12:
            return value, NUMBER_WORDS[value]
        return value, str(value)

    def _snum(self, argument: str) -> Filler:
        low, high = self._bounds(argument)
        value = self.rng.randint(int(low), int(high))
        return value, str(value)

    def _num(self, argument: str) -> Filler:
        low, high = self._bounds(argument)
        value = round(self.rng.uniform(low, high), 1)
        return (int(value) if value == int(value) else value), f"{value:g}"

    def _money(self) -> Filler:
        if self.rng.random() < 0.35:
            whole = self.rng.choice((self.rng.randint(1, 99), self.rng.randint(100, 5000)))
            return whole, str(whole)
        cents = self.rng.choice((95, 99, 50, 25, self.rng.randint(1, 99)))
        value = self.rng.choice((self.rng.randint(1, 99), self.rng.randint(1, 2500))) + cents / 100
        value = round(value, 2)
        return value, repr(value)

    def _enum(self, argument: str) -> Filler:
        value = self.rng.choice(argument.split("|"))
        return value, value

    def _list(self, kind: str) -> Filler:
        count = self.rng.choice((1, 2, 2, 3, 3, 4))
        values: list[str] = []
        for _ in range(count):
            value = self.word(kind)
            if value not in values:
                values.append(value)
        return values, self._joined(values)

    def _ilist(self, argument: str) -> Filler:
        low, high = self._bounds(argument)
        values = [self.rng.randint(int(low), int(high)) for _ in range(self.rng.randint(1, 5))]
        return values, self._joined([str(v) for v in values])

    def _nlist(self) -> Filler:
        values = [self._money()[0] for _ in range(self.rng.randint(1, 4))]
        return values, self._joined([str(v) for v in values])

    def _records(self, words: list[str], unit: str, high: int) -> Filler:
        names = self.rng.choice((("item", "quantity"), ("name", "quantity"), ("product", "count")))
        rows, texts = [], []
        for word in words:
            amount = self.rng.randint(1, high)
            rows.append({names[0]: word, names[1]: amount})
            texts.append(f"{amount}{unit}{word}")
        return rows, self._joined(texts)

    def _items(self) -> Filler:
        words = []
        for _ in range(self.rng.choice((1, 2, 2, 3))):
            word = self._thing()[0]
            words.append(word)
        return self._records(words, self.rng.choice((" ", " ", " x ")), 12)

    def _foods(self) -> Filler:
        words = [self.word("food") for _ in range(self.rng.choice((1, 2, 2, 3)))]
        return self._records(words, " g of ", 900)

    def _code(self) -> Filler:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        head = "".join(self.rng.choice(letters) for _ in range(self.rng.choice((1, 2, 3))))
        digits = "".join(self.rng.choice("0123456789") for _ in range(self.rng.randint(2, 6)))
        value = head + self.rng.choice(("-", "-", "", "/")) + digits
        return value, value

    def _flight(self) -> Filler:
        value = f"{self._letter()}{self._letter()}{self.rng.randint(10, 9999)}"
        return value, value

    def _seat(self) -> Filler:
        value = f"{self.rng.randint(1, 45)}{self.rng.choice('ABCDEF')}"
        return value, value

    def _letter(self) -> str:
        return self.rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def _version(self) -> Filler:
        value = f"{self.rng.randint(0, 12)}.{self.rng.randint(0, 30)}.{self.rng.randint(0, 20)}"
        return value, value

    def _zip(self) -> Filler:
        value = str(self.rng.randint(10000, 99999))
        return value, value

    def _iban(self) -> Filler:
        digits = "".join(self.rng.choice("0123456789") for _ in range(self.rng.randint(8, 14)))
        value = f"{self._letter()}{self._letter()}{digits}"
        return value, value

    def _email(self) -> Filler:
        plain = str.maketrans("éëüøöãñ' ", "eeuooan__")
        first = self.word("first").lower().translate(plain)
        last = self.word("last").lower().translate(plain)
        user = self.rng.choice((first, f"{first}.{last}", f"{first[0]}{last}", f"{first}_{last}"))
        if self.rng.random() < 0.25:
            user += str(self.rng.randint(1, 99))
        value = f"{user}@{self.word('domain')}.{self.word('tld')}"
        return value, value

    def _url(self) -> Filler:
        host = f"{self.word('domain')}{self.word('noun').replace(' ', '')}"
        value = f"{self.rng.choice(('www.', 'https://', ''))}{host}.{self.word('tld')}"
        return value, value

    def _phone(self) -> Filler:
        def digits(count: int) -> str:
            return "".join(self.rng.choice("0123456789") for _ in range(count))

        value = self.rng.choice(
            (
                f"{digits(3)}-{digits(4)}",
                f"+{self.rng.randint(1, 98)} {digits(3)} {digits(6)}",
                f"0{digits(3)} {digits(5)}",
                f"({digits(3)}) {digits(3)}-{digits(4)}",
            )
        )
        return value, value

    def _date(self) -> Filler:
        day = date(2018, 1, 1) + timedelta(days=self.rng.randrange(4500))
        value = day.isoformat()
        style = self.rng.random()
        month = MONTHS[day.month - 1]
        if style < 0.5:
            return value, value
        if style < 0.75:
            return value, f"{month} {day.day}, {day.year}"
        return value, f"{day.day} {month} {day.year}"

    def _time(self) -> Filler:
        hour, minute = self.rng.randrange(24), self.rng.choice((0, 0, 15, 30, 45, 5, 50))
        value = f"{hour:02d}:{minute:02d}"
        if self.rng.random() < 0.6:
            return value, value
        half = "am" if hour < 12 else "pm"
        return value, f"{(hour - 1) % 12 + 1}:{minute:02d} {half}"
