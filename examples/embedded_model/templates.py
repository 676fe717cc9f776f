"""Domains, templates and their split into training and held-out phrasings.

File format of ``phrasings/<domain>.txt``: ``@slot kind key synonyms`` declares a field,
``%group names`` the names of a nested object, ``+ text`` a sentence about one or two fields that
is combined with others, any other line a whole document. ``{slot}`` is a filler and
``{slot|text if true|text if false}`` a boolean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from examples.embedded_model.fillers import read_lines, share_of

DOMAINS = (
    *("people", "orders", "events", "bookings", "products", "weather"),
    *("contacts", "addresses", "tickets", "invoices", "travel", "recipes"),
)
# Kinds of field whose values are lists.
LIST_KINDS = ("list", "persons", "ilist", "nlist", "items", "foods")
HELD_OUT_SHARE = 0.07
FRAME_HELD_OUT_SHARE = 0.15
TRIES = 20
_SLOT = re.compile(r"\{(\w+)(?:\|([^|{}]*)\|([^|{}]*))?\}")


@dataclass(frozen=True)
class Field:
    """A fact that a domain's texts can state: its filler kind and the keys it may go by."""

    slot: str
    kind: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Plain text, or a slot with its two wordings where it is a boolean."""

    text: str = ""
    slot: str = ""
    wordings: tuple[str, str] | None = None


@dataclass(frozen=True)
class Template:
    """One phrasing: ``id`` names its file and line, ``slots`` the fields it states in order."""

    id: str
    text: str
    parts: tuple[Part, ...]
    slots: tuple[str, ...]

    def grams(self, n: int = 4) -> set[tuple[str, ...]]:
        """Runs of ``n`` words, lower case, over the template without its fillers."""
        found: set[tuple[str, ...]] = set()
        for choice in (0, 1):
            plain = " ".join(
                part.wordings[choice] if part.wordings else part.text for part in self.parts
            )
            words = re.findall(r"[^\W_]+(?:'\w+)?", plain.lower())
            found.update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        return found

    def filled(self, texts: Mapping[str, str]) -> str:
        """The text with a slot's own in place of each slot; there are no booleans."""
        return "".join(texts[part.slot] if part.slot else part.text for part in self.parts)


@dataclass
class Domain:
    """A subject with its fields and its templates, training and held-out ones apart."""

    name: str
    description: str = ""
    fields: dict[str, Field] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    whole: list[Template] = field(default_factory=list)
    facts: list[Template] = field(default_factory=list)
    held_out: list[Template] = field(default_factory=list)


@dataclass(frozen=True)
class Library:
    """All templates: extraction domains, tools, and the frames that requests put around them."""

    domains: tuple[Domain, ...]
    tools: tuple[Domain, ...]
    frames: tuple[Template, ...]
    held_out_frames: tuple[Template, ...]

    def training(self) -> Iterable[Template]:
        """Every template that training may use."""
        for domain in (*self.domains, *self.tools):
            yield from domain.whole
            yield from domain.facts
        yield from self.frames

    def held_out(self) -> Iterable[Template]:
        """Every template that is kept for evaluation."""
        for domain in (*self.domains, *self.tools):
            yield from domain.held_out
        yield from self.held_out_frames


def parse_template(identity: str, text: str) -> Template:
    """A Template from its line in a phrasings file."""
    text = text.replace("\\n", "\n")
    parts: list[Part] = []
    slots: list[str] = []
    end = 0
    for match in _SLOT.finditer(text):
        if match.start() > end:
            parts.append(Part(text=text[end : match.start()]))
        slot, true, false = match.groups()
        parts.append(Part(slot=slot, wordings=None if true is None else (true, false)))
        if slot not in slots:
            slots.append(slot)
        end = match.end()
    if end < len(text):
        parts.append(Part(text=text[end:]))
    return Template(identity, text, tuple(parts), tuple(slots))


def part_of(domain: Domain, identity: str, text: str) -> Template:
    """A template that states fields of ``domain``.

    Raises:
        ValueError: It names a field that the domain does not declare.
    """
    made = parse_template(f"{domain.name}:{identity}", text)
    unknown = set(made.slots) - set(domain.fields)
    if unknown:
        raise ValueError(f"{made.id} names fields that are not declared: {unknown}")
    return made


def add_line(domain: Domain, line: str, number: int) -> None:
    """Read one line of a phrasings file into ``domain``."""
    if line.startswith("@"):
        slot, kind, *keys = line[1:].split()
        # Enumerated values and list kinds may hold spaces: the keys are the last words.
        if kind.startswith("enum:"):
            *rest, last = line[1:].split("|")
            tail = last.split(" ")
            values = [*rest, tail[0]]
            values[0] = values[0].split(":", 1)[1]
            kind, keys = "enum:" + "|".join(values), tail[1:]
        domain.fields[slot] = Field(slot, kind, tuple(keys))
    elif line.startswith("%"):
        domain.groups = tuple(line[1:].split())
    else:
        fact = line.startswith("+ ")
        template = part_of(domain, str(number), line.removeprefix("+ "))
        if fact:
            domain.facts.append(template)
        elif share_of(template.text) < HELD_OUT_SHARE:
            domain.held_out.append(template)
        else:
            domain.whole.append(template)


def _read_domain(name: str) -> Domain:
    domain = Domain(name)
    for number, line in enumerate(read_lines(f"{name}.txt")):
        add_line(domain, line, number)
    return domain


def _read_tools() -> list[Domain]:
    tools: list[Domain] = []
    for number, line in enumerate(read_lines("tools.txt")):
        if line.startswith("= "):
            names, _, description = line[2:].partition(" | ")
            tool_names = tuple(names.split())
            tools.append(Domain(tool_names[0], description, names=tool_names))
        else:
            add_line(tools[-1], line, number)
    return tools


@cache
def library() -> Library:
    """The library, with every training template dropped that shares four words in a row with a
    held-out one."""
    domains = [_read_domain(name) for name in DOMAINS]
    tools = _read_tools()
    frames = [parse_template(f"frame:{i}", t) for i, t in enumerate(read_lines("frames.txt"))]
    held_frames = [f for f in frames if f.grams(2) and share_of(f.text) < FRAME_HELD_OUT_SHARE]
    kept_frames = [f for f in frames if f not in held_frames]
    everything = Library(tuple(domains), tuple(tools), tuple(kept_frames), tuple(held_frames))
    forbidden = set().union(*(template.grams() for template in everything.held_out()))
    for domain in (*domains, *tools):
        domain.whole = [t for t in domain.whole if not t.grams() & forbidden]
        domain.facts = [t for t in domain.facts if not t.grams() & forbidden]
    kept_frames = [f for f in kept_frames if not f.grams() & forbidden]
    return Library(tuple(domains), tuple(tools), tuple(kept_frames), tuple(held_frames))


@cache
def fresh_library() -> Library:
    """The library with the phrasings of ``fresh.txt`` for held-out ones; no tools."""
    known = {domain.name: domain for domain in library().domains}
    held: dict[str, list[Template]] = {}
    name = ""
    for number, line in enumerate(read_lines("fresh.txt")):
        if line.startswith("= "):
            name = line.removeprefix("= ")
            held[name] = []
            continue
        held[name].append(part_of(known[name], f"fresh{number}", line))
    domains = tuple(replace(known[name], held_out=held[name]) for name in held)
    return replace(library(), domains=domains, tools=())


@cache
def forbidden_grams() -> frozenset[tuple[str, ...]]:
    """The runs of four words of the held-out templates: nothing in training may hold one."""
    return frozenset().union(*(template.grams() for template in library().held_out()))


def drawn(
    identity: str, text: Callable[[], str], forbidden: frozenset[tuple[str, ...]] | None = None
) -> Template:
    """The first of some texts that states a fact and holds none of the forbidden runs of words.

    Args:
        text: Draws one.
        forbidden: By default those of :func:`forbidden_grams`.

    Raises:
        ValueError: All of them do.
    """
    for _ in range(TRIES):
        made = parse_template(identity, text())
        if made.slots and not made.grams() & (forbidden or forbidden_grams()):
            return made
    raise ValueError(f"{identity}: every text shares words with a held-out one")
