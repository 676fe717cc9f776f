"""Texts by grammar: sentences put together from parts about one field each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from examples.embedded_model.fillers import read_lines
from examples.embedded_model.templates import (
    Domain,
    Template,
    add_line,
    drawn,
    forbidden_grams,
    library,
    parse_template,
    part_of,
)

FILES = ("clauses.txt", "clauses_more.txt")
# Domains whose subject is a common noun.
WITH_ARTICLE = ("products", "jobs")


@dataclass(frozen=True)
class Question:
    """A yes/no question: about a boolean field ``slot``, or whether its fillers are the text's."""

    text: str
    slots: tuple[str, ...]
    slot: str | None = None
    negated: bool = False


@dataclass
class Clauses:
    """The sentence parts of one domain, by the place where they may stand.

    Attributes:
        subject: The slot that sentences are about.
        follow, aside, front, alone: Parts behind the subject, between commas behind it, in front
            of it, and whole sentences.
        article: Whether the subject is a common noun.
    """

    domain: Domain
    subject: str
    pronouns: tuple[str, ...]
    follow: list[Template] = field(default_factory=list)
    aside: list[Template] = field(default_factory=list)
    front: list[Template] = field(default_factory=list)
    alone: list[Template] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    article: bool = False

    def add(self, place: str, part: Template) -> None:
        """A part for place v, a, p or s, unless a held-out phrasing says the same."""
        places = {"v": self.follow, "a": self.aside, "p": self.front, "s": self.alone}
        if not part.grams() & forbidden_grams():
            places[place].append(part)

    def add_forms(self, slot: str, forms: Iterable[str], **words: str) -> None:
        """Parts that state ``slot``, of forms that are a place and a text with ``words``."""
        for form in forms:
            place, _, text = form.partition(" ")
            identity = f"{self.domain.name}:{slot}"
            self.add(place, parse_template(identity, text.format(**words)))


def _question(line: str) -> Question:
    text, _, about = line.partition(" | ")
    slots = parse_template("question", text).slots
    return Question(text, slots, about.lstrip("!") or None, about.startswith("!"))


@cache
def all_clauses() -> dict[str, Clauses]:
    """The grammar of every domain, by the domain's name."""
    known = {domain.name: domain for domain in library().domains}
    found: dict[str, Clauses] = {}
    current: Clauses | None = None
    for name in FILES:
        for number, line in enumerate(read_lines(name)):
            kind, _, rest = line.partition(" ")
            if kind == "=":
                names, _, pronouns = rest.partition(" | ")
                title, subject = names.split()
                domain = known.setdefault(title, Domain(title))
                current = found[title] = Clauses(
                    domain, subject, tuple(pronouns.split(", ")), article=title in WITH_ARTICLE
                )
                continue
            assert current is not None
            if kind[0] in "@%":
                add_line(current.domain, line, number)
                continue
            if kind == "q":
                current.questions.append(_question(rest))
                continue
            current.add(kind, part_of(current.domain, f"{kind}{number}", rest))
    return found


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


class Composer:
    """Puts sentence parts together to the template of a text.

    Args:
        rng: Source of all choices.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def compose(self, clauses: Clauses, most: int = 6) -> Template:
        """A text about one subject; no four words in a row are those of a held-out phrasing."""
        return drawn(f"{clauses.domain.name}:clauses", lambda: self._text(clauses, most))

    def _text(self, clauses: Clauses, most: int) -> str:
        count = self.rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, most))
        follow, aside, front, alone = self._pick(clauses, count)
        subject = f"{{{clauses.subject}}}"
        if clauses.article and self.rng.random() < 0.7:
            subject = f"{self.rng.choice(('The', 'The', 'This', 'Our'))} {subject}"
        named = subject
        if aside:
            named += f", {', '.join(aside)},"
        first: list[str] = []
        if follow:
            size = min(len(follow), self.rng.choice((1, 1, 2, 2, 3)))
            body = f"{named} {_listed(follow[:size])}."
            first, follow = [f"{front}, {body}" if front else body], follow[size:]
        elif aside:
            opening = self.rng.choice(("This is", "We talk about", "It is about", "Meet"))
            first = [f"{opening} {named.rstrip(',')}."]
        else:
            label = self.rng.choice(clauses.domain.fields[clauses.subject].keys).replace("_", " ")
            first = [
                self.rng.choice(
                    (f"{label.capitalize()}: {subject}.", f"This is {subject}.", f"{subject}.")
                )
            ]
        later: list[str] = []
        pronoun = self.rng.choice(clauses.pronouns)
        while follow:
            size = min(len(follow), self.rng.choice((1, 1, 2)))
            name = subject if pronoun == "They" or self.rng.random() < 0.3 else pronoun
            also = " also" if later and self.rng.random() < 0.1 else ""
            later.append(f"{name}{also} {_listed(follow[:size])}.")
            follow = follow[size:]
        later += alone
        self.rng.shuffle(later)
        if alone and self.rng.random() < 0.12:
            first, later = [later[0], *first], later[1:]
        separator = "\n" if self.rng.random() < 0.08 else " "
        return separator.join([*first, *later])

    def _pick(
        self, clauses: Clauses, count: int
    ) -> tuple[list[str], list[str], str | None, list[str]]:
        """Parts that state different fields: behind, aside, in front, alone."""
        pool = [("v", t) for t in clauses.follow] + [("s", t) for t in clauses.alone]
        pool += [("a", t) for t in clauses.aside] + [("p", t) for t in clauses.front]
        self.rng.shuffle(pool)
        used = {clauses.subject}
        chosen: dict[str, list[str]] = {"v": [], "a": [], "p": [], "s": []}
        limits = {"v": 9, "a": 1 + (self.rng.random() < 0.3), "p": 1, "s": 9}
        for kind, part in pool:
            slots = set(part.slots) - {clauses.subject}
            if count and not slots & used and len(chosen[kind]) < limits[kind]:
                chosen[kind].append(part.text)
                used |= slots
                count -= 1
        if chosen["p"] and not chosen["v"]:
            chosen["p"] = []
        return chosen["v"], chosen["a"], next(iter(chosen["p"]), None), chosen["s"]
