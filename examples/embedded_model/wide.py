"""Fillers in more shapes than the word lists have: made names, addresses, dates in words."""

from __future__ import annotations

from datetime import date, timedelta
from typing import ClassVar

from examples.embedded_model.fillers import MONTHS, Filler, Fillers, invented_word

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MADE_SHARE = 0.3


def number_words(value: int) -> str:
    """A number from 20 to 99 in words."""
    tens, ones = divmod(value, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones - 1]}" if ones else "")


def ordinal(day: int) -> str:
    """1st, 2nd, 3rd, 4th and so on."""
    if day in (11, 12, 13):
        return f"{day}th"
    return f"{day}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th') }"


class WideFillers(Fillers):
    """Fillers with invented titles, addresses and user names, and dates and numbers in words.

    The values of word lists stay split into training and held-out ones; held-out fillers invent
    nothing from the lists but draw dates, numbers and times in the same wider shapes.
    """

    # Kinds written in capitals, with the number of words that an invented value may have.
    TITLES: ClassVar = {
        "venue": 3,
        "hotel": 3,
        "song": 3,
        "artist": 2,
        "book": 3,
        "airline": 1,
        "event": 2,
        "firm": 1,
        "language": 1,
        "country": 1,
        "city": 2,
        "company": 2,
        "street": 2,
    }
    LOWER: ClassVar = {"disease": 2, "drug": 1, "breed": 1, "species": 1, "genre": 1, "domain": 1}

    def word(self, kind: str) -> str:
        if kind == "day":
            return self.rng.choice(DAYS)
        if kind == "word":
            return self._plain_word()
        if not self.held_out and self.rng.random() < MADE_SHARE:
            if kind in self.TITLES:
                count = self.rng.randint(1, self.TITLES[kind])
                return " ".join(self._plain_word().capitalize() for _ in range(count))
            if kind in self.LOWER:
                count = self.rng.randint(1, self.LOWER[kind])
                return " ".join(self._plain_word() for _ in range(count))
        return super().word(kind)

    def _venue(self) -> Filler:
        if self.held_out or self.rng.random() < 0.5:
            name = self.word("venue")
        else:
            kinds = "Hall Centre House Library Room Park Theatre Hotel Arena Inn Club Square Museum"
            first = self._plain_word() if self.rng.random() < 0.6 else self.word("city")
            name = f"{first} {self.rng.choice(kinds.split())}".title()
        return name, name

    def _title(self) -> Filler:
        if self.held_out or self.rng.random() < 0.6:
            return super()._title()
        words = [self._plain_word() for _ in range(self.rng.randint(1, 2))]
        kinds = "fair day show week forum night congress market run summit party race talk"
        last = self.rng.choice(kinds.split()) if self.rng.random() < 0.7 else self.word("event")
        name = " ".join([*words, last]).title()
        if self.rng.random() < 0.1:
            name += f" {self.rng.randint(2019, 2030)}"
        return name, name

    def _model(self) -> Filler:
        name = self.word("brand")
        if self.rng.random() < 0.6:
            name += f" {self._letter()}{self.rng.randint(1, 99)}"
        return name, name

    def _digits(self) -> Filler:
        value = str(self.rng.choice((self.rng.randint(1, 99), self.rng.randint(100, 99999))))
        return value, value

    def _login(self) -> Filler:
        name = f"{self.word('first')}{self.rng.choice(('', '_', '.'))}{self.rng.randint(1, 999)}"
        value = (name if self.rng.random() < 0.6 else self._plain_word()).lower()
        return value, value

    def _int(self, argument: str) -> Filler:
        value, text = super()._int(argument)
        chance = self.rng.random()
        if 20 <= value < 100 and chance < 0.06:
            return value, number_words(value)
        if value >= 1000 and value != 2000 and chance < 0.15 and not 1800 < value < 2100:
            return value, f"{value:,}"
        return value, text

    def _money(self) -> Filler:
        value, text = super()._money()
        chance = self.rng.random()
        if (chance < 0.5 and not isinstance(value, int)) or chance < 0.1:
            text = f"{value:.2f}"
        if value >= 1000 and self.rng.random() < 0.3:
            text = f"{value:,.2f}" if not isinstance(value, int) else f"{value:,}"
        return value, text

    def _items(self) -> Filler:
        words = []
        for _ in range(self.rng.choice((1, 2, 2, 3))):
            word = self._thing()[0]
            if self.rng.random() < 0.6 and not word.endswith("s"):
                word += "s"
            words.append(word)
        return self._records(words, self.rng.choice((" ", " ", " x ")), 20)

    def _email(self) -> Filler:
        if self.held_out or self.rng.random() < 0.4:
            return super()._email()
        words = [
            self._plain_word() if self.rng.random() < 0.5 else invented_word(self.rng).lower()
            for _ in range(self.rng.choice((1, 2, 2)))
        ]
        user = self.rng.choice((".", "_", "-", "")).join(words)
        if self.rng.random() < 0.25:
            user += str(self.rng.randint(1, 999))
        host = self._plain_word() if self.rng.random() < 0.7 else self.word("domain")
        value = f"{user}@{host}.{self.word('tld')}"
        return value, value

    def _date(self) -> Filler:
        if self.rng.random() < 0.5:
            return super()._date()
        day = date(2018, 1, 1) + timedelta(days=self.rng.randrange(4500))
        month = MONTHS[day.month - 1]
        text = self.rng.choice(
            (
                f"the {ordinal(day.day)} of {month} {day.year}",
                f"{month} {ordinal(day.day)}, {day.year}",
                f"{ordinal(day.day)} {month} {day.year}",
                f"{month[:3]} {day.day}, {day.year}",
                f"{day.day} {month[:3]} {day.year}",
                f"{DAYS[day.weekday()]}, {day.day} {month} {day.year}",
                f"{DAYS[day.weekday()]}, {month} {day.day}, {day.year}",
            )
        )
        return day.isoformat(), text

    def _time(self) -> Filler:
        value, text = super()._time()
        hour, minute = int(value[:2]), int(value[3:])
        chance = self.rng.random()
        if minute == 0 and chance < 0.4:
            if hour == 12:
                return value, "noon"
            half = "am" if hour < 12 else "pm"
            return value, f"{(hour - 1) % 12 + 1}{self.rng.choice((' ', ''))}{half}"
        return value, text
