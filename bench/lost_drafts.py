"""Why drafts are lost under a grammar: where each verify ended, and who could have known better.

Each verify counts once, by the node at which its accepted path ended:

- ``whole``: a full draft was accepted to its end;
- ``opened``: the next bytes were forced and the draft was not told, because the free bonus before
  it opened them;
- ``inside``: the same, because a draft that was itself free opened them;
- ``recut``: the same, because the bonus was not the run's first token: the model cut otherwise;
- ``cut``: the next bytes were forced, the draft was told them, and the model cut them otherwise;
- ``free``: the next bytes were not forced.

``, illegal`` is added where the grammar forbids a draft at that place. A drafter that keeps to its
grammar's table knows forced text whatever the bonus was: then there is no ``recut``. What a draft
that knew the grammar whole could win is at most ``opened``, ``inside``, ``recut`` and all that is
illegal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from overlap_spec.grammar.contract import Links, Matcher, Row
from overlap_spec.grammar.forced import ForcedRuns, Openings, children_of
from overlap_spec.grammar.guesses import Guesses
from overlap_spec.grammar.walk import allowed

ILLEGAL = ", illegal"
UNTOLD = "opened", "inside", "recut"


class Verified(NamedTuple):
    """A tree that was filled.

    ``children``: of each node, by token. ``refused``: nodes at which the grammar forbids a child.
    ``texts``: what it forces behind nodes. ``runs``: the first token of each node's run, -1 where
    it has none. ``root``: what a draft was told of text that is forced behind the root: ``cut``, or
    why it was told nothing.
    """

    children: dict[int, dict[int, int]]
    refused: frozenset[int]
    texts: Mapping[int, bytes]
    runs: list[int]
    root: str


class LostDrafts(ForcedRuns):
    """Runs as ever, and a count of verifies by where they ended.

    Attributes:
        counts: Verifies of each kind.
        steps: Depth of a full draft.
    """

    counts: Counter[str]
    steps: int

    def start(self, steps: int) -> None:
        """Count anew."""
        self.counts, self.steps = Counter(), steps
        self._trees: WeakKeyDictionary[Guesses, Verified] = WeakKeyDictionary()
        self._root: WeakKeyDictionary[Guesses, str] = WeakKeyDictionary()

    def fill(
        self,
        matcher: Matcher,
        tokens: Links,
        first_child: Links,
        next_sibling: Links,
        rows: Row,
        runs: Row,
        guesses: Guesses,
    ) -> Openings:
        tree = tokens, first_child, next_sibling
        openings = super().fill(matcher, *tree, rows, runs, guesses)
        children = children_of(*(part.tolist() for part in tree))
        refused = (
            node
            for node, own in children.items()
            if rows[node].any() and not all(allowed(rows[node], token) for token in own)
        )
        texts = {node: text for node, text in openings.texts.items() if text}
        first, root = runs[:, 0].tolist(), self._root.get(guesses, "opened")
        self._trees[guesses] = Verified(children, frozenset(refused), texts, first, root)
        return openings

    def learn(self, openings: Openings, chosen: Sequence[int], guesses: Guesses) -> None:
        super().learn(openings, chosen, guesses)
        tree = self._trees.pop(guesses, None)
        if tree is None:
            return
        path = [0]
        for token in chosen[:-1]:
            path.append(tree.children[path[-1]][int(token)])
        last, bonus = path[-1], int(chosen[-1])
        weighed = self.weighed and tree.texts.get(last, b"").startswith(self._text[bonus])
        told = "cut" if weighed or tree.runs[last] == bonus else "recut"
        self._root[guesses] = told if last in tree.texts else "opened"
        # A prefill drafts nothing, and a verify that was cut off lost nothing.
        if tree.children and bonus not in tree.children.get(last, ()):
            self.counts[self._kind(tree, path)] += 1

    def _kind(self, tree: Verified, path: Sequence[int]) -> str:
        last = path[-1]
        if last not in tree.children and len(path) > self.steps:
            return "whole"
        if last not in tree.texts:
            kind = "free"
        elif any(node not in tree.texts for node in path):
            kind = "inside"
        else:
            kind = tree.root
        return kind + ILLEGAL if last in tree.refused else kind


def winnable(counts: Mapping[str, int]) -> float:
    """The share of verifies that a draft which knew the whole grammar could lengthen, at most."""
    lost = sum(n for kind, n in counts.items() if kind in UNTOLD or ILLEGAL in kind)
    return lost / max(1, sum(counts.values()))
