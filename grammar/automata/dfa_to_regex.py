"""Automata to regular expressions, by state elimination."""

from __future__ import annotations

from overlap_spec.grammar.automata.dfa import Dfa
from overlap_spec.grammar.automata.escape import Escape
from overlap_spec.grammar.automata.regex_ast import EMPTY, Node, Repetition, alternate, concat

# An expression, and how many character classes it has.
Sized = tuple[Node, int]
# The expression grows at least with the square of the number of states.
_MOST_STATES = 48
_LONGEST = 3000


def to_node(dfa: Dfa, escape: Escape) -> Node | None:
    """An expression for an automaton's texts, by eliminating states from the last to the first;
    None if it would be too long."""
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
    for state in range(end - 1, 0, -1):
        if not _eliminate(edges, state):
            return None
    loop = edges[0].pop(0, None)
    tail = edges[0].get(end)
    if tail is None:
        return None
    return concat(Repetition(loop[0], 0, None), tail[0]) if loop is not None else tail[0]


def _eliminate(edges: dict[int, dict[int, Sized]], state: int) -> bool:
    """Remove a state; False if an expression becomes too long."""
    out = edges.pop(state)
    loop = out.pop(state, None)
    for ways in edges.values():
        into = ways.pop(state, None)
        if into is None:
            continue
        head = into
        if loop is not None:
            head = concat(into[0], Repetition(loop[0], 0, None)), into[1] + loop[1]
        for to, (node, size) in out.items():
            path = head if node == EMPTY else (concat(head[0], node), head[1] + size)
            if to in ways:
                path = alternate(ways[to][0], path[0]), ways[to][1] + path[1]
            if path[1] > _LONGEST:
                return False
            ways[to] = path
    return True
