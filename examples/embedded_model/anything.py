"""Subjects that no file of phrasings has: any noun with facts of any kind, made on the spot.

What the written domains cannot teach is that a key may be any word. Here the keys are drawn from
some hundreds of nouns, and each is stated in the forms that its kind of value takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from examples.embedded_model.clauses import Clauses
from examples.embedded_model.fillers import invented_word, read_lines
from examples.embedded_model.templates import Domain, Field

# Place in a sentence (see clauses.txt), and the form: {n} is the noun, {v} its value, {u} a unit.
FORMS: dict[str, tuple[str, ...]] = {
    "count": (
        "v has {v} {n}", "v has {v} {n}", "v holds {v} {n}", "v comes with {v} {n}",
        "v counts {v} {n}", "v needs {v} {n}", "a with {v} {n}", "s There are {v} {n}.",
        "s The number of {n} is {v}.", "s {N}: {v}.", "p With its {v} {n}", "v lost {v} {n}",
        "s We counted {v} {n}.", "s All {v} {n} are in use.",
    ),
    "label": (
        "v is in {n} {v}", "v is at {n} {v}", "v has {n} {v}", "v has the {n} {v}",
        "v starts in {n} {v}", "a in {n} {v}", "a {n} {v}", "s The {n} is {v}.", "s {N}: {v}.",
        "s {N} {v}.", "p In {n} {v}", "v goes to {n} {v}", "v belongs to {n} {v}",
        "s Please note {n} {v}.", "v can be found under {n} {v}",
    ),
    "attribute": (
        "v has a {v} {n}", "v shows {v} as its {n}", "s The {n} is {v}.", "s Its {n} is {v}.",
        "s {N}: {v}.", "a with a {v} {n}", "v is known for its {v} {n}", "v is {v}",
        "v has {v} as its {n}", "s As for the {n}, it is {v}.", "a of the {n} {v}",
        "v changed its {n} to {v}", "s The {n} was {v} yesterday.", "v is a case of {v}",
    ),
    "name": (
        "s The {n} is {v}.", "s Its {n} is {v}.", "s {N}: {v}.", "v has {v} as its {n}",
        "a {n} {v}", "s {v} is the {n}.", "v was shown to the {n}, {v}", "v has a {n}, {v}",
        "s Ask {v}, the {n}.", "s We thank {v}, our {n}.", "v chose {v} as {n}",
    ),
    "measure": (
        "v has a {n} of {v} {u}", "s The {n} is {v} {u}.", "s Its {n} is {v} {u}.",
        "s {N}: {v} {u}.", "a with a {n} of {v} {u}", "v reaches a {n} of {v} {u}",
        "s A {n} of {v} {u} was measured.", "s {N} {v} {u}.",
    ),
    "price": (
        "v has a {n} of ${v}", "s The {n} is {v} euros.", "s {N}: {v}.", "s The {n} is ${v}.",
        "a with a {n} of {v} dollars", "s The {n} was set at {v}.", "s {N} {v} EUR.",
    ),
    "moment": (
        "s The {n} is {v}.", "s The {n} is on {v}.", "s The {n} is at {v}.", "s {N}: {v}.",
        "a {n} {v}", "v has its {n} on {v}", "s {N} {v}.", "s The {n} was moved to {v}.",
    ),
    "reach": (
        "s The {n} is {v}.", "s {N}: {v}.", "v has the {n} {v}", "a {n} {v}",
        "s Write or call: {v}.", "s More at {v}.", "v can be reached at {v}",
        "s You can reach us at {v}.", "s Use {v} for questions.",
        "s You can write to {v} any time.",
    ),
    "many": (
        "v has {v}", "v sells {v}", "v offers {v}", "v needs {v}", "s The {n} are {v}.",
        "s {N}: {v}.", "v has the {n} {v}", "a with {v}", "s Its {n} are {v}.", "v brought {v}",
        "s There are {v}.", "v lists {v} as its {n}", "s Among the {n} are {v}.",
    ),
}  # fmt: skip
# A value of these may stand without its noun, so only one of a kind is in a text.
ALONE = ("attribute", "reach", "many")


@dataclass(frozen=True)
class Noun:
    """A fact that anything may have: how it is stated, its filler kind, its words and its key."""

    form: str
    kind: str
    words: str
    key: str
    unit: str = ""


@cache
def nouns() -> tuple[tuple[str, ...], dict[str, tuple[Noun, ...]]]:
    """(subjects, form → its nouns) of ``anything.txt``."""
    subjects: tuple[str, ...] = ()
    found: dict[str, list[Noun]] = {form: [] for form in FORMS}
    for line in read_lines("anything.txt"):
        head, _, listed = line.partition(": ")
        if head == "subject":
            subjects = tuple(listed.split(", "))
            continue
        form, kind = head.split(" ")
        for entry in listed.split(", "):
            words, slash, key = entry.rpartition("/")
            unit = ""
            if not slash:
                words = key = entry
            if form == "measure":
                words, _, unit = words.partition(" ")
            found[form].append(Noun(form, kind, words, key, unit))
    return subjects, {form: tuple(each) for form, each in found.items()}


class Anything:
    """Makes domains of one text each.

    Args:
        rng: Source of all choices.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def make(self) -> Clauses:
        """A subject with three to seven facts: its fields, and sentence parts that state them."""
        subjects, by_form = nouns()
        rng = self.rng
        title = rng.choice(subjects) if rng.random() < 0.8 else invented_word(rng).lower()
        domain = Domain(title)
        clauses = Clauses(domain, "subject", ("It",), article=rng.random() < 0.75)
        kind = "enum:" + title
        if not clauses.article:
            kind = rng.choice(("brand", "firm", "venue", "title", "first", "person"))
        names = (title.replace(" ", "_") + "_name", "name", "name", "title")
        keys = ("subject", "what", "kind") if clauses.article else names
        domain.fields["subject"] = Field("subject", kind, keys)
        if rng.random() < 0.5:
            domain.groups = (rng.choice(("details", "facts", "info", "data")),)
        used = {"name", "title", "subject", "what", "kind"}
        alone: set[str] = set()
        for form in rng.choices(list(FORMS), (5, 4, 5, 4, 2, 1, 2, 2, 2), k=rng.randint(3, 7)):
            noun = rng.choice(by_form[form])
            if noun.key in used or form in alone:
                continue
            used.add(noun.key)
            if form in ALONE:
                alone.add(form)
            self._add(clauses, noun)
        return clauses

    def _add(self, clauses: Clauses, noun: Noun) -> None:
        """A field of ``noun``, with some of the forms that state it."""
        rng = self.rng
        slot, words, key = noun.key, noun.words, noun.key
        if noun.form != "count" and rng.random() < 0.1:
            # A word that no list has is a key too.
            words = key = slot = invented_word(rng).lower()
        keys = [key, key, key]
        if noun.form == "count":
            keys += [f"{key}_count", f"number_of_{key}"]
        elif noun.unit and noun.unit.isalpha():
            keys.append(f"{key}_{noun.unit.lower()}")
        kind = f"list:{noun.kind}" if noun.form == "many" else noun.kind
        clauses.domain.fields[slot] = Field(slot, kind, tuple(dict.fromkeys(keys)))
        forms = rng.sample(FORMS[noun.form], 4)
        filled = {"n": words, "N": words.capitalize(), "v": f"{{{slot}}}", "u": noun.unit}
        clauses.add_forms(slot, forms, **filled)
