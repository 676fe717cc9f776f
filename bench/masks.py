"""Inputs of maskbench: a file's schemas, instances in the key order of their schema, and a
vocabulary.

A grammar writes members in schema order; an instance may have any order. The order is derived from
the schema alone: an object's own `properties` first, then those of combined schemas that are valid
for the instance, then required names, then the rest in the instance's order.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jsonschema import validators
from jsonschema.exceptions import ValidationError
from referencing.exceptions import Unresolvable
from tokenizers import Tokenizer

from bench.common import read_jsonl
from bench.padded_tokenizer import pad_tokenizer
from bench.workloads import OWN_SCHEMAS
from overlap_spec.config import EMBEDDED
from overlap_spec.grammar.automata.dialect import explicit
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.models.config import read_json

VOCABULARY = 131_072
_DEEPEST = 24


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--data`` and ``--limit``."""
    parser.add_argument("--data", type=Path, default=OWN_SCHEMAS, help="schemas, .jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="only N schemas, evenly spread")


def entries_of(options: argparse.Namespace, quick: int) -> list[dict[str, Any]]:
    """The entries of the file that are asked for: ``quick`` of them with ``--quick``, unless
    ``--limit`` says."""
    entries: list[dict[str, Any]] = read_jsonl(options.data, dict)
    limit = options.limit or (quick if options.quick else len(entries))
    return entries[:: max(1, len(entries) // limit)][:limit]


@dataclass(frozen=True)
class Tokens:
    """A vocabulary, and its encoder."""

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]


def padded_tokens(size: int, seed: int) -> Tokens:
    """The embedded model's tokenizer padded to ``size`` tokens, which ``seed`` invents."""
    source = EMBEDDED / "target"
    config = read_json(source / "config.json")
    with tempfile.TemporaryDirectory() as folder:
        pad_tokenizer(source, Path(folder), config["vocab_size"], size, seed)
        path = Path(folder) / "tokenizer.json"
        library = Tokenizer.from_file(str(path))
        vocabulary = Vocabulary.from_tokenizer_json(path, size, (config["eos_token_id"],))
    return Tokens(vocabulary, lambda text: list(library.encode(text, add_special_tokens=False).ids))


class Order:
    """Reorders instances of one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        dialect = validators.validator_for(root, validators.Draft202012Validator)
        self._validator = dialect(root)

    def apply(self, value: Any) -> Any:
        """An equal instance with its keys in schema order."""
        return self._value(value, [self._root], 0)

    def _value(self, value: Any, schemas: list[Any], depth: int) -> Any:
        if not isinstance(value, dict | list):
            return value
        parts = [part for schema in schemas for part in self._parts(schema, value, 0)]
        if depth > _DEEPEST:
            parts = []
        if isinstance(value, list):
            return [
                self._value(item, list(_items(parts, i)), depth + 1) for i, item in enumerate(value)
            ]
        named = [name for part in parts for name in part.get("properties", {})]
        named += [name for part in parts for name in _required(part)]
        names = [name for name in dict.fromkeys(named) if name in value]
        return {
            name: self._value(value[name], list(_members(parts, name)), depth + 1)
            for name in [*names, *(name for name in value if name not in named)]
        }

    def _parts(self, schema: Any, value: Any, depth: int) -> Iterator[dict[str, Any]]:
        """A schema and the schemas that it combines, as far as they are valid for the value."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return
        if "$ref" in schema:
            yield from self._parts(self._target(schema["$ref"]), value, depth + 1)
        yield schema
        for part in schema.get("allOf", []):
            yield from self._parts(part, value, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            for part in schema.get(keyword, []):
                if self._holds(part, value):
                    yield from self._parts(part, value, depth + 1)
        if "if" in schema:
            holds = self._holds(schema["if"], value)
            for part in (schema["if"], schema.get("then")) if holds else (schema.get("else"),):
                yield from self._parts(part, value, depth + 1)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, part in schema.get(keyword, {}).items():
                if isinstance(value, dict) and name in value:
                    yield from self._parts(part, value, depth + 1)

    def _holds(self, schema: Any, value: Any) -> bool:
        try:
            return bool(self._validator.evolve(schema=schema).is_valid(value))
        except (ValidationError, Unresolvable, RecursionError):
            return False

    def _target(self, reference: str) -> Any:
        _, _, fragment = reference.partition("#")
        node = self._root
        for raw in fragment.split("/")[1:]:
            key = unquote(raw).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
        return node


def _required(part: dict[str, Any]) -> list[str]:
    names = part.get("required", [])
    return names if isinstance(names, list) else []


def _items(parts: list[dict[str, Any]], index: int) -> Iterator[Any]:
    for part in parts:
        items, prefix = part.get("items"), part.get("prefixItems", [])
        if isinstance(items, list):
            prefix, items = items, part.get("additionalItems")
        yield prefix[index] if index < len(prefix) else items


def _members(parts: list[dict[str, Any]], name: str) -> Iterator[Any]:
    for part in parts:
        found = [part["properties"][name]] if name in part.get("properties", {}) else []
        for pattern, schema in part.get("patternProperties", {}).items():
            if re.search(explicit(pattern, "ecma"), name):
                found.append(schema)
        yield from found or [part.get("additionalProperties")]
