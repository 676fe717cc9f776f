"""Finding expressions that say "any of these texts but a few" in a roundabout way.

The keys of an open object are any text but the named ones, and EBNF has no word for "but": the
lowering writes a tree of all texts that differ somewhere. A library that has the word makes masks
a hundred times cheaper when it is told.
"""

from __future__ import annotations

from overlap_spec.errors import GrammarError
from overlap_spec.grammar.expressions import Either, Expression, Repeat, parts_of, references
from overlap_spec.grammar.network import Closures, Network, Nodes

_MOST_NODES = 20_000
_MOST_SETS = 4_000
_MOST_TEXTS = 1_000


def excluded(expression: Expression) -> tuple[Repeat, list[bytes]] | None:
    """A repetition, and the texts of it that an expression does not match, where these are few.

    None where the expression is no such thing. Exact: what the expression matches is what the
    repetition matches but for the texts.
    """
    if references(expression) or not isinstance(expression, Either):
        return None
    base = _widest_loop(expression)
    if base is None:
        return None
    network = Network(_MOST_NODES)
    start = network.node()
    try:
        end = network.add_whole(expression, start)
        base_start = network.node()
        base_end = network.add_whole(base, base_start)
    except GrammarError:
        return None
    return _difference(network, (start, end), (base_start, base_end), base)


def _widest_loop(expression: Expression) -> Repeat | None:
    found: list[Repeat] = []
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, Repeat) and part.most is None:
            found.append(Repeat(part.body, 1, None))
        else:
            pending += parts_of(part)
    return found[-1] if found else None


def _difference(
    network: Network, narrow: tuple[int, int], wide: tuple[int, int], base: Repeat
) -> tuple[Repeat, list[bytes]] | None:
    closures = Closures(network)
    first = closures.of(frozenset((narrow[0], wide[0])))
    moves: dict[Nodes, list[tuple[int, Nodes]]] = {}
    pending = [first]
    differs: set[Nodes] = set()
    while pending:
        here = pending.pop()
        if here in moves:
            continue
        if len(moves) >= _MOST_SETS:
            return None
        if narrow[1] in here and wide[1] not in here:
            return None
        if wide[1] in here and narrow[1] not in here:
            differs.add(here)
        moves[here] = [(members, closures.of(after)) for members, after in closures.moves(here)]
        pending += [after for _, after in moves[here]]
    texts = _texts(first, moves, differs)
    return None if texts is None else (base, texts)


def _texts(
    first: Nodes, moves: dict[Nodes, list[tuple[int, Nodes]]], differs: set[Nodes]
) -> list[bytes] | None:
    """All byte texts that lead from `first` into `differs`; None where they are too many."""
    before: dict[Nodes, list[Nodes]] = {}
    for here, ways in moves.items():
        for _, after in ways:
            before.setdefault(after, []).append(here)
    leads = set(differs)
    pending = list(differs)
    while pending:
        new = [here for here in before.get(pending.pop(), ()) if here not in leads]
        leads.update(new)
        pending += new
    found: list[bytes] = []
    paths = [(first, b"")] if first in leads else []
    while paths:
        here, text = paths.pop()
        if here in differs:
            found.append(text)
        # Endless differences come back to a set that was met, and grow past any bound.
        if len(found) > _MOST_TEXTS or len(text) > len(moves):
            return None
        for members, after in moves[here]:
            if after in leads:
                paths += [(after, text + bytes([b])) for b in range(256) if members >> b & 1]
        if len(paths) > _MOST_TEXTS:
            return None
    return sorted(found)
