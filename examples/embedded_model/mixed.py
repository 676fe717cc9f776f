"""Requests of the wide mixture: grammar-made texts, more ways to ask, schemas and white space."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from examples.embedded_model.anything import Anything
from examples.embedded_model.cases import SINGULAR, Case, CaseMaker, compact
from examples.embedded_model.clauses import Clauses, Composer, all_clauses
from examples.embedded_model.fillers import Filler, read_lines
from examples.embedded_model.templates import (
    LIST_KINDS,
    Domain,
    Field,
    Template,
    forbidden_grams,
    library,
    parse_template,
)
from examples.embedded_model.wide import WideFillers

# Of the extractions: texts about subjects that no file of phrasings has.
ANYTHING_SHARE = 0.25
TEXT_KINDS = ("int", "snum", "num", "money", "salary", "bool", "enum")
VERBS = (
    *("Extract", "Get", "Find", "Return", "Give me", "Give", "List", "Take", "Collect", "Note"),
    *("Write down", "Read off", "Tell me", "Show", "I want", "Please extract", "Please find"),
    *("Report", "Output", "Copy", "Look up", "Fill in", "State", "Pick out", "Can you find"),
)
LINKS = ("from", "out of", "in", "for", "of")
PLACES = (
    *("the text below", "this text", "the following text", "this message", "this note"),
    *("the next lines", "what follows", "these sentences", "this", "the input", "this {kind}"),
    *("the {kind} below", "this mail", "the paragraph", "the sentence"),
)
WRITE_AS = ("", "", "", "", " as JSON", " as a JSON object", " in JSON", " as an object")


class WideCases(CaseMaker):
    """Cases whose texts, requests and answers are more various than :class:`CaseMaker`'s.

    Args:
        rng: Source of all choices.
        held_out_fillers: Fill with values that training never saw.
    """

    def __init__(self, rng: Random, held_out_fillers: bool = False) -> None:
        super().__init__(rng)
        self.fillers = WideFillers(rng, held_out_fillers)
        self.composer = Composer(rng)
        self.clauses = all_clauses()
        self.anything = Anything(rng)
        old = {domain.name for domain in library().domains}
        everything = [c.domain for c in self.clauses.values()]
        self.older = [d for d in everything if d.name in old]
        # The domains that have written phrasings come twice as often as the others.
        self.domains = everything + self.older
        self.asides = [parse_template("aside", line) for line in read_lines("asides.txt")]

    def extraction(self) -> Case:
        """Of a written domain, or of one made for this text alone."""
        if self.rng.random() > ANYTHING_SHARE:
            return super().extraction()
        made = self.anything.make()
        return self._asked(made.domain, *self.about(made))

    def about(self, made: Clauses) -> tuple[str, dict[str, Filler], str]:
        """A text about a subject that was made for it, the facts it states and its id."""
        text, facts, _ = self.written(made.domain, self.template_about(made))
        return self.distracted(made.domain, text), facts, f"anything:{made.domain.name}"

    def template_about(self, made: Clauses) -> Template:
        """The phrasing of a text about a subject that was made for it."""
        return self.composer.compose(made)

    def composed(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        """A grammar-made text of ``domain``, the facts it states and its id."""
        return self.written(domain, self.composer.compose(self.clauses[domain.name]))

    def written(self, domain: Domain, template: Template) -> tuple[str, dict[str, Filler], str]:
        """A template's text with its articles mended, the facts it states and its id."""
        text, facts, identity = self._render(domain, template)
        return with_articles(text), facts, identity

    def _document(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        chance = self.rng.random()
        if domain in self.older and chance < 0.45:
            return super()._document(domain)
        if chance < 0.9:
            text, facts, identity = self.composed(domain)
        else:
            return self._labelled(domain)
        return self.distracted(domain, text), facts, identity

    def distracted(self, domain: Domain, text: str) -> str:
        """``text`` with sentences that say nothing about the domain's fields, now and then."""
        if self.rng.random() > 0.25:
            return text
        for _ in range(self.rng.choice((1, 1, 2))):
            extra = self.rng.choice(self.noise)
            if self.rng.random() < 0.5:
                aside = self.rng.choice(self.asides)
                kinds = {field.kind for field in domain.fields.values()}
                if not set(aside.slots) & kinds:
                    extra = aside.filled({s: self.fillers.draw(s)[1] for s in aside.slots})
            text = f"{extra} {text}" if self.rng.random() < 0.5 else f"{text} {extra}"
        return text

    def _choose(self, domain: Domain, stated: list[str]) -> list[str]:
        chosen = super()._choose(domain, stated)
        if self.rng.random() < 0.2:
            absent = [s for s in domain.fields if s not in stated and s not in chosen]
            count = min(len(absent), self.rng.choice((1, 1, 2, 3)))
            for slot in self.rng.sample(absent, count):
                chosen.insert(self.rng.randint(0, len(chosen)), slot)
        return chosen

    def _missing(self, field: Field) -> tuple[Any, bool]:
        """null, now and then "" or [] where the type has it."""
        if self.rng.random() < 0.3:
            kind = field.kind.split(":")[0]
            if kind in LIST_KINDS:
                return ([], False) if kind in ("list", "persons") else (None, True)
            if kind not in TEXT_KINDS:
                return "", False
        return None, True

    def _frame(self, domain: Domain, document: str, keys: list[str]) -> str:
        chance = self.rng.random()
        if chance < 0.5:
            return super()._frame(domain, document, keys)
        for _ in range(20):
            words, before = self._request(domain, keys)
            grams = parse_template("request", words).grams()
            if not grams & forbidden_grams():
                break
        else:
            return document
        gap = self.rng.choice((" ", " ", "\n", "\n\n"))
        if self.rng.random() < 0.06:
            document = f'"{document}"'
        return f"{words}{gap}{document}" if before else f"{document}{gap}{words}"

    def _request(self, domain: Domain, keys: list[str]) -> tuple[str, bool]:
        """How the fields are asked for, and whether that stands before the text."""
        names = [k.replace("_", " ") for k in keys] if self.rng.random() < 0.6 else list(keys)
        if self.rng.random() < 0.35:
            names = [f"the {name}" for name in names]
        if self.rng.random() < 0.04:
            names = [f'"{name}"' for name in names]
        last = self.rng.choice((" and ", " and ", ", ", ", and "))
        fields = names[0] if len(names) == 1 else ", ".join(names[:-1]) + last + names[-1]
        kind = SINGULAR.get(domain.name, domain.name.removesuffix("s"))
        before = self.rng.random() < 0.7
        place = self.rng.choice(PLACES).format(kind=kind) if self.rng.random() < 0.4 else ""
        place = f" {self.rng.choice(LINKS)} {place}" if place and before else ""
        verb = self.rng.choice(VERBS)
        asked = f"{verb} {fields}{place}{self.rng.choice(WRITE_AS)}"
        if self.rng.random() < 0.2:
            asked = self.rng.choice(
                (f"Fields: {fields}", f"Keys: {fields}", f"JSON with {fields}", f"{fields}")
            )
        if self.rng.random() < 0.15:
            asked = asked[0].lower() + asked[1:]
        return asked + (self.rng.choice((":", ".", "")) if before else "."), before


def with_articles(text: str) -> str:
    """``text`` with "an" where a vowel follows "a"."""
    words = text.split(" ")
    for i, word in enumerate(words[:-1]):
        if word in ("a", "A") and words[i + 1][:1] in "aeio" and words[i + 1][:1]:
            words[i] = word + "n"
    return " ".join(words)


def sketch(schema: dict[str, Any]) -> str:
    """A schema in the short form that people write by hand: names with types."""
    if "anyOf" in schema:
        return " | ".join(sketch(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        inner = ", ".join(f'"{k}": {sketch(v)}' for k, v in schema["properties"].items())
        return f"{{{inner}}}"
    if kind == "array":
        return f"[{sketch(schema['items'])}]"
    return str(kind)


def written(rng: Random, answer: dict[str, Any]) -> tuple[str, str]:
    """The answer in compact JSON, now and then with white space; and what a prompt says of it."""
    chance = rng.random()
    if chance < 0.93:
        return compact(answer), ""
    if chance < 0.96:
        return json.dumps(answer, ensure_ascii=False), rng.choice(
            ("", " Put a space after colons.")
        )
    indent = rng.choice((2, 2, 4))
    cue = rng.choice(("", f" Indent by {indent}.", " Use indented JSON.", " Pretty print it."))
    return json.dumps(answer, ensure_ascii=False, indent=indent), cue


def with_schema(rng: Random, prompt: str, schema: dict[str, Any]) -> tuple[str, str]:
    """(system turn, user turn) with the schema in one of them."""
    shown = compact(schema) if rng.random() < 0.5 else sketch(schema)
    system = rng.choice(
        (
            f"Answer with JSON that fits this schema: {shown}",
            f"JSON schema:\n{shown}",
            f"You extract JSON. Schema: {shown}",
            f"Reply in this format: {shown}",
        )
    )
    if rng.random() < 0.4:
        return system, prompt
    if rng.random() < 0.5:
        return "", f"{prompt}\n{system}"
    return "", f"{system}\n{prompt}"
