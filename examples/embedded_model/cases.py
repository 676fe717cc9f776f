"""Requests with their answers: text → JSON extraction and tool calls. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.embedded_model.fillers import Filler, Fillers, read_lines
from examples.embedded_model.templates import Domain, Field, Library, Template, library

SINGULAR = {"people": "person", "addresses": "address", "travel": "trip", "weather": "weather"}


@dataclass(frozen=True)
class Case:
    """One request: the user's turn, the schema of its answer, the answer, and its template.

    ``tools`` are OpenAI tool definitions for a tool call, else empty.
    """

    prompt: str
    schema: dict[str, Any]
    answer: dict[str, Any]
    template_id: str
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The answer as compact JSON."""
        return compact(self.answer)


def compact(value: Any) -> str:
    """JSON without white space, as the grammar writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def value_schema(field: Field, value: Any) -> dict[str, Any]:
    """JSON schema of a field of kind ``field.kind`` (``value`` gives the keys of records)."""
    kind = field.kind.split(":")[0]
    if field.kind == "bool":
        return {"type": "boolean"}
    if kind in ("int", "snum"):
        return {"type": "integer"}
    if kind in ("num", "money", "salary"):
        return {"type": "number"}
    if kind == "enum":
        return {"type": "string", "enum": field.kind.partition(":")[2].split("|")}
    if kind in ("list", "persons"):
        return {"type": "array", "items": {"type": "string"}}
    if kind == "ilist":
        return {"type": "array", "items": {"type": "integer"}}
    if kind == "nlist":
        return {"type": "array", "items": {"type": "number"}}
    if kind in ("items", "foods"):
        name, amount = value[0]
        row = {name: {"type": "string"}, amount: {"type": "integer"}}
        return {"type": "array", "items": object_schema(row)}
    return {"type": "string"}


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with exactly these properties, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class CaseMaker:
    """Draws cases from a library.

    Args:
        rng: Source of all choices.
        held_out_fillers: Fill with values that training never saw.
        held_out_templates: Use phrasings that training never saw.
        lib: The templates.
    """

    def __init__(
        self,
        rng: Random,
        held_out_fillers: bool = False,
        held_out_templates: bool = False,
        lib: Library | None = None,
    ) -> None:
        self.rng = rng
        self.fillers = Fillers(rng, held_out_fillers)
        self.unseen = held_out_templates
        self.evaluation = held_out_fillers or held_out_templates
        self.library = lib or library()
        self.noise = read_lines("noise.txt")
        self.domains = [d for d in self.library.domains if d.held_out or not self.unseen]

    def extraction(self) -> Case:
        """A document of one domain and the JSON object of some of its fields."""
        domain = self.rng.choice(self.domains)
        return self._asked(domain, *self._document(domain))

    def _asked(
        self, domain: Domain, document: str, facts: dict[str, Filler], identity: str
    ) -> Case:
        """Some of a document's fields, asked for as a JSON object."""
        chosen = self._choose(domain, list(facts))
        answer, schema, keys = self._answer(domain, chosen, facts)
        return Case(self._frame(domain, document, keys), schema, answer, identity)

    def question(self) -> tuple[Case, str, str]:
        """An extraction with one of its fields asked for: (case, question, plain answer)."""
        domain = self.rng.choice(self.domains)
        document, facts, identity = self._document(domain)
        plain = [s for s, (v, _) in facts.items() if isinstance(v, (str, int, float))]
        slot = self.rng.choice(plain or list(facts))
        label = self.rng.choice(domain.fields[slot].keys).replace("_", " ")
        value = facts[slot][0]
        asked = self.rng.choice(
            (
                f"What is the {label}? {document}",
                f"{document}\nWhat is the {label}?",
                f"{document} Give only the {label}.",
                f"{document}\n{label}?",
            )
        )
        answer = value if isinstance(value, str) else compact(value)
        return Case(asked, {}, {label: value}, identity), asked, answer

    def _document(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        """A text, the facts it states and the id of its template."""
        if self.unseen:
            return self._render(domain, self.rng.choice(domain.held_out))
        style = self.rng.random()
        if self.evaluation or style < 0.66:
            text, facts, identity = self._render(domain, self.rng.choice(domain.whole))
        elif style < 0.86:
            text, facts, identity = self._combine(domain)
        else:
            return self._labelled(domain)
        if not self.evaluation and self.rng.random() < 0.12:
            extra = self.rng.choice(self.noise)
            text = f"{extra} {text}" if self.rng.random() < 0.5 else f"{text} {extra}"
        return text, facts, identity

    def _fill(self, domain: Domain, slots: Sequence[str]) -> dict[str, Filler]:
        facts: dict[str, Filler] = {}
        for slot in slots:
            kind = domain.fields[slot].kind
            value = self.rng.random() < 0.5
            facts[slot] = (
                (value, "yes" if value else "no") if kind == "bool" else (self.fillers.draw(kind))
            )
        return facts

    def _render(
        self, domain: Domain, template: Template, facts: dict[str, Filler] | None = None
    ) -> tuple[str, dict[str, Filler], str]:
        facts = facts or self._fill(domain, template.slots)
        pieces: list[str] = []
        for part in template.parts:
            if part.wordings is not None:
                pieces.append(part.wordings[0 if facts[part.slot][0] else 1])
            else:
                pieces.append(facts[part.slot][1] if part.slot else part.text)
        return "".join(pieces), facts, template.id

    def _combine(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        """Sentences about one or two fields each, in any order."""
        lines = self.rng.sample(domain.facts, min(len(domain.facts), self.rng.randint(2, 7)))
        slots = list(dict.fromkeys(slot for line in lines for slot in line.slots))
        facts = self._fill(domain, slots)
        text = " ".join(self._render(domain, line, facts)[0] for line in lines)
        return text, facts, f"{domain.name}:facts"

    def _labelled(self, domain: Domain) -> tuple[str, dict[str, Filler], str]:
        """A form: each field with a label, in one of several layouts."""
        count = min(len(domain.fields), self.rng.randint(2, 8))
        facts = self._fill(domain, self.rng.sample(list(domain.fields), count))
        names = [self.rng.choice(domain.fields[slot].keys) for slot in facts]
        if self.rng.random() < 0.6:
            names = [name.replace("_", " ") for name in names]
        if self.rng.random() < 0.4:
            names = [name.capitalize() for name in names]
        texts = [text for _, text in facts.values()]
        layout = self.rng.choice(("{}: {}\n", "{} = {}; ", "- {}: {}\n", "{} is {}, ", "{}: {}, "))
        document = "".join(layout.format(n, t) for n, t in zip(names, texts, strict=True))
        return document.rstrip("\n;, "), facts, f"{domain.name}:labels"

    def _choose(self, domain: Domain, stated: list[str]) -> list[str]:
        """The slots to answer, in order: all or some of those stated, seldom one that is not."""
        chosen = list(stated)
        if len(chosen) > 2 and self.rng.random() < 0.4:
            chosen = self.rng.sample(chosen, self.rng.randint(2, len(chosen)))
        if self.rng.random() < 0.15:
            absent = [slot for slot in domain.fields if slot not in stated]
            if absent:
                chosen.append(self.rng.choice(absent))
        order = self.rng.random()
        if order < 0.45:
            chosen.sort(key=list(domain.fields).index)
        elif order < 0.75:
            self.rng.shuffle(chosen)
        return chosen

    def _key(self, field: Field, used: set[str]) -> str:
        first = field.keys[0] if self.rng.random() < 0.55 else self.rng.choice(field.keys)
        key = next(k for k in (first, *field.keys, field.slot) if k not in used)
        used.add(key)
        return key

    def _answer(
        self, domain: Domain, chosen: list[str], facts: dict[str, Filler]
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        used: set[str] = set()
        values: dict[str, Any] = {}
        schemas: dict[str, Any] = {}
        for slot in chosen:
            field = domain.fields[slot]
            key = self._key(field, used)
            if slot in facts:
                values[key] = facts[slot][0]
                schemas[key] = value_schema(field, values[key])
                nullable = self.rng.random() < 0.08
            else:
                values[key], nullable = self._missing(field)
                sample = [{"name": 0, "quantity": 0}]
                schemas[key] = value_schema(field, sample)
            if nullable:
                schemas[key] = {"anyOf": [schemas[key], {"type": "null"}]}
        keys = list(values)
        if len(keys) > 2 and domain.groups and self.rng.random() < 0.15:
            values, schemas = self._nest(domain, values, schemas)
        return values, object_schema(schemas), keys

    def _missing(self, field: Field) -> tuple[Any, bool]:  # noqa: ARG002
        """The value of a field that the text does not state, and whether its schema has null."""
        return None, True

    def _nest(
        self, domain: Domain, values: dict[str, Any], schemas: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Move a run of keys into an object of their own."""
        group = self.rng.choice(domain.groups)
        if group in values:
            return values, schemas
        keys = list(values)
        start = self.rng.randrange(len(keys) - 1)
        inner = keys[start : start + self.rng.randint(2, 3)]
        new_values: dict[str, Any] = {}
        new_schemas: dict[str, Any] = {}
        for key in keys:
            if key not in inner:
                new_values[key], new_schemas[key] = values[key], schemas[key]
            elif key == inner[0]:
                new_values[group] = {k: values[k] for k in inner}
                new_schemas[group] = object_schema({k: schemas[k] for k in inner})
        return new_values, new_schemas

    def _frame(self, domain: Domain, document: str, keys: list[str]) -> str:
        frames = self.library.frames
        if self.unseen and self.rng.random() < 0.6:
            frames = self.library.held_out_frames
        frame = self.rng.choice(frames)
        names = keys
        if self.rng.random() < 0.5:
            names = [key.replace("_", " ") for key in keys]
        listed = ", ".join(names)
        if len(names) > 1 and self.rng.random() < 0.6:
            listed = ", ".join(names[:-1]) + " and " + names[-1]
        kind = SINGULAR.get(domain.name, domain.name.removesuffix("s"))
        return frame.filled({"doc": document, "fields": listed, "kind": kind})

    def tool_call(self) -> Case:
        """A user turn, a list of tools, and the call that serves the turn."""
        usable = [t for t in self.library.tools if t.held_out or not self.unseen]
        tool = self.rng.choice(usable)
        template = self._turn(tool)
        prompt, facts, identity = self._render(tool, template)
        others = [t for t in self.library.tools if t is not tool]
        listed = [tool, *self.rng.sample(others, self.rng.randint(0, 4))]
        self.rng.shuffle(listed)
        definitions = []
        call: dict[str, Any] = {}
        schema: dict[str, Any] = {}
        for each in listed:
            used: set[str] = set()
            slots = list(each.fields)
            if each is tool:
                extra = [s for s in slots if s not in facts and self.rng.random() < 0.5]
                slots = [s for s in slots if s in facts or s in extra]
            keys = {slot: self._key(each.fields[slot], used) for slot in slots}
            name = each.names[0] if self.rng.random() < 0.5 else self.rng.choice(each.names)
            properties = {
                keys[s]: value_schema(each.fields[s], facts[s][0] if s in facts else None)
                for s in slots
            }
            definitions.append(tool_definition(name, each.description, properties))
            if each is tool:
                stated = [s for s in slots if s in facts]
                call = {"name": name, "arguments": {keys[s]: facts[s][0] for s in stated}}
                schema = object_schema(
                    {
                        "name": {"type": "string", "enum": [name]},
                        "arguments": object_schema({keys[s]: properties[keys[s]] for s in stated}),
                    }
                )
        return Case(prompt, schema, call, identity, tuple(definitions))

    def _turn(self, tool: Domain) -> Template:
        """A phrasing of a user turn that calls ``tool``."""
        return self.rng.choice(tool.held_out if self.unseen else tool.whole)


def tool_definition(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool definition of a function with these parameters."""
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
