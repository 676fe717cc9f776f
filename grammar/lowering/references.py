"""Resolves `$ref`, `$dynamicRef` and `$recursiveRef` inside a schema document.

A document is a tree of schema resources: the root and every subschema with an `$id` of its own.
Identifiers and anchors count only where the dialect has a schema (JSON Schema 2020-12 core, 8.2).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import unquote, urljoin

import referencing.jsonschema
from referencing import Resource, Specification
from referencing.exceptions import NoSuchResource
from referencing.jsonschema import DynamicAnchor

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.schemas.drafts import NEWEST, draft_of

_MARKS = re.compile(r'"(\$id|id|\$anchor|\$dynamicAnchor|\$recursiveAnchor)":')
_NEWEST = referencing.jsonschema.DRAFT202012


@dataclass(eq=False)
class _Entry:
    """A schema resource: its root, its URI, its dialect, the schemas at its anchors, and which are
    dynamic; `$recursiveAnchor` (2019-09) is a dynamic one with an empty name, at the root."""

    root: Any
    uri: str
    specification: Specification[Any]
    draft: int
    anchors: dict[str, Any] = field(default_factory=dict)
    dynamic: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Scope:
    """Where a schema stands: its resource, and those on the way to it that were the first with
    some dynamic anchor, the outermost first."""

    resource: _Entry
    outer: tuple[_Entry, ...] = ()


class References:
    """The references inside one schema document."""

    def __init__(self, root: Any) -> None:
        first = _entry(root, "")
        self._entries = {"": first}
        # The entry that a schema belongs to, by the schema's identity.
        self._owners: dict[int, _Entry] = {}
        if _MARKS.search(json.dumps(root)):
            first = self._index(root, first)
        self.start = self._entered(Scope(first), first)

    def enter(self, schema: Any, scope: Scope) -> Scope:
        """The scope inside of a subschema, given that around it."""
        return self._entered(scope, self._owners.get(id(schema), scope.resource))

    def target(self, reference: str, path: str, scope: Scope) -> tuple[Any, Scope]:
        """The schema that `$ref` points to, and its scope.

        Raises:
            GrammarError: it points outside of the document, or nowhere.
        """
        node, entry = self._lookup(reference, f"{path}.$ref", scope)
        return node, self._entered(scope, entry)

    def dynamic_target(self, reference: str, path: str, scope: Scope) -> tuple[Any, Scope]:
        """The schema that `$dynamicRef` or `$recursiveRef` points to from here, and its scope:
        `$ref`'s, or, if that is a dynamic anchor, the outermost one of this name on the way here.

        Raises:
            GrammarError: it points outside of the document, or nowhere.
        """
        node, entry = self._lookup(reference, f"{path}.$dynamicRef", scope)
        name = reference.partition("#")[2]
        if name in entry.dynamic:
            entry = next((outer for outer in scope.outer if name in outer.dynamic), entry)
            node = entry.anchors[name]
        return node, self._entered(scope, entry)

    def _entered(self, scope: Scope, entry: _Entry) -> Scope:
        known = {name for outer in scope.outer for name in outer.dynamic}
        outer = scope.outer if entry.dynamic <= known else (*scope.outer, entry)
        return scope if (entry, outer) == (scope.resource, scope.outer) else Scope(entry, outer)

    def _index(self, root: Any, entry: _Entry) -> _Entry:
        """Find the resources and anchors from a schema on; returns the entry of the schema."""
        pending: list[tuple[Resource[Any], _Entry]] = [
            (entry.specification.create_resource(root), entry)
        ]
        while pending:
            resource, around = pending.pop()
            node, own = resource.contents, resource.id()
            if not isinstance(node, dict) or id(node) in self._owners:
                continue
            if own:
                uri = urljoin(around.uri, own).rstrip("#")
                first = around.root is node
                around = around if first else _entry(node, uri, around)
                around.uri = uri
                self._entries.setdefault(uri, around)
            self._owners[id(node)] = around
            for anchor in resource.anchors():
                around.anchors.setdefault(anchor.name, node)
                if isinstance(anchor, DynamicAnchor):
                    around.dynamic.add(anchor.name)
            if node is around.root and node.get("$recursiveAnchor") is True:
                around.anchors[""] = node
                around.dynamic.add("")
            pending += [(inner, around) for inner in resource.subresources()]
        return self._owners.get(id(root), entry)

    def _lookup(self, reference: str, path: str, scope: Scope) -> tuple[Any, _Entry]:
        base, _, fragment = reference.partition("#")
        entry = self._resource(base, path, scope) if base else scope.resource
        if fragment and not fragment.startswith("/"):
            name = unquote(fragment)
            if name not in entry.anchors:
                raise GrammarError(f"{path}: no $anchor {name!r} in the schema", "schema")
            return entry.anchors[name], entry
        return self._pointed(fragment, reference, path, entry)

    def _pointed(
        self, pointer: str, reference: str, path: str, entry: _Entry
    ) -> tuple[Any, _Entry]:
        node = entry.root
        for raw in pointer.split("/")[1:]:
            key = unquote(raw).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise GrammarError(f"{path}: {reference!r} not found", "schema") from error
            entry = self._owners.get(id(node), entry)
        if not isinstance(node, dict | bool):
            raise GrammarError(f"{path}: {reference!r} is not a schema", "schema")
        if self._owners and id(node) not in self._owners:
            # A place where the dialect has no schema: what is inside counts from now on.
            entry = self._index(node, entry)
        return node, entry

    def _resource(self, base: str, path: str, scope: Scope) -> _Entry:
        uri = urljoin(scope.resource.uri, base).rstrip("#")
        if uri not in self._entries:
            found = _published(uri)
            if found is None:
                raise GrammarError(f"{path}: {base!r} is outside the schema", "schema")
            self._entries[uri] = self._index(found, _entry(found, uri))
        return self._entries[uri]


def _entry(root: Any, uri: str, around: _Entry | None = None) -> _Entry:
    """A resource in the dialect that it names, or else that of the resource around it."""
    specification, draft = (
        (_NEWEST, NEWEST) if around is None else (around.specification, around.draft)
    )
    name = root.get("$schema", "") if isinstance(root, dict) else ""
    found = referencing.jsonschema.specification_with(str(name), default=specification)
    return _Entry(root, uri, found, draft_of(root, draft))


@cache
def _published(uri: str) -> Any:
    """A metaschema, by its URI; None for any other."""
    from jsonschema_specifications import REGISTRY

    try:
        return REGISTRY[uri].contents
    except NoSuchResource:
        return None
