"""JSON Schema as EBNF: every text that the grammar lets through is valid, in the layout asked.

Members of an object come in the order of `properties`, then required names that are not among
them, then free keys. A value has one spelling where the schema fixes it (`enum`, keys).
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.automaton import Node
from overlap_spec.grammar.lowering.ebnf import Rules, choice, literal, sequence
from overlap_spec.grammar.lowering.layout import Layout
from overlap_spec.grammar.lowering.members import Member, Members
from overlap_spec.grammar.lowering.merge import Schema, view
from overlap_spec.grammar.lowering.numbers import (
    INTEGER,
    Bounds,
    decimal_regex,
    integer_regex,
    multiples_rules,
)
from overlap_spec.grammar.lowering.regex import Pattern, parse
from overlap_spec.grammar.lowering.resolve import Resolver
from overlap_spec.grammar.lowering.spell import in_json
from overlap_spec.grammar.lowering.strings import key_node, string_node

_DEEPEST = 200
_LARGEST_STEP = 512
_MOST_MULTIPLES = 4096


class SchemaLowering:
    """Lowers one schema document.

    Args:
        root: The document, already held to its metaschema.
        whitespace: As in `Grammar`.
        best_effort: Leave out what is not read exactly, instead of refusing it.
    """

    def __init__(self, root: Any, whitespace: str | int, best_effort: bool) -> None:
        self.root = root
        self.rules = Rules()
        self.layout = Layout(self.rules, whitespace)
        self.best_effort = best_effort
        self.resolver = Resolver(root, best_effort)
        self._known: dict[tuple[str, int], str | None] = {}
        self._recursive: set[tuple[str, int]] = set()

    def text(self) -> str:
        """The EBNF of the whole document.

        Raises:
            GrammarError: names the keyword that is not read exactly, or says that no value is
                valid.
        """
        start = self.value(self.root, "$", 0)
        if start is None:
            raise GrammarError("$: no value is valid under this schema", "schema")
        return self.rules.text(start)

    def value(self, schema: Any, path: str, depth: int) -> str | None:
        """The rule of a value that stands at `depth`; None if no value is valid."""
        if depth > _DEEPEST or (self.layout.by_depth and depth > 24):
            why = "indentation needs a bounded depth" if self.layout.by_depth else "nested too deep"
            raise GrammarError(f"{path}: {why}", "schema")
        if isinstance(schema, dict) and not self.best_effort:
            keywords.check(schema, path)
        meaning = keywords.constraints(schema) if isinstance(schema, dict) else schema
        key = (
            json.dumps({} if meaning is True else meaning),
            depth if self.layout.by_depth else 0,
        )
        if key in self._known:
            self._recursive.add(key)
            return self._known[key]
        name = self._known[key] = self.rules.reserve()
        parts = [
            part
            for plain in self.resolver.flatten(schema, path)
            for part in self._plain(plain, path, depth)
        ]
        found = choice(parts) if parts else None
        if key in self._recursive or len(parts) > 1:
            self.rules.define(name, found or name)
            found = name if parts else None
        else:
            # A rule that only names another one would hide from the backend what follows it.
            self.rules.drop(name)
        self._known[key] = found
        return found

    def _plain(self, schema: Schema, path: str, depth: int) -> list[str]:
        if "enum" in schema:
            return self._fixed(schema, depth)
        parts = (self._typed(kind, schema, path, depth) for kind in self.resolver.types(schema))
        return [part for part in parts if part is not None]

    def _fixed(self, schema: Schema, depth: int) -> list[str]:
        from jsonschema import validators

        rest = {key: value for key, value in schema.items() if key != "enum"}
        values = list(schema["enum"])
        if rest:
            dialect = validators.validator_for(self.root, validators.Draft202012Validator)
            check = dialect(self.root).evolve(schema=rest)
            values = [value for value in values if check.is_valid(value)]
        # 2.0 is equal to 2, and both are how a reader expects to see it.
        values += [int(v) for v in values if isinstance(v, float) and v.is_integer()]
        return [self.layout.value(value, depth) for value in values]

    def _typed(self, kind: str, schema: Schema, path: str, depth: int) -> str | None:
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            node = self._string(schema, path)
            return None if node is None else self.rules.quoted(node)
        if kind in ("integer", "number"):
            return self._number(kind, schema, path)
        return choice(['"true"', '"false"']) if kind == "boolean" else '"null"'

    def _string(self, schema: Schema, path: str) -> Node | None:
        try:
            return string_node(schema, path)
        except GrammarError:
            if not self.best_effort:
                raise
            return string_node({}, path)

    def _number(self, kind: str, schema: Schema, path: str) -> str | None:
        bounds = _bounds(schema)
        step = schema.get("multipleOf")
        if step is not None and step == int(step):
            return self._multiple(int(step), bounds, path)
        if step is not None and not self.best_effort and not (kind == "integer" and 1 % step == 0):
            raise keywords.refusal("multipleOf", path, "is supported for whole numbers only")
        if kind == "integer":
            regex = INTEGER if bounds.is_free else integer_regex(*bounds.integers())
        else:
            regex = decimal_regex(bounds)
        return None if regex is None else self.rules.terminal(parse(regex))

    def _multiple(self, step: int, bounds: Bounds, path: str) -> str | None:
        low, high = bounds.integers()
        if low is not None and high is not None and (high - low) // step <= _MOST_MULTIPLES:
            values = range(-(-low // step) * step, high + 1, step)
            return choice([literal(str(value)) for value in values]) if values else None
        one_sided = low not in (None, 0, 1) or high not in (None, 0, -1)
        if step > _LARGEST_STEP or one_sided:
            if self.best_effort:
                return self.rules.terminal(parse(integer_regex(low, high) or INTEGER))
            raise keywords.refusal("multipleOf", path, "is not supported with these bounds")
        table = multiples_rules(step)
        names = [self.rules.reserve() for _ in table]
        for state, moves in table:
            ways = [f"[{digits}] {names[target]}" for digits, target in moves]
            self.rules.define(names[state], choice([*ways, '""'] if state == 0 else ways))
        first = [f'"{digit}" {names[digit % step]}' for digit in range(1, 10)]
        ways = [] if low == 1 or high == -1 else ['"0"']
        if high is None or high > 0:
            ways.append(choice(first))
        if low is None or low < 0:
            ways.append(f'"-" {choice(first)}')
        return choice(ways)

    def _array(self, schema: Schema, path: str, depth: int) -> str | None:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        prefix = schema.get("prefixItems", [])
        members = []
        for i, item in enumerate(prefix):
            here = keywords.step(path, "prefixItems", i)
            members.append(Member(self.value(item, here, depth + 1), i < least))
        rest = schema.get("items", True)
        tail = None
        if most is None or most > len(prefix):
            tail = self.value(rest, keywords.step(path, "items"), depth + 1)
        limit = 1 if schema.get("uniqueItems") and not self.best_effort else None
        if limit is not None and not (most is not None and most <= limit):
            raise keywords.refusal("uniqueItems", path, "is not supported")
        shape = Members(self.rules, self.layout, "[]", depth, least, most)
        return shape.array(members, tail)

    def _object(self, schema: Schema, path: str, depth: int) -> str | None:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        members = []
        for name in dict.fromkeys([*properties, *required]):
            seen = view(schema, name, lambda nested: self.resolver.without_ref(nested, path))
            here = keywords.step(path, "properties", name)
            rule = self.value(seen, here, depth + 1) if self._names_allow(schema, name) else None
            if rule is not None:
                rule = sequence(self.layout.value(name, 0), self.layout.colon(), rule)
            members.append(Member(rule, name in required))
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        tail = self._free_member(schema, list(properties) + list(required), path, depth)
        fixed = sum(member.required for member in members)
        if tail is not None and least > fixed + 1 and not self.best_effort:
            # A free key may repeat, and then counts once.
            raise keywords.refusal("minProperties", path, "is not exact with free keys")
        shape = Members(self.rules, self.layout, "{}", depth, least, most)
        return shape.object(members, tail)

    def _names_allow(self, schema: Schema, name: str) -> bool:
        if schema.get("propertyNames", True) in (True, {}):
            return True
        from jsonschema import validators

        dialect = validators.validator_for(self.root, validators.Draft202012Validator)
        return bool(dialect(self.root).evolve(schema=schema["propertyNames"]).is_valid(name))

    def _free_member(self, schema: Schema, taken: list[str], path: str, depth: int) -> str | None:
        """The rule of a key and value that `properties` does not name; None for closed objects."""
        rest = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        names = schema.get("propertyNames", True)
        if patterns:
            return self._pattern_member(patterns, rest, taken, path, depth)
        value = self.value(rest, keywords.step(path, "additionalProperties"), depth + 1)
        if value is None:
            return None
        if names in (True, {}):
            key = self.rules.quoted(key_node(taken))
        elif taken and not self.best_effort:
            raise keywords.refusal("propertyNames", path, "is not exact beside properties")
        else:
            inner = names if isinstance(names, bool) else {**names, "type": "string"}
            found = self.value(inner, keywords.step(path, "propertyNames"), depth)
            if found is None:
                return None
            key = found
        return sequence(key, self.layout.colon(), value)

    def _pattern_member(
        self, patterns: Schema, rest: Any, taken: list[str], path: str, depth: int
    ) -> str | None:
        if not self.best_effort:
            parsed = list(patterns)
            if len(parsed) > 1 and len({json.dumps(value) for value in patterns.values()}) > 1:
                raise keywords.refusal("patternProperties", path, "has patterns that may overlap")
            for pattern in parsed:
                if rest is not False and not _takes_all(pattern):
                    raise keywords.refusal(
                        "patternProperties", path, "is read beside additionalProperties: false only"
                    )
                if any(Pattern(pattern, "schema").matches(name) for name in taken):
                    raise keywords.refusal("patternProperties", path, "matches a named property")
        ways = []
        for pattern, schema in patterns.items():
            value = self.value(schema, keywords.step(path, "patternProperties", pattern), depth + 1)
            if value is not None:
                key = self.rules.quoted(Pattern(pattern, "schema").found(in_json))
                ways.append(sequence(key, self.layout.colon(), value))
        return choice(ways) if ways else None


def _takes_all(pattern: str) -> bool:
    return pattern in ("", "^", "$", ".*", "^.*$", "^.*", ".*$")


def _bounds(schema: Schema) -> Bounds:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    bottom, top = above if open_low else low, below if open_high else high
    return Bounds(
        None if bottom is None else Decimal(repr(bottom)),
        None if top is None else Decimal(repr(top)),
        open_low,
        open_high,
    )
