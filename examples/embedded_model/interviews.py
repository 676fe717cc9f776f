"""Several questions about one text, asked one after the other in a chat: for training alone.

One answer of a word is all that a text with one question teaches; here every text is worth five.
Evaluation draws nothing from here.
"""

from __future__ import annotations

from examples.embedded_model.clauses import Clauses
from examples.embedded_model.fillers import Filler
from examples.embedded_model.mixed import with_articles
from examples.embedded_model.questions import Choice, Questions, compound
from examples.embedded_model.templates import Domain
from examples.embedded_model.varied import VariedCases

ANYTHING_SHARE = 0.25
# {l} the label, {v} the right value or a wrong one.
IS_VALUE = (
    "Is the {l} {v}?", "Is {v} the {l}?", "Is {v} given as {l}?", "Is {v} named as the {l}?",
    "Does it say that the {l} is {v}?", "Is it {v}, the {l}?", "Do we know {v} as the {l}?",
    "Did they put {v} down as {l}?", "Has {v} been named as {l}?", "Can the {l} be {v}?",
    "So the {l} is {v}?", "Is it right that {v} is the {l}?",
)  # fmt: skip
SUFFIXES = ("", "", "", " (yes/no)", " Answer yes or no.", " Choose one of {}.", " Yes or no?")


class Interviews(Questions):
    """Draws texts with up to seven questions about each.

    Args:
        cases: What draws the texts; its source of choices is used for the questions too.
    """

    def __init__(self, cases: VariedCases) -> None:
        super().__init__(cases.rng, cases=cases)
        self.varied = cases

    def several(self) -> list[Choice]:
        """Questions about one text; the first one's prompt holds the text."""
        while True:
            domain, text, facts, identity = self._text()
            made: dict[str, Choice] = {}
            for _ in range(self.rng.choice((4, 6, 8, 10))):
                asked = self._ask(domain, facts)
                if asked is None or asked[0] in made:
                    continue
                question, options, answer = asked
                if made:
                    suffix = self.rng.choice(SUFFIXES) if options == ("yes", "no") else ""
                    prompt = question + suffix.format(", ".join(options))
                else:
                    prompt = self._joined(text, question, options)
                made[question] = Choice(prompt, options, answer, identity)
            if made:
                return list(made.values())[:7]

    def _text(self) -> tuple[Domain, str, dict[str, Filler], str]:
        """Domain, text, facts and id, of a written domain or of one made for this text alone."""
        if self.rng.random() > ANYTHING_SHARE:
            domain = self.rng.choice(self.cases.domains)
            return (domain, *self.document(domain))
        made: Clauses = self.varied.anything.make()
        text, facts, identity = self.varied.about(made)
        return made.domain, text, facts, identity

    def _ask(
        self, domain: Domain, facts: dict[str, Filler]
    ) -> tuple[str, tuple[str, ...], str] | None:
        kind = self.rng.random()
        if kind < 0.45 and domain.name in self.cases.clauses:
            return self._yes_or_no(domain, facts)
        if kind < 0.7:
            return self._is_value(domain, facts)
        return self._of_values(domain, facts) if kind < 0.85 else self._compare(domain, facts)

    def _is_value(
        self, domain: Domain, facts: dict[str, Filler]
    ) -> tuple[str, tuple[str, ...], str] | None:
        """Whether a field has the value that the question names."""
        plain = [slot for slot, (value, _) in facts.items() if not compound(value)]
        if not plain:
            return None
        slot = self.rng.choice(plain)
        value, wording = facts[slot]
        right = self.rng.random() < 0.5
        if not right:
            others = [s for s in plain if facts[s][0] != value]
            if others and self.rng.random() < 0.4:
                wording = facts[self.rng.choice(others)][1]
            else:
                other, wording = self.cases.fillers.draw(domain.fields[slot].kind)
                if other == value:
                    return None
        elif isinstance(value, str) and self.rng.random() < 0.3:
            wording = value
        form = self.rng.choice(IS_VALUE)
        question = with_articles(form.format(l=self.label(domain, slot), v=wording))
        return question, ("yes", "no"), "yes" if right else "no"
