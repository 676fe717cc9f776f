"""Sentences with free word order: a core, and parts that may stand behind it or in front of it.

What :mod:`clauses` makes is always "subject, predicate"; here any fact may be the subject, and the
order of the others is drawn. For training alone: evaluation draws nothing from this grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from examples.embedded_model.clauses import all_clauses
from examples.embedded_model.fillers import read_lines
from examples.embedded_model.templates import Template, forbidden_grams, part_of

BEHIND = (" ", " ", " ", " ", ", ")


@dataclass
class Relations:
    """Sentence parts of one domain.

    Attributes:
        cores: What a sentence is built around.
        tails: What may stand behind a core, or in front of it before a comma.
        booleans: Boolean fields as clauses of their own.
    """

    cores: list[Template] = field(default_factory=list)
    tails: list[Template] = field(default_factory=list)
    booleans: list[Template] = field(default_factory=list)


@cache
def all_relations() -> dict[str, Relations]:
    """The parts of every written domain, by its name."""
    found: dict[str, Relations] = {}
    name = ""
    for number, line in enumerate(read_lines("varied_relations.txt")):
        kind, _, rest = line.partition(" ")
        if kind == "=":
            name = rest
            found[name] = Relations()
            continue
        part = part_of(all_clauses()[name].domain, f"{kind}{number}", rest)
        made = found[name]
        places = {"h": made.cores, "t": made.tails, "b": made.booleans}
        if not part.grams() & forbidden_grams():
            places[kind].append(part)
    return found


def capital(text: str) -> str:
    """``text`` with its first letter in upper case, a boolean's in both wordings; else a slot is
    left as it is."""
    first, bar, rest = text.partition("|")
    if text.startswith("{") and bar and "}" not in first:
        true, _, other = rest.partition("|")
        return f"{first}|{true[:1].upper()}{true[1:]}|{other[:1].upper()}{other[1:]}"
    return text[:1].upper() + text[1:]


def unused(rng: Random, parts: Sequence[Template], used: set[str]) -> Template | None:
    """One of ``parts`` that states no field of ``used``; its fields are added there."""
    usable = [part for part in parts if not used & set(part.slots)]
    if not usable:
        return None
    part = rng.choice(usable)
    used.update(part.slots)
    return part


def sentence(rng: Random, parts: Relations, used: set[str]) -> str | None:
    """A sentence without its stop about fields that are not in ``used``, which are added there."""
    core = unused(rng, parts.cores, used)
    if core is None:
        return None
    tails = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        tail = unused(rng, parts.tails, used)
        if tail is not None:
            tails.append(tail.text)
    front = f"{tails.pop()}, " if tails and rng.random() < 0.3 else ""
    return front + core.text + "".join(rng.choice(BEHIND) + tail for tail in tails)
