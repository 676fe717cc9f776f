"""Random grammars."""

from __future__ import annotations

import json
import random


def random_ebnf(rng: random.Random) -> str:
    """An EBNF text of a few letters, whose rules may refer to each other and to the start."""
    names = ["root", *(f"r{i}" for i in range(rng.randint(0, 3)))]
    return "\n".join(f"{name} ::= {_body(rng, names, 2)}" for name in names)


def _body(rng: random.Random, names: list[str], depth: int) -> str:
    kind = rng.randint(0, 7 if depth else 2)
    if kind <= 1:
        return json.dumps("".join(rng.choice("abc") for _ in range(rng.randint(1, 3))))
    if kind == 2:
        return rng.choice([*names, "[ab]", "[^c]"])
    parts = [_body(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind <= 4:
        return f"({' '.join(parts)})"
    if kind <= 6:
        return f"({' | '.join(parts)})"
    return f"({parts[0]}){rng.choice(['?', '*', '{2}'])}"
