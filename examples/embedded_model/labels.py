"""Clauses that name a fact by its label: "the rent of X is Y", "Y, not Z, is the rent".

They fit every domain, since a label is a field's own key. For training alone.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from examples.embedded_model.clauses import Clauses
from examples.embedded_model.fillers import plain_words
from examples.embedded_model.templates import LIST_KINDS, Field

# {l} the label, {s} the subject, {v} the value, {w} another value that is wrong.
OF_SUBJECT = (
    "the {l} of {s} is {v}", "{s}'s {l} is {v}", "{v} is the {l} of {s}", "{v} is {s}'s {l}",
    "for {s}, the {l} is {v}", "{s} has {v} as {l}", "as {l}, {s} has {v}", "{s} has the {l} {v}",
    "the {l} {v} belongs to {s}", "we noted {v} as the {l} of {s}", "{s} ({l} {v}) was named",
    "the {l} of {s} reads {v}", "{s} goes with the {l} {v}", "{s}, {l} {v}, is on the list",
    "the old {l} of {s} was {w}, the new one is {v}", "{s}'s {l} is {v}, not {w}",
    "the {l} of {s} changed from {w} to {v}", "{s} swapped the {l} {w} for {v}",
    "{s} confirmed {v} as the {l}", "the file of {s} gives {v} as {l}",
    "{v} stands beside {s} as the {l}", "put {v} down as {l} of {s}",
)  # fmt: skip
OF_ITSELF = (
    "the {l} is {v}", "the {l} is still {v}", "{v} is the {l}", "with {v} as the {l}",
    "{l} {v}", "{l}: {v}", "{l} = {v}", "the {l}: {v}", "its {l} is {v}", "the {l} reads {v}",
    "use {v} as {l}", "for the {l} take {v}", "the {l} does not change: {v}",
    "{v} remains the {l}", "{v} as {l}", "the {l} was {w}, now it is {v}",
    "the {l} is {v}, no longer {w}", "not {w} but {v} is the {l}", "the {l} has become {v}",
    "nothing new about the {l} {v}", "write {v} where it says {l}", "({l} {v})", "{v} ({l})",
    "the {l} is given as {v}", "please keep {v} as {l}", "next comes the {l}, {v}",
)  # fmt: skip
SEVERAL = (
    "the {l} of {s} are {v}", "{s}'s {l} are {v}", "{v} are the {l} of {s}", "{s} has {v}",
    "{s} has the {l} {v}", "among the {l} of {s}: {v}", "for {s} we have {v}",
    "{s} comes with {v} as {l}", "{s}, {v}, was seen", "{s} ({v}) was named",
)  # fmt: skip
SEVERAL_ITSELF = (
    "the {l} are {v}", "{v} are the {l}", "the {l} include {v}", "{l}: {v}", "{l} {v}",
    "the {l} ({v}) are known", "as {l}, take {v}", "{v}: these are the {l}", "with {v} as {l}",
    "the list of {l} has {v}", "{v} were named as {l}", "nothing but {v}", "we count {v}",
    "both lists show {v}",
)  # fmt: skip
TRUTHS = (
    "{l}: {{{n}|yes|no}}", "{l}? {{{n}|Yes|No}}", "{l} = {{{n}|true|false}}",
    "{l} ({{{n}|yes|no}})",
    "{{{n}|with|without}} {l}", "the answer to {l} is {{{n}|yes|no}}", "{l} {{{n}|yes|no}}",
    "it is {{{n}|true|not true}} for {l}", "for {l}, we ticked {{{n}|yes|no}}",
    "the box for {l} is {{{n}|ticked|empty}}", "{l}: {{{n}|true|false}}",
)  # fmt: skip
# Keys that make no label, and what does not belong to a label.
NO_LABELS = frozenset(
    (
        *("from", "to", "via", "when", "serves", "about", "pay_by", "ordered_on", "reported_by"),
        *("assigned_to", "made_of", "in_stock", "in_production", "can_reproduce", "leaves_at"),
        *("lands_at", "starts_at", "reported_on", "created_at", "ship_to", "bill_to", "issued"),
        *("units_available", "will_rain", "created", "due", "minutes", "meat_free", "what"),
    )
)
PREFIXES = ("is_", "has_", "num_", "with_")
# Kinds that a list of bare values may hold one of each.
BARE = (
    "person", "email", "phone", "city", "date", "time", "firm", "thing", "title", "code", "brand",
    "job", "role", "hotel", "airline", "dishname", "list", "items", "foods", "street", "url",
    "enum", "flight", "symptom", "species", "model", "book",
)  # fmt: skip

# Kinds of value that can be told from the value itself, whatever stands around it.
TELLING = (
    "person", "email", "phone", "url", "date", "time", "enum", "code", "iban", "version", "flight",
    "list", "items", "foods",
)  # fmt: skip
GLUE = (
    *("of", "the", "for", "on", "with", "by", "at", "to", "and", "is", "was", "has", "from", "in"),
    *("about", "that", "as", "this", "still", "new", "old", "a", "will", "not", "but", "it", "we"),
    *("so", "who", "which", "then", "after", "before", "stays", "his", "her", "their", "our"),
)


def label(rng: Random, about: Field) -> str | None:
    """A noun for a field, from its keys; None where it has none."""
    usable = [key for key in about.keys if key not in NO_LABELS]
    if not usable:
        return None
    key = rng.choice(usable)
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key.replace("_", " ")


class Labelled:
    """Makes clauses from labels.

    Args:
        rng: Source of all choices.
        text_of: A filler's text by its kind: what a wrong value is drawn from.
    """

    def __init__(self, rng: Random, text_of: Callable[[str], str]) -> None:
        self.rng, self.text_of = rng, text_of

    def clause(self, clauses: Clauses, slot: str, with_subject: bool) -> str | None:
        """A clause that states ``slot``, about its subject or by itself."""
        about = clauses.domain.fields[slot]
        name = label(self.rng, about)
        if name is None:
            return None
        kind = about.kind.partition(":")[0]
        if kind == "bool":
            return self._truth(clauses, slot, name)
        if kind in LIST_KINDS:
            forms: tuple[str, ...] = SEVERAL if with_subject else SEVERAL_ITSELF
        else:
            forms = OF_SUBJECT if with_subject else OF_ITSELF
        form = self.rng.choice(forms)
        wrong = self.text_of(about.kind) if "{w}" in form else ""
        return form.format(l=name, s=f"{{{clauses.subject}}}", v=f"{{{slot}}}", w=wrong)

    def _truth(self, clauses: Clauses, slot: str, name: str) -> str:
        """A boolean: its question with the answer, or its label with yes or no."""
        asked = [
            q for q in clauses.questions
            if q.slot == slot and not q.negated and set(q.slots) <= {clauses.subject}
        ]  # fmt: skip
        if asked and self.rng.random() < 0.3:
            answer = self.rng.choice(("Yes|No", "yes|no", "Of course|Not at all", "Sure|Never"))
            return f"{self.rng.choice(asked).text} {{{slot}|{answer}}}"
        return self.rng.choice(TRUTHS).format(l=name, n=slot)

    def telegram(self, clauses: Clauses, slots: list[str]) -> str:
        """Values beside each other, most of them without a label."""
        parts, bare = [], set()
        for slot in slots:
            about = clauses.domain.fields[slot]
            kind = about.kind.partition(":")[0]
            name = label(self.rng, about)
            value = f"{{{slot}}}"
            if kind == "bool":
                parts.append(self._truth(clauses, slot, name or slot))
            elif kind == "int" and slot.endswith("s"):
                parts.append(f"{value} {slot}")
            elif (kind in BARE and kind not in bare) or name is None:
                bare.add(kind)
                parts.append(value)
            else:
                parts.append(f"{name} {value}")
        return self.rng.choice((", ", ", ", ", ", "; ", " - ", " / ", " | ", "\n")).join(parts)

    def loose(self, clauses: Clauses) -> str | None:
        """Values of different kinds, each to be known by its look, between words without sense."""
        kinds: dict[str, str] = {}
        for slot in self.rng.sample(list(clauses.domain.fields), len(clauses.domain.fields)):
            kind = clauses.domain.fields[slot].kind.partition(":")[0]
            if kind in TELLING and kind not in kinds:
                kinds[kind] = slot
        if not kinds:
            return None
        slots = list(kinds.values())[: self.rng.choice((1, 2, 2, 3, 3, 4))]
        pieces: list[str] = []
        for slot in slots:
            value, words = f"{{{slot}}}", self._words()
            if clauses.domain.fields[slot].kind.partition(":")[0] in LIST_KINDS:
                # Where a list begins and ends must be seen.
                value, words = f"{value}.", f"{words.rstrip(',;:.')}:" if words else ""
            pieces += [words, value]
        if self.rng.random() < 0.6:
            pieces.append(self._words())
        return " ".join(piece for piece in pieces if piece)

    def _words(self) -> str:
        """None to five words, most of them small ones, and perhaps a mark behind them."""
        words = [
            self.rng.choice(GLUE) if self.rng.random() < 0.6 else self.rng.choice(plain_words())
            for _ in range(self.rng.choice((0, 1, 2, 2, 3, 4, 5)))
        ]
        mark = self.rng.choice(("", "", "", "", ",", ";", ":", ".")) if words else ""
        return " ".join(words) + mark
