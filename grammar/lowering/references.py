"""Resolves `$ref`."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin

from overlap_spec.errors import GrammarError

# Drafts in which keywords beside `$ref` are ignored.
_LONE_REF = ("draft-03", "draft-04", "draft-06", "draft-07")


class References:
    """The references inside one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, Any] | None = None
        own = root.get("$id", root.get("id", "")) if isinstance(root, dict) else ""
        self._own = own.rstrip("#") if isinstance(own, str) else ""
        dialect = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        self.stand_alone = any(draft in dialect for draft in _LONE_REF)

    def target(self, reference: str, path: str) -> Any:
        """The schema that a reference points to.

        Raises:
            GrammarError: it points outside of the document, or nowhere.
        """
        base, _, fragment = reference.partition("#")
        node = self._resource(base, path) if base else self._root
        if fragment and not fragment.startswith("/"):
            return self._anchor(fragment, path)
        for raw in fragment.split("/")[1:]:
            key = unquote(raw).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise GrammarError(f"{path}.$ref: {reference!r} not found", "schema") from error
        if not isinstance(node, dict | bool):
            raise GrammarError(f"{path}.$ref: {reference!r} is not a schema", "schema")
        return node

    def _resource(self, base: str, path: str) -> Any:
        found = self._identified().get(urljoin(self._own, base).rstrip("#"))
        if found is None:
            raise GrammarError(f"{path}.$ref: {base!r} is outside the schema", "schema")
        return found

    def _anchor(self, name: str, path: str) -> Any:
        found = self._identified().get(f"#{name}")
        if found is None:
            raise GrammarError(f"{path}.$ref: no $anchor {name!r} in the schema", "schema")
        return found

    def _identified(self) -> dict[str, Any]:
        """Subschemas by resolved `$id` and by `#anchor`."""
        if self._names is None:
            self._names = {self._own: self._root}
            pending = [self._root]
            while pending:
                node = pending.pop()
                if isinstance(node, dict):
                    self._name(node)
                    pending.extend(node.values())
                elif isinstance(node, list):
                    pending.extend(node)
        return self._names

    def _name(self, node: dict[str, Any]) -> None:
        assert self._names is not None
        anchor, own = node.get("$anchor"), node.get("$id", node.get("id"))
        if isinstance(anchor, str):
            self._names.setdefault(f"#{anchor}", node)
        if isinstance(own, str) and own:
            key = own if own.startswith("#") else urljoin(self._own, own).rstrip("#")
            self._names.setdefault(key, node)
