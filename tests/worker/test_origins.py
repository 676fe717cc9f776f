"""How tokens came, and requests that go without speculation."""

import numpy as np
import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Origin, SamplingParams
from overlap_spec.worker.extras.origins import token_origins
from tests.support.tiers import few

# Root 0 with children 1 (token 5) and 2 (token 6); 3 (token 7) below 2.
LINKS = np.array([[9, 5, 6, 7], [1, -1, 3, -1], [-1, 2, -1, -1]], np.int64)
MANY, ONE = [6, 0], [0, -(2**31)]
TREE = {"eagle_topk": 3, "num_draft_tokens": 9}


@pytest.mark.parametrize(
    ("rows", "tokens", "accepted", "want"),
    [
        ([MANY, ONE, ONE, MANY], [6, 7, 8], 2, ["drafted", "forced", "bonus"]),
        ([ONE, ONE, MANY, MANY], [5, 63], 1, ["forced", "forced"]),
        ([MANY, MANY, MANY, ONE], [6, 7, 63], 2, ["drafted", "drafted", "forced"]),
        ([ONE, MANY, MANY, MANY], [63], 0, ["forced"]),
    ],
)
def test_origins_along_the_accepted_path(
    rows: list[list[int]], tokens: list[int], accepted: int, want: list[Origin]
) -> None:
    plain: list[Origin] = ["drafted" if i < accepted else "bonus" for i in range(len(tokens))]
    assert token_origins(tokens, plain, LINKS, np.array(rows, np.int32)) == tuple(want)


def test_origins_of_a_tree_of_one_node() -> None:
    assert token_origins([63], ["bonus"], None, np.array([ONE], np.int32)) == ("forced",)


@pytest.mark.parametrize("tree", few([{}, TREE], TREE))
def test_engine_tells_origins(tiny: dict[str, str], tree: dict[str, int]) -> None:
    """A choice leaves nothing open after its first token; each token has one origin."""
    with Engine(**tiny, **tree, num_steps=3, context_length=160) as engine:
        grammar = Grammar.choice(["alpha", "beta"])
        deltas = list(engine.stream("abc", grammar, SamplingParams(origins=True)))
        tokens = [t for d in deltas for t in d.token_ids]
        origins = [o for d in deltas for o in d.origins]
        assert len(origins) == len(tokens)
        assert origins[0] == "bonus"
        assert set(origins[1:]) == {"forced"}
        free = list(engine.stream("abc", None, SamplingParams(origins=True, max_tokens=9)))
        assert {o for d in free for o in d.origins} <= {"bonus", "drafted"}
        assert all(not d.origins for d in engine.stream("abc", grammar))
