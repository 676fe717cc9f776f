"""What training draws its texts from: the wide mixture, and grammars that evaluation never uses.

Evaluation keeps to :mod:`mixed`, so that its cases stay the same whatever is added here.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from examples.embedded_model.anything import Anything
from examples.embedded_model.clauses import Clauses
from examples.embedded_model.fillers import Filler, read_lines
from examples.embedded_model.labels import Labelled
from examples.embedded_model.mixed import WideCases
from examples.embedded_model.relations import Relations, all_relations, capital, sentence, unused
from examples.embedded_model.templates import (
    Domain,
    Field,
    Template,
    drawn,
    parse_template,
)
from examples.embedded_model.wide import WideFillers

# Of grammar-made texts: those of relations and labels.
VARIED_SHARE = 0.65
PEOPLE = ("person", "guest", "customer")
OPENINGS = (
    "Update: ", "Note: ", "News: ", "Entry: ", "To file: ", "From my notes: ", "Reminder: ",
    "We heard that ", "It is said that ", "The list says: ", "Yesterday I learnt that ", "FYI, ",
    "Dear all, ", "Hello, ", "As you know, ", "In short: ", "Good news: ", "Short version: ",
)  # fmt: skip
JOINS = (". ", ". ", ". ", "; ", "; ", ", and ", " and ", ", while ", ", but ", "\n", " - ")
# Forms of a fact that is true or not: {s} the slot, {p} and {o} a word and its opposite, {n} a
# noun.
STATES = (
    "v is {{{s}|{p}|{o}}}", "v is {{{s}|{p}|not {p}}}", "v is {{{s}|very {p}|far from {p}}}",
    "v {{{s}|is still {p}|is no longer {p}}}", "a {{{s}|{p}|{o}}}", "v {{{s}|looks {p}|looks {o}}}",
    "s It {{{s}|is {p}|is {o}}}.", "s {P}: {{{s}|yes|no}}.", "v was found {{{s}|{p}|{o}}}",
    "s Is it {p}? {{{s}|Yes|No}}.", "s It is {{{s}|true|not true}} that it is {p}.",
    "s They call it {{{s}|{p}|{o}}}.", "p {{{s}|{p}|{o}}} as always",
    "s {{{s}|{p}|{o}}}, they say.",
    "v {{{s}|became {p}|became {o}}}", "v {{{s}|is said to be {p}|is anything but {p}}}",
)  # fmt: skip
THINGS = (
    "v has {{{s}|a {n}|no {n}}}", "v comes {{{s}|with|without}} a {n}",
    "a {{{s}|with|without}} {n}",
    "v {{{s}|offers a {n}|offers no {n}}}", "s There is {{{s}|a {n}|no {n}}}.",
    "v {{{s}|needs a {n}|needs no {n}}}", "s {N}: {{{s}|yes|no}}.",
    "s The {n} is {{{s}|included|not included}}.", "v {{{s}|includes|does not include}} a {n}",
    "s {{{s}|A {n} is there|A {n} is missing}}.", "v {{{s}|got a {n}|lost its {n}}}",
    "s Is there a {n}? {{{s}|Yes|No}}.", "v {{{s}|still has its {n}|never had a {n}}}",
    "p {{{s}|With|Without}} a {n}", "s We saw {{{s}|the {n}|no sign of a {n}}}.",
    "v lacks {{{s}|nothing, not even a {n}|a {n}}}",
)  # fmt: skip
RECORDS = (
    "{a} {w}", "{a} x {w}", "{a} of the {w}", "{w} ({a})", "{w} x{a}", "{w}: {a}", "{a} times {w}",
    "{a} pieces of {w}", "{a}x {w}", "{w} {a} times", "a pack of {a} {w}",
)  # fmt: skip

# Values of more than one word, of words without sense: {a} and {b}.
MADE_WORDS = {
    "symptom": (
        "does not {a}", "fails to {a}", "never {a}s", "is not {a}", "cannot {a}", "{a}s twice",
        "has no {a}", "{a}s the {b}", "does {a} but not {b}", "keeps {a}ing", "will not {a}",
    ),
    "software": ("{a} {b}", "{a} page", "{a} list", "{a} {b} box"),
    "food": ("{a} {b}", "{a} oil", "{a} milk", "dried {a}", "{a} and {b}"),
    "dish": ("{a} {b}", "{a} cake", "{a} rolls"),
    "noun": ("{a} {b}", "{a} set"),
}  # fmt: skip


@cache
def truths() -> tuple[tuple[str, str, str], ...]:
    """(word, its opposite or "" for a noun, key) of ``varied_facts.txt``."""
    found: list[tuple[str, str, str]] = []
    for line in read_lines("varied_facts.txt"):
        form, _, listed = line.partition(": ")
        for entry in listed.split(", "):
            words, _, key = entry.partition("/")
            word, _, opposite = words.partition("~")
            found.append((word, opposite if form == "state" else "", key or word))
    return tuple(found)


class VariedFillers(WideFillers):
    """Lists, records and addresses in more shapes than evaluation has."""

    def word(self, kind: str) -> str:
        if kind == "tld" and self.rng.random() < 0.6:
            letters = "abcdefghijklmnopqrstuvwxyz"
            return "".join(self.rng.choice(letters) for _ in range(self.rng.choice((2, 2, 3, 4))))
        if kind in MADE_WORDS and not self.held_out and self.rng.random() < 0.3:
            form = self.rng.choice(MADE_WORDS[kind])
            return form.format(a=self._plain_word(), b=self._plain_word())
        return super().word(kind)

    def _joined(self, texts: list[str]) -> str:
        if len(texts) == 1 or self.rng.random() < 0.55:
            return super()._joined(texts)
        rng = self.rng
        if len(texts) == 2 and rng.random() < 0.5:
            a, b = texts
            return rng.choice(
                (f"both {a} and {b}", f"{a} as well as {b}", f"{a} & {b}", f"{a} plus {b}",
                 f"{a} or {b}", f"first {a}, then {b}", f"{a} together with {b}")
            )  # fmt: skip
        last = rng.choice((" and also ", ", plus ", " & ", " or ", ", then ", " and finally "))
        if rng.random() < 0.5:
            return rng.choice(("; ", " / ", " + ", "/", " | ")).join(texts)
        return ", ".join(texts[:-1]) + last + texts[-1]

    def _records(self, words: list[str], unit: str, high: int) -> Filler:
        if unit == " g of " or self.rng.random() < 0.5:
            return super()._records(words, unit, high)
        rows, _ = super()._records(words, unit, high)
        form = self.rng.choice(RECORDS)
        texts = [form.format(a=row[max(row, key=_is_amount)], w=word) for row, word in
                 zip(rows, words, strict=True)]  # fmt: skip
        return rows, self._joined(texts)


def _is_amount(key: str) -> bool:
    return key in ("quantity", "count")


class VariedAnything(Anything):
    """Subjects that have facts which are true or not, too."""

    def make(self) -> Clauses:
        clauses = super().make()
        for word, opposite, key in self.rng.sample(truths(), self.rng.choice((0, 0, 1, 1, 2))):
            self.add_truth(clauses, word, opposite, key.replace(" ", "_"))
        return clauses

    def add_truth(self, clauses: Clauses, word: str, opposite: str, key: str) -> None:
        """A field that is true or not, with some of the forms that state it."""
        slot = f"is_{key}" if opposite else f"has_{key}"
        if slot in clauses.domain.fields or key in clauses.domain.fields:
            return
        clauses.domain.fields[slot] = Field(slot, "bool", (key, key, slot))
        forms, large = self.rng.sample(STATES if opposite else THINGS, 5), word.capitalize()
        clauses.add_forms(slot, forms, s=slot, p=word, o=opposite, n=word, N=large, P=large)


class VariedCases(WideCases):
    """Training cases: most grammar-made texts are of free word order or by labels.

    Args:
        rng: Source of all choices.
        held_out_fillers: Fill with values that training never saw.
    """

    def __init__(self, rng: Random, held_out_fillers: bool = False) -> None:
        super().__init__(rng, held_out_fillers)
        self.fillers = VariedFillers(rng, held_out_fillers)
        self.anything: VariedAnything = VariedAnything(rng)
        self.labelled = Labelled(rng, lambda kind: self.fillers.draw(kind)[1])

    def composed(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        if self.rng.random() > VARIED_SHARE:
            return super().composed(domain)
        return self.written(domain, self.varied(self.clauses[domain.name]))

    def template_about(self, made: Clauses) -> Template:
        """In free word order or not."""
        return self.varied(made) if self.rng.random() < 0.4 else super().template_about(made)

    def _nest(
        self, domain: Domain, values: dict[str, Any], schemas: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One object of some keys, and now and then a second one."""
        values, schemas = super()._nest(domain, values, schemas)
        flat = [key for key, value in values.items() if not isinstance(value, dict)]
        if len(flat) > 2 and self.rng.random() < 0.3:
            return super()._nest(domain, values, schemas)
        return values, schemas

    def varied(self, clauses: Clauses) -> Template:
        """A text of relations, of labels or of bare values."""
        return drawn(f"{clauses.domain.name}:varied", lambda: self._text(clauses))

    def _text(self, clauses: Clauses) -> str:
        relations = all_relations().get(clauses.domain.name)
        chance = self.rng.random()
        if chance < 0.12:
            return self._telegram(clauses)
        loose = self.labelled.loose(clauses) if chance < 0.24 else None
        if loose is not None:
            return f"{capital(loose)}{self.rng.choice(('.', '.', ''))}"
        used: set[str] = set()
        parts = self._related(relations, used) if relations and chance < 0.8 else []
        if not parts or self.rng.random() < 0.4:
            parts += self._by_labels(clauses, used)
        return self._joined(clauses, parts, used)

    def _related(self, relations: Relations, used: set[str]) -> list[str]:
        """One to three sentences of free order, and perhaps a boolean's clause."""
        parts = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3))):
            made = sentence(self.rng, relations, used)
            if made is not None:
                parts.append(made)
        for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
            truth = unused(self.rng, relations.booleans, used)
            if truth is not None:
                parts.insert(self.rng.randint(0, len(parts)), truth.text)
        return parts

    def _by_labels(self, clauses: Clauses, used: set[str]) -> list[str]:
        """One to four clauses by label; the first is about the subject where it is not named."""
        slots = [s for s in clauses.domain.fields if s not in used and s != clauses.subject]
        self.rng.shuffle(slots)
        parts = []
        for slot in slots[: self.rng.choice((1, 2, 2, 3, 4))]:
            about = clauses.subject not in used and self.rng.random() < 0.8
            made = self.labelled.clause(clauses, slot, about)
            if made is not None:
                parts.append(made)
                used |= set(parse_template("", made).slots)
        return parts

    def _joined(self, clauses: Clauses, parts: list[str], used: set[str]) -> str:
        """Clauses in one text; a person may speak of himself."""
        rng = self.rng
        subject = f"{{{clauses.subject}}}"
        kind = clauses.domain.fields[clauses.subject].kind
        start = rng.choice(OPENINGS) if rng.random() < 0.25 else ""
        end = ""
        if clauses.subject not in used and rng.random() < 0.5:
            if kind in PEOPLE and rng.random() < 0.5:
                end = rng.choice(("\n{}", " Yours, {}", " - {}", " Best regards, {}")).format(
                    subject
                )
            else:
                start = rng.choice(
                    ("{}: ", "About {}: ", "{} - ", "This is about {}. ", "Regarding {}, ", "{}. ")
                ).format(subject)
        text = ""
        for number, part in enumerate(parts):
            join = rng.choice(JOINS) if number else start
            bare = join.rstrip()
            opens = not bare or bare.endswith((".", ":")) or join == "\n"
            text += join + (capital(part) if opens else part)
        stop = "" if text.endswith("?") else "."
        return text + stop + end

    def _telegram(self, clauses: Clauses) -> str:
        """The subject and some facts, value beside value."""
        slots = [s for s in clauses.domain.fields if s != clauses.subject]
        chosen = self.rng.sample(slots, min(len(slots), self.rng.choice((1, 2, 2, 3, 3, 4))))
        if self.rng.random() < 0.8:
            chosen.insert(0, clauses.subject)
        else:
            chosen.insert(self.rng.randint(0, len(chosen)), clauses.subject)
        start = self.rng.choice(OPENINGS) if self.rng.random() < 0.2 else ""
        return start + self.labelled.telegram(clauses, chosen) + self.rng.choice((".", ".", ""))
