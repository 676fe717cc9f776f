"""Taking `$ref`, `allOf`, `anyOf` and `oneOf` apart into plain schemas."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.lowering import keywords
from overlap_spec.grammar.lowering.merge import NotMergeableError, Schema, merge, view

_DEPTH = 40
ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")
# Drafts in which the neighbours of `$ref` say nothing.
_LONE_REF = ("draft-03", "draft-04", "draft-06", "draft-07")


class Resolver:
    """Reads one schema document.

    Args:
        root: The document.
        best_effort: Read what can be read of a keyword that would be refused.
    """

    def __init__(self, root: Any, best_effort: bool) -> None:
        self.root = root
        self.best_effort = best_effort
        dialect = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self._lone_ref = any(draft in dialect for draft in _LONE_REF)

    def flatten(self, schema: Any, path: str) -> list[Schema]:
        """Plain schemas whose union is `schema`; an empty list where nothing is valid.

        Raises:
            GrammarError: names the keyword that is not read exactly, and its path.
        """
        return self._flatten(schema, path, 0)

    def types(self, schema: Schema) -> list[str]:
        """The JSON types that a plain schema allows."""
        kinds = schema.get("type", ALL_TYPES)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        return [kind for kind in kinds if not (kind == "integer" and "number" in kinds)]

    def _flatten(self, schema: Any, path: str, depth: int) -> list[Schema]:
        if depth > _DEPTH:
            raise GrammarError(f"{path}: references lead back to themselves", "schema")
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not self.best_effort:
            keywords.check(schema, path)
        plain = keywords.constraints(schema)
        if "$ref" in plain:
            return self._flatten(self.without_ref(plain, path), path, depth + 1)
        if "allOf" in plain:
            parts = plain.pop("allOf")
            for i, part in enumerate(parts):
                here = keywords.step(path, "allOf", i)
                if isinstance(part, dict) and not self.best_effort:
                    keywords.check(part, here)
                plain = self._merge(plain, part, here)
            return self._flatten(plain, path, depth + 1)
        for union in ("anyOf", "oneOf"):
            if union in plain:
                return self._union(plain, union, path, depth)
        return [plain]

    def _union(self, plain: Schema, union: str, path: str, depth: int) -> list[Schema]:
        branches = []
        base = {key: value for key, value in plain.items() if key != union}
        for i, branch in enumerate(plain[union]):
            here = keywords.step(path, union, i)
            if isinstance(branch, dict) and not self.best_effort:
                keywords.check(branch, here)
            branches.append(self._flatten(self._merge(base, branch, here), here, depth + 1))
        if union == "oneOf" and not self.best_effort:
            for i, left in enumerate(branches):
                for right in branches[i + 1 :]:
                    if not self._apart(left, right, path, depth):
                        raise keywords.refusal(union, path, "has branches that may overlap")
        return [schema for branch in branches for schema in branch]

    def _merge(self, left: Any, right: Any, path: str) -> Any:
        try:
            return merge(left, right, lambda schema: self.without_ref(schema, path))
        except NotMergeableError as error:
            if self.best_effort:
                return left
            keyword = str(error.args[0])
            raise keywords.refusal(
                keyword, path, "cannot be combined with the schemas beside it"
            ) from error
        except RecursionError as error:
            raise GrammarError(f"{path}: references lead back to themselves", "schema") from error

    def without_ref(self, schema: Any, path: str) -> Any:
        """The same schema with its `$ref` followed and merged with what stands beside it."""
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        target = self._target(schema["$ref"], path)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        if self._lone_ref or not keywords.constraints(beside):
            return target
        return self._merge(target, beside, path)

    def _target(self, reference: str, path: str) -> Any:
        base, _, fragment = reference.partition("#")
        own = str(self.root.get("$id", self.root.get("id", ""))).rstrip("#")
        if base and base != own:
            raise GrammarError(f"{path}.$ref: {reference!r} is outside the schema", "schema")
        if fragment and not fragment.startswith("/"):
            return self._anchor(fragment, path)
        node = self.root
        for raw in fragment.split("/")[1:]:
            key = unquote(raw).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise GrammarError(f"{path}.$ref: {reference!r} leads nowhere", "schema") from error
        return node

    def _anchor(self, name: str, path: str) -> Any:
        pending = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, dict):
                if node.get("$anchor") == name or node.get("$id", node.get("id")) == f"#{name}":
                    return node
                pending.extend(node.values())
            elif isinstance(node, list):
                pending.extend(node)
        raise GrammarError(f"{path}.$ref: no $anchor {name!r} in the schema", "schema")

    def _apart(self, left: list[Schema], right: list[Schema], path: str, depth: int) -> bool:
        return all(self._disjoint(a, b, path, depth) for a in left for b in right)

    def _disjoint(self, a: Schema, b: Schema, path: str, depth: int) -> bool:
        """Whether no value is valid under both; False where that cannot be shown."""
        if "enum" in a and "enum" in b:
            return not any(keywords.same(x, y) for x in a["enum"] for y in b["enum"])
        shared = _shared_types(self.types(a), self.types(b))
        for one in (a, b):
            if "enum" in one:
                kinds = {kind for value in one["enum"] for kind in _kinds(value)}
                shared &= kinds
        if not shared:
            return True
        if shared <= {"integer", "number"}:
            return _bounds_apart(a, b) or _bounds_apart(b, a)
        return shared == {"object"} and (
            self._objects_apart(a, b, path, depth) or self._objects_apart(b, a, path, depth)
        )

    def _objects_apart(self, a: Schema, b: Schema, path: str, depth: int) -> bool:
        for name in a.get("required", []):
            theirs = view(b, name, lambda schema: self.without_ref(schema, path))
            if theirs is False:
                return True
            if name not in b.get("required", []):
                continue
            mine = view(a, name, lambda schema: self.without_ref(schema, path))
            if mine in (True, {}) or theirs in (True, {}):
                continue
            left = self._flatten(mine, path, depth + 1)
            if self._apart(left, self._flatten(theirs, path, depth + 1), path, depth + 1):
                return True
        return False


def _shared_types(left: list[str], right: list[str]) -> set[str]:
    wide = [{*kinds, *(["integer"] if "number" in kinds else [])} for kinds in (left, right)]
    return wide[0] & wide[1]


def _kinds(value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["boolean"]
    if isinstance(value, int | float):
        return ["integer", "number"]
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return [names[type(value)]]


def _bounds_apart(low: Schema, high: Schema) -> bool:
    """Whether `low` ends before `high` begins."""
    top = min(low.get("maximum", float("inf")), low.get("exclusiveMaximum", float("inf")))
    floor = float("-inf")
    bottom = max(high.get("minimum", floor), high.get("exclusiveMinimum", floor))
    touching = top == bottom and (
        low.get("exclusiveMaximum") == top or high.get("exclusiveMinimum") == bottom
    )
    return bool(top < bottom or touching)
