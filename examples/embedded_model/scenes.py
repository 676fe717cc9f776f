"""What happens between people, teams, places and things, a hundred times: for training alone.

The written domains teach a dozen kinds of text well. These teach that a key's value is the part of
the sentence that plays its role, whatever the sentence: each scene has verbs of its own, and all
of them share what any event has (a date, a place, a price, a reason). Evaluation draws nothing
from here, and no text of a scene shares four words in a row with one of evaluation's phrasings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from examples.embedded_model.cases import Case
from examples.embedded_model.clauses import Clauses
from examples.embedded_model.fillers import MONTHS, Filler, invented_word, read_lines
from examples.embedded_model.relations import Relations, sentence, unused
from examples.embedded_model.templates import (
    Domain,
    Field,
    Template,
    add_line,
    drawn,
    forbidden_grams,
    fresh_library,
    parse_template,
    part_of,
)
from examples.embedded_model.varied import VariedCases, VariedFillers, truths

FILES = ("varied_scenes.txt", "varied_scenes_more.txt", "varied_scenes_third.txt")
# Of the extractions: those of scenes.
SCENE_SHARE = 0.55
# Of the values of a kind that has patterns: those made by one.
PATTERN_SHARE = 0.55
SPAN_UNITS = ("minutes", "hours", "days", "weeks", "months", "years", "seconds", "nights")
NAMES = ("person", "team", "firm", "restaurant", "station", "athlete", "band", "school")
# Words that a sentence may begin with and a clause does not.
SMALL = ("It ", "That ", "There ", "The ", "We ", "This ", "All ")
_PIECE = re.compile(r"\{(\w+)\}")


@cache
def word_patterns() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Kind → (values, patterns of values) of ``varied_words.txt``."""
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for line in read_lines("varied_words.txt"):
        head, _, listed = line.partition(" ")
        kind, values = head[:-1], tuple(listed.split(", "))
        known, patterns = found.get(kind, ((), ()))
        found[kind] = (known, values) if head.endswith("+") else (values, patterns)
    return found


class SceneFillers(VariedFillers):
    """Names of teams, stations, repairs and the like; scores, salaries, spans and short dates."""

    def word(self, kind: str) -> str:
        if kind not in word_patterns():
            return super().word(kind)
        values, patterns = word_patterns()[kind]
        if not values or (patterns and self.rng.random() < PATTERN_SHARE):
            return self._of_pattern(self.rng.choice(patterns))
        return self.rng.choice(values)

    def _of_pattern(self, pattern: str) -> str:
        made = _PIECE.sub(lambda match: self._piece(match[1]), pattern.removeprefix("^"))
        if not pattern.startswith("^"):
            return made
        words = [w if w in ("and", "of") else w[:1].upper() + w[1:] for w in made.split(" ")]
        return " ".join(words)

    def _piece(self, name: str) -> str:
        if name.isdigit():
            return str(self.rng.randint(10 ** (len(name) - 1), 10 ** len(name) - 1))
        if name in ("L", "l"):
            return self._letter() if name == "L" else self._letter().lower()
        if name == "W":
            chosen = invented_word(self.rng) if self.rng.random() < 0.6 else self._plain_word()
            return chosen.capitalize()
        return self._plain_word() if name == "w" else str(self.draw(name)[1])

    def _score(self) -> Filler:
        high = self.rng.choice((6, 6, 6, 30, 120))
        a, b = self.rng.randint(0, high), self.rng.randint(0, high)
        value = f"{a}{self.rng.choice(('-', '-', '-', ':', ' to ', ' : '))}{b}"
        return value, value

    def _salary(self) -> Filler:
        value = self.rng.choice((self.rng.randint(18, 190) * 1000, self.rng.randint(900, 9900)))
        return value, f"{value:,}" if self.rng.random() < 0.5 else str(value)

    def _millions(self) -> Filler:
        amount = self.rng.choice((self.rng.randint(2, 900), self.rng.randint(11, 99) / 10))
        scale = self.rng.choice(("million", "million", "billion", "thousand"))
        value = self.rng.choice(
            (f"${amount} {scale}", f"{amount} {scale} euros", f"€{amount} {scale}",
             f"{amount} {scale} dollars", f"£{amount}m")
        )  # fmt: skip
        return value, value

    def _span(self) -> Filler:
        rng = self.rng
        value = f"{rng.randint(2, 90)} {rng.choice(SPAN_UNITS)}"
        if rng.random() < 0.35:
            value = rng.choice(
                (f"{rng.randint(1, 9)} h {rng.randint(10, 59)} min", f"{rng.randint(2, 59)} min",
                 "half an hour", "a week", "two weeks", "three days", "an hour", "the whole day",
                 self._of_pattern("{9}:{99}"), self._of_pattern("{99}.{99} s"),
                 "six months", "a year and a half", f"{rng.randint(2, 9)}.5 hours", "overnight")
            )  # fmt: skip
        return value, value

    def _short(self) -> Filler:
        """A date without a year, or a day named from today: kept as it is written."""
        rng = self.rng
        month, day = rng.choice(MONTHS), rng.randint(1, 28)
        value = rng.choice(
            (f"{day} {month}", f"{month} {day}", f"{month} {day}th", f"{day} {month[:3]}",
             f"{month[:3]} {day}", f"{self.word('weekday')}", "tomorrow", "next week",
             f"next {self.word('weekday')}", f"the {day}th", f"{day}.{rng.randint(1, 12)}.",
             f"{day}/{rng.randint(1, 12)}", f"{self.word('weekday')} {self.word('part_of_day')}",
             "today", "tonight", "this weekend", f"{self.word('weekday')}, {day} {month}",
             f"the {day}th of {month}", "yesterday")
        )  # fmt: skip
        return value, value

    def _timeslot(self) -> Filler:
        start = self.rng.randint(6, 19)
        end = start + self.rng.randint(1, 4)
        value = self.rng.choice(
            (f"{start}:00 and {end}:00", f"{start} and {end}", f"{start}:30 and {end}:30")
        )
        return value, value

    def _plate(self) -> Filler:
        forms = ("{L}{L}{99} {L}{L}{L}", "{L}-{L}{L} {999}", "{L}{L}{L} {999}", "{99}-{L}{L}-{99}")
        value = self._of_pattern(self.rng.choice(forms))
        return value, value

    def _dose(self) -> Filler:
        value = self._of_pattern(
            self.rng.choice(("{99} mg", "{999} mg", "{9}00 mg", "{9} drops", "{9} tablets",
                             "{9} ml", "{99} ml", "{9}0 mg", "one tablet", "{9} g"))
        )  # fmt: skip
        return value, value

    def _height(self) -> Filler:
        value = self._of_pattern(
            self.rng.choice(("{99} cm", "{9} metres", "{9}.{9} m", "{999} cm"))
        )
        return value, value


@dataclass
class Scene:
    """The sentence parts of one scene.

    Attributes:
        clauses: Its fields, and sentences that stand by themselves.
        relations: Cores, and what may stand behind them.
    """

    clauses: Clauses
    relations: Relations = field(default_factory=Relations)

    def add(self, kind: str, part: Template) -> None:
        """A part of kind h, t or s, unless a phrasing of evaluation says the same."""
        places = {"h": self.relations.cores, "t": self.relations.tails, "s": self.clauses.alone}
        if not part.grams() & kept_out_grams():
            places[kind].append(part)

    def take(self, fact: SharedFact) -> None:
        """Have a fact that any scene may have, where no field of the scene goes by its name."""
        fields = self.clauses.domain.fields
        if fact.about.slot not in fields:
            fields[fact.about.slot] = fact.about
            for kind, part in fact.parts:
                self.add(kind, part)

    def copy(self) -> Scene:
        """One to add facts to for one text."""
        domain = replace(self.clauses.domain, fields=dict(self.clauses.domain.fields))
        parts = self.relations
        return Scene(
            replace(self.clauses, domain=domain, aside=[], alone=list(self.clauses.alone)),
            replace(parts, tails=list(parts.tails)),
        )


@dataclass
class SharedFact:
    """A field that any scene may have, and its parts by kind."""

    about: Field
    parts: list[tuple[str, Template]] = field(default_factory=list)


@cache
def kept_out_grams() -> frozenset[tuple[str, ...]]:
    """Runs of four words of every phrasing that is kept for evaluation, fresh ones included."""
    fresh = (t for domain in fresh_library().domains for t in domain.held_out)
    return forbidden_grams().union(*(template.grams() for template in fresh))


@cache
def shared_facts() -> dict[str, SharedFact]:
    """The facts of ``varied_shared.txt`` by slot."""
    found: dict[str, SharedFact] = {}
    read = Domain("shared")
    for number, line in enumerate(read_lines("varied_shared.txt")):
        if line.startswith("@"):
            add_line(read, line, number)
            slot = line[1:].split()[0]
            found[slot] = SharedFact(read.fields[slot])
            continue
        kind, _, rest = line.partition(" ")
        found[slot].parts.append((kind, parse_template(f"shared:{number}", rest)))
    return found


@cache
def all_scenes() -> tuple[Scene, ...]:
    """Every scene of the files."""
    found: list[Scene] = []
    facts: list[tuple[Scene, list[str]]] = []
    for name in FILES:
        for number, line in enumerate(read_lines(name)):
            kind, _, rest = line.partition(" ")
            if kind == "=":
                title, _, listed = rest.partition(":")
                domain = Domain(title.replace("_", " "), groups=("details", "data", "info"))
                found.append(Scene(Clauses(domain, "", ("It",))))
                facts.append((found[-1], listed.split()))
                continue
            scene = found[-1]
            if kind.startswith("@"):
                add_line(scene.clauses.domain, line, number)
                scene.clauses.subject = scene.clauses.subject or kind[1:]
                continue
            scene.add(kind, part_of(scene.clauses.domain, f"{kind}{number}", rest))
    for scene, listed_facts in facts:
        for slot in listed_facts:
            scene.take(shared_facts()[slot])
    return tuple(found)


class SceneCases(VariedCases):
    """Training cases of scenes beside those of :class:`VariedCases`.

    Args:
        rng: Source of all choices.
        held_out_fillers: Fill with values that training never saw.
    """

    def __init__(self, rng: Random, held_out_fillers: bool = False) -> None:
        super().__init__(rng, held_out_fillers)
        self.fillers = SceneFillers(rng, held_out_fillers)
        self.scenes = all_scenes()
        self.names = {scene.clauses.domain.name for scene in self.scenes}

    def extraction(self) -> Case:
        """Of a scene, or of what training had before."""
        if self.rng.random() > SCENE_SHARE:
            return super().extraction()
        scene = self.rng.choice(self.scenes).copy()
        if self.rng.random() < 0.3:
            scene.take(self.rng.choice(list(shared_facts().values())))
        if self.rng.random() < 0.25:
            word, opposite, key = self.rng.choice(truths())
            self.anything.add_truth(scene.clauses, word, opposite, key.replace(" ", "_"))
            scene.relations.tails += scene.clauses.aside
        domain = scene.clauses.domain
        text, facts, _ = self.written(domain, self.scene_text(scene))
        document = self.distracted(domain, text)
        return self._asked(domain, document, facts, f"scene:{domain.name}")

    def scene_text(self, scene: Scene) -> Template:
        """A text of one to four sentences; its grams are none of evaluation's."""
        identity = f"scene:{scene.clauses.domain.name}"
        return drawn(identity, lambda: self._scene_text(scene), kept_out_grams())

    def _scene_text(self, scene: Scene) -> str:
        rng = self.rng
        if rng.random() < 0.06:
            return self._telegram(scene.clauses)
        used: set[str] = set()
        parts = [sentence(rng, scene.relations, used) or ""]
        for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
            if rng.random() < 0.55:
                alone = unused(rng, scene.clauses.alone, used)
                text = alone.text.rstrip(".") if alone else ""
                parts.append(text[:1].lower() + text[1:] if text.startswith(SMALL) else text)
            else:
                parts.append(sentence(rng, scene.relations, used) or "")
        if rng.random() < 0.15:
            parts += self._by_labels(scene.clauses, used)[:1]
        if rng.random() < 0.1:
            rng.shuffle(parts)
        return self._joined(scene.clauses, [part for part in parts if part], used)

    def _choose(self, domain: Domain, stated: list[str]) -> list[str]:
        """Of a scene: any number of the facts, in any order, now and then one that is missing."""
        if domain.name not in self.names:
            return super()._choose(domain, stated)
        chosen = list(stated)
        if self.rng.random() < 0.5:
            chosen = self.rng.sample(chosen, self.rng.randint(1, len(chosen)))
        elif self.rng.random() < 0.5:
            self.rng.shuffle(chosen)
        absent = [slot for slot in domain.fields if slot not in stated]
        if absent and self.rng.random() < 0.1:
            chosen.insert(self.rng.randint(0, len(chosen)), self.rng.choice(absent))
        return chosen

    def _key(self, field: Field, used: set[str]) -> str:
        """A key of the field, now and then in another spelling."""
        keys = [key for key in (*field.keys, field.slot) if key not in used]
        if not keys:
            keys = [f"{field.slot}_{len(used)}"]
        first = keys[0] if self.rng.random() < 0.4 else self.rng.choice(keys)
        chance = self.rng.random()
        if chance < 0.05:
            head, *rest = first.split("_")
            first = head + "".join(word.capitalize() for word in rest)
        elif chance < 0.09 and field.kind in NAMES and not first.endswith("name"):
            first = f"{first}_name"
        if first in used:
            first = keys[0]
        used.add(first)
        return first

    def _frame(self, domain: Domain, document: str, keys: list[str]) -> str:
        if domain.name in self.names and self.rng.random() < 0.4:
            return document
        return super()._frame(domain, document, keys)
