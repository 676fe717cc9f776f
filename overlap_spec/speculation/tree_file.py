"""A fixed draft tree from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from overlap_spec.errors import ConfigError
from overlap_spec.tiers import Tier

MOST_NODES = 64
MOST_CHILDREN = 10


def read_tree(path: Path) -> Tier:
    """The tier of a tree in a JSON file.

    The file is an array: either ``parents``, the number of each node's parent from node 1 on, 0
    being the root; or Medusa's ``choices``, each node's path from the root as ranks of siblings
    (``[[0], [1], [0, 0]]``). Siblings are the drafter's best tokens, the best one first.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; names the entry.
    """
    where = f"tree {str(path)!r}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where} must be an array of parents, or of Medusa's choices")
    if len(data) >= MOST_NODES:
        raise ConfigError(f"{where}: {len(data)} nodes; at most {MOST_NODES - 1} after the root")
    parents = _of_choices(data, where) if isinstance(data[0], list) else _checked(data, where)
    depths, children = [0], [0] * (len(parents) + 1)
    for parent in parents:
        depths.append(depths[parent] + 1)
        children[parent] += 1
    most = max(children)
    if most > MOST_CHILDREN:
        node = children.index(most)
        raise ConfigError(f"{where}: node {node} has {most} children; at most {MOST_CHILDREN}")
    if most == 1:
        return Tier(len(parents), 1, len(parents) + 1)
    return Tier(max(depths), most, len(parents) + 1, tuple(parents))


def _checked(data: Sequence[object], where: str) -> list[int]:
    parents: list[int] = []
    for index, parent in enumerate(data):
        whole = isinstance(parent, int) and not isinstance(parent, bool)
        if not (whole and isinstance(parent, int) and 0 <= parent <= index):
            raise ConfigError(
                f"{where}: parents[{index}] is {parent!r}; node {index + 1}'s parent must be an "
                f"earlier node, 0 to {index}"
            )
        parents.append(parent)
    return parents


def _of_choices(data: Sequence[object], where: str) -> list[int]:
    """Parents of Medusa's choices, the nodes ordered by depth, then by path."""
    paths: list[tuple[int, ...]] = []
    for index, choice in enumerate(data):
        ranks = choice if isinstance(choice, list) else []
        if not ranks or any(
            not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in ranks
        ):
            raise ConfigError(
                f"{where}: choices[{index}] is {choice!r}; a path of ranks from 0 on is expected"
            )
        paths.append(tuple(ranks))
    numbers: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        index = paths.index(path)
        if path in numbers:
            raise ConfigError(f"{where}: choices[{index}] is {list(path)} a second time")
        if path[:-1] not in numbers:
            raise ConfigError(
                f"{where}: choices[{index}] is {list(path)}, whose parent {list(path[:-1])} is "
                "not there"
            )
        better = (*path[:-1], path[-1] - 1)
        if path[-1] and better not in numbers:
            raise ConfigError(
                f"{where}: choices[{index}] is {list(path)}, and {list(better)}, which is "
                "likelier, is not there"
            )
        numbers[path] = len(numbers)
    return [numbers[path[:-1]] for path in numbers if path]
