"""Yes/no, choice and short questions: about a text that is given, and about plain facts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from random import Random
from typing import Any

from examples.embedded_model.cases import compact
from examples.embedded_model.clauses import Question
from examples.embedded_model.fillers import Filler, read_lines, share_of
from examples.embedded_model.mixed import WideCases, with_articles
from examples.embedded_model.templates import Domain, parse_template

FEASTS = {
    "Christmas": (12, 25),
    "Christmas Day": (12, 25),
    "Christmas Eve": (12, 24),
    "New Year's Day": (1, 1),
    "New Year's Eve": (12, 31),
    "Valentine's Day": (2, 14),
    "Halloween": (10, 31),
    "Boxing Day": (12, 26),
    "Labour Day": (5, 1),
    "Women's Day": (3, 8),
}
# How a field of some kind may be asked for without its name.
WORDS = {
    "date": ("When is it?", "On which day?", "Which date is given?", "What day is it?"),
    "time": ("At what time?", "What time is it?", "Which time is given?"),
    "city": ("Where is it?", "In which city?", "Which city is mentioned?"),
    "email": ("What is the address to write to?", "Which e-mail address is given?"),
    "phone": ("Which number should I call?", "What is the number?"),
}
WORLD_ASKED = (
    "Is {thing} {quality}?",
    "Is {thing} {quality}? Answer yes or no.",
    "{thing}: {quality}?",
    "Is it true that {thing} is {quality}?",
    "Yes or no: is {thing} {quality}?",
    "Would you say {thing} is {quality}?",
    "True or false: {thing} is {quality}.",
)


# The examples that people see first: asked of the model, never shown to it.
KEPT_BACK = ("Is fire hot?", "Is water wet?", "When is Christmas 2024?")


def trainable(prompt: str) -> bool:
    """Whether a prompt may be trained on: a tenth is held out by hash."""
    return share_of(prompt) >= 0.1 and prompt not in KEPT_BACK


@dataclass(frozen=True)
class Choice:
    """A question with the words it can be answered by; ``answer`` is one of ``options``."""

    prompt: str
    options: tuple[str, ...]
    answer: str
    template_id: str


def compound(value: Any) -> bool:
    """Whether a value is no plain string or number."""
    return isinstance(value, (list, dict, bool)) or value is None


class Questions:
    """Draws questions.

    Args:
        rng: Source of all choices.
        held_out_fillers: Fill with values that training never saw.
        cases: What draws the texts, with the same ``rng``; by default the wide mixture.
    """

    def __init__(
        self, rng: Random, held_out_fillers: bool = False, cases: WideCases | None = None
    ) -> None:
        self.rng = rng
        self.cases = cases or WideCases(rng, held_out_fillers)
        self.world = [self._read_thing(line) for line in read_lines("world.txt")]

    @staticmethod
    def _read_thing(line: str) -> tuple[str, list[str], list[str]]:
        thing, _, rest = line.partition(": ")
        right, _, wrong = rest.partition(" ! ")
        return thing, right.split(", "), wrong.split(", ")

    def about_text(self) -> Choice:
        """A yes/no or choice question about a grammar-made text."""
        while True:
            domain = self.rng.choice(self.cases.domains)
            text, facts, identity = self.document(domain)
            kind = self.rng.random()
            if kind < 0.55:
                made = self._yes_or_no(domain, facts)
            elif kind < 0.85:
                made = self._of_values(domain, facts)
            else:
                made = self._compare(domain, facts)
            if made is not None:
                question, options, answer = made
                return Choice(self._joined(text, question, options), options, answer, identity)

    def document(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        """A text of ``domain``, two in three made by grammar: text, facts, id."""
        if domain in self.cases.older and self.rng.random() < 0.45:
            return self.cases._document(domain)
        text, facts, identity = self.cases.composed(domain)
        return self.cases.distracted(domain, text), facts, identity

    def _joined(self, text: str, question: str, options: tuple[str, ...]) -> str:
        chance = self.rng.random()
        if chance < 0.15 or "unknown" in options:
            question += f" Answer {' or '.join(options)}."
        elif chance < 0.25:
            question += f" ({'/'.join(options)})"
        elif chance < 0.3:
            question += f" Choose one of {', '.join(options)}."
        gap = self.rng.choice((" ", " ", "\n", "\n\n"))
        chance = self.rng.random()
        if chance < 0.45:
            return f"{question}{gap}{text}"
        if chance < 0.9:
            return f"{text}{gap}{question}"
        return f"Text: {text}\nQuestion: {question}"

    def _yes_or_no(
        self, domain: Domain, facts: dict[str, Filler]
    ) -> tuple[str, tuple[str, ...], str] | None:
        usable = [
            q for q in self.cases.clauses[domain.name].questions
            if all(s in facts for s in (*q.slots, *([q.slot] if q.slot else [])))
        ]  # fmt: skip
        subject = self.cases.clauses[domain.name].subject
        if subject in facts and self.rng.random() < 0.08:
            return self._not_stated(domain, facts, subject)
        booleans = [q for q in usable if q.slot]
        if not usable:
            return None
        asked = self.rng.choice(booleans if booleans and self.rng.random() < 0.6 else usable)
        if asked.slot:
            right = bool(facts[asked.slot][0]) != asked.negated
            wording = {slot: facts[slot][1] for slot in asked.slots}
        else:
            right, wording = self._perhaps_wrong(domain, facts, asked)
        question = parse_template("q", asked.text).filled(wording)
        return with_articles(question), ("yes", "no"), "yes" if right else "no"

    def _not_stated(
        self, domain: Domain, facts: dict[str, Filler], subject: str
    ) -> tuple[str, tuple[str, ...], str] | None:
        """A question whose answer the text does not give."""
        absent = []
        for question in self.cases.clauses[domain.name].questions:
            needed = {*question.slots, *([question.slot] if question.slot else [])} - {subject}
            if needed and not needed & set(facts):
                absent.append(question)
        if not absent:
            return None
        asked = self.rng.choice(absent)
        kinds = {s: domain.fields[s].kind for s in asked.slots}
        wording = {
            s: facts[s][1] if s in facts else self.cases.fillers.draw(kinds[s])[1] for s in kinds
        }
        text = parse_template("q", asked.text).filled(wording)
        return with_articles(text), ("yes", "no", "unknown"), "unknown"

    def _perhaps_wrong(
        self, domain: Domain, facts: dict[str, Filler], asked: Question
    ) -> tuple[bool, dict[str, str]]:
        wording = {slot: facts[slot][1] for slot in asked.slots}
        if self.rng.random() < 0.5:
            return True, wording
        subject = self.cases.clauses[domain.name].subject
        changed = self.rng.choice([s for s in asked.slots if s != subject] or list(asked.slots))
        for _ in range(10):
            value, other = self.cases.fillers.draw(domain.fields[changed].kind)
            if value != facts[changed][0]:
                return False, {**wording, changed: other}
        return True, wording

    def _of_values(
        self, domain: Domain, facts: dict[str, Filler]
    ) -> tuple[str, tuple[str, ...], str] | None:
        """Which of a few words is the value of a field."""
        enums = [s for s in facts if domain.fields[s].kind.startswith("enum:")]
        plain = [s for s, (value, _) in facts.items() if isinstance(value, str) and s not in enums]
        if enums and (self.rng.random() < 0.7 or not plain):
            slot = self.rng.choice(enums)
            options = tuple(domain.fields[slot].kind.partition(":")[2].split("|"))
        elif plain:
            slot = self.rng.choice(plain)
            others = [v for s, (v, _) in facts.items() if s != slot and isinstance(v, str)]
            kind = domain.fields[slot].kind
            others += [self.cases.fillers.draw(kind)[0] for _ in range(self.rng.randint(1, 3))]
            pool = list(dict.fromkeys(v for v in others if v != facts[slot][0]))
            chosen = self.rng.sample(pool, min(len(pool), self.rng.randint(1, 3)))
            chosen.append(facts[slot][0])
            self.rng.shuffle(chosen)
            options = tuple(chosen)
        else:
            return None
        label = self.label(domain, slot)
        asked = self.rng.choice(
            (
                f"What is the {label}?", f"Which {label}?", f"What {label} is it?",
                f"Which {label} is mentioned?", f"Give the {label}.", f"{label.capitalize()}?",
                f"Classify the {label}.", f"Say the {label}.", f"What is given as {label}?",
            )
        )  # fmt: skip
        return asked, options, facts[slot][0]

    def _compare(
        self, domain: Domain, facts: dict[str, Filler]
    ) -> tuple[str, tuple[str, ...], str] | None:
        slots = [
            s for s, (v, _) in facts.items() if isinstance(v, (int, float)) and not compound(v)
        ]
        if not slots:
            return None
        slot = self.rng.choice(slots)
        value, limit = facts[slot][0], self.cases.fillers.draw(domain.fields[slot].kind)[0]
        if value == limit:
            return None
        label, more = self.label(domain, slot), self.rng.random() < 0.5
        word = self.rng.choice(
            ("more than", "above", "over") if more else ("less than", "below", "under")
        )
        question = f"Is the {label} {word} {compact(limit)}?"
        return question, ("yes", "no"), "yes" if (value > limit) == more else "no"

    def label(self, domain: Domain, slot: str) -> str:
        """A name of a field in words."""
        return self.rng.choice(domain.fields[slot].keys).replace("_", " ")

    def short(self) -> tuple[str, str]:
        """One field of a text asked for, answered by its bare value: (prompt, answer)."""
        while True:
            domain = self.rng.choice(self.cases.domains)
            text, facts, _ = self.document(domain)
            plain = [s for s, (value, _) in facts.items() if not compound(value)]
            if plain:
                break
        slot = self.rng.choice(plain)
        label = self.label(domain, slot)
        asked = self.rng.choice(
            (
                f"What is the {label}?", f"Give only the {label}.", f"Which {label} is it?",
                f"{label.capitalize()}?", f"Tell me the {label}.", f"Only the {label}, please.",
                f"Find the {label}.", f"Return the {label} and nothing else.",
            )
        )  # fmt: skip
        kind = domain.fields[slot].kind
        alone = [domain.fields[s].kind for s in facts].count(kind) == 1
        if kind in WORDS and alone and self.rng.random() < 0.4:
            asked = self.rng.choice(WORDS[kind])
        gap = self.rng.choice((" ", " ", "\n"))
        prompt = f"{asked}{gap}{text}" if self.rng.random() < 0.5 else f"{text}{gap}{asked}"
        value = facts[slot][0]
        return prompt, value if isinstance(value, str) else compact(value)

    def about_the_world(self) -> Choice:
        """A yes/no question about a plain fact; a tenth of the wordings is held out by hash."""
        while True:
            thing, right, wrong = self.rng.choice(self.world)
            answer = self.rng.random() < 0.5
            quality = self.rng.choice(right if answer else wrong)
            asked = self.rng.choice(WORLD_ASKED).format(thing=thing, quality=quality)
            asked = asked[0].upper() + asked[1:]
            if trainable(asked):
                break
        words = ("true", "false") if asked.startswith("True") else ("yes", "no")
        return Choice(asked, words, words[0 if answer else 1], "world")

    def feast(self) -> tuple[str, str]:
        """The date of a day that is the same every year: (prompt, ISO date)."""
        while True:
            name, (month, day) = self.rng.choice(list(FEASTS.items()))
            year = self.rng.randint(1990, 2040)
            asked = self.rng.choice(
                ("When is {} {}?", "What date is {} {}?", "Give the date of {} {}.", "{} {}?")
            ).format(name, year)
            if trainable(asked):
                return asked, date(year, month, day).isoformat()
