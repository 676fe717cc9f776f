"""Automata to regular expressions, by state elimination."""

from __future__ import annotations

from overlap_spec.grammar.automata.dfa import Dfa
from overlap_spec.grammar.automata.escape import Escape
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Repetition, alternate, concat

# An expression, and how many character classes it has.
Sized = tuple[Node, int]
# States and classes up to which an automaton becomes an expression: a library's lexer reads these
# alone.
_MOST_STATES = 256
_LONGEST = 25_000


def to_node(dfa: Dfa, escape: Escape) -> Node | None:
    """An expression for an automaton's texts; None if it would be too long.

    States are eliminated in the order in which the expression grows least, which makes it several
    times shorter than from the last to the first (M. Delgado and J. Morais, "Approximation to the
    smallest regular expression for a given regular language", 2004).
    """
    end = len(dfa.moves)
    if end > _MOST_STATES:
        return None
    edges: dict[int, dict[int, Sized]] = {state: {} for state in range(end + 1)}
    for state in range(end):
        for to, members in dfa.targets(state).items():
            char = escape(members)
            if char is not None:
                edges[state][to] = (char, 1)
        if dfa.final[state]:
            edges[state][end] = (EMPTY, 0)
    into: dict[int, set[int]] = {state: set() for state in edges}
    for state, ways in edges.items():
        for to in ways:
            into[to].add(state)
    growth = {state: _growth(edges, into, state) for state in range(1, end)}
    while growth:
        state = min(growth, key=growth.__getitem__)
        del growth[state]
        beside = growth.keys() & (into[state] | edges[state].keys())
        if not _eliminate(edges, into, state):
            return None
        growth.update((other, _growth(edges, into, other)) for other in beside)
    loop = edges[0].pop(0, None)
    tail = edges[0].get(end)
    if tail is None:
        return None
    return concat(Repetition(loop[0], 0, None), tail[0]) if loop is not None else tail[0]


def _growth(edges: dict[int, dict[int, Sized]], into: dict[int, set[int]], state: int) -> int:
    """How many classes an elimination adds."""
    heads = [edges[other][state][1] for other in into[state] if other != state]
    tails = [size for to, (_, size) in edges[state].items() if to != state]
    loop = edges[state][state][1] if state in edges[state] else 0
    return (
        sum(heads) * (len(tails) - 1)
        + sum(tails) * (len(heads) - 1)
        + loop * (len(heads) * len(tails) - 1)
    )


def _eliminate(edges: dict[int, dict[int, Sized]], into: dict[int, set[int]], state: int) -> bool:
    """Remove a state; False if an expression becomes too long."""
    out = edges.pop(state)
    loop = out.pop(state, None)
    for to in out:
        into[to].discard(state)
    for other in sorted(into.pop(state) - {state}):
        ways = edges[other]
        before = ways.pop(state)
        head = before
        if loop is not None:
            head = concat(before[0], Repetition(loop[0], 0, None)), before[1] + loop[1]
        for to, (node, size) in out.items():
            path = head if node == EMPTY else (concat(head[0], node), head[1] + size)
            if to in ways:
                path = alternate(ways[to][0], path[0]), ways[to][1] + path[1]
            if path[1] > _LONGEST:
                return False
            ways[to] = path
            into[to].add(other)
    return True
