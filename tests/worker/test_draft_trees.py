"""What became of a step's drafts, for whoever asks."""

import numpy as np
import pytest

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import MOST_TOLD_DRAFTS, DraftTree, Fate
from overlap_spec.worker.extras.draft_trees import draft_tree
from tests.support.tiers import few

# Root 0 with children 1 (token 5) and 2 (token 6); 3 (token 7) below 2; 4 (token 8) below 1; 5 is
# dead.
LINKS = np.array([[9, 5, 6, 7, 8, 3], [1, 4, 3, -1, -1, -1], [-1, 2, -1, -1, -1, -1]], np.int64)
NO_ROW = [0, 0]
TREE = {"eagle_topk": 3, "num_draft_tokens": 9}


def row(*tokens: int) -> list[int]:
    return [sum(1 << token for token in tokens), 0]


@pytest.mark.parametrize(
    ("rows", "accepted", "limited", "fates"),
    [
        ([row(5, 6), row(8), row(7)], [6, 7], False, "rejected accepted accepted rejected"),
        ([row(6), NO_ROW, row(7)], [6, 7], False, "masked accepted accepted masked"),
        ([row(6, 9), NO_ROW, row(1)], [6], False, "masked accepted masked masked"),
        ([row(5), NO_ROW, NO_ROW], [], True, "late masked late late"),
        (None, [5], False, "accepted rejected rejected rejected"),
    ],
)
def test_fates(
    rows: list[list[int]] | None, accepted: list[int], limited: bool, fates: str
) -> None:
    masks = None if rows is None else np.array([*rows, *[NO_ROW] * 3], np.int32)
    tree = draft_tree(4, LINKS, accepted, masks, limited)
    assert tree == DraftTree(4, (5, 6, 7, 8), (-1, -1, 1, 0), tuple(fates.split()))  # type: ignore[arg-type]


def test_a_mask_is_read_to_its_highest_bit() -> None:
    links = np.array([[0, 31, 63], [1, -1, -1], [-1, 2, -1]], np.int64)
    high = -(2**31)
    for rows, fates in (([high, 0], "rejected masked"), ([0, high], "masked rejected")):
        masks = np.array([rows, NO_ROW, NO_ROW], np.int32)
        assert draft_tree(0, links, [], masks, False).fates == tuple(fates.split())


def test_a_large_tree_is_told_in_part_with_the_whole_accepted_path() -> None:
    """300 children of the root, and a chain below the last of them."""
    width, deep = 300, 8
    nodes = 1 + width + deep
    tokens = np.arange(nodes)
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)
    child[0], sibling[1:width] = 1, np.arange(2, width + 1)
    child[width : nodes - 1] = np.arange(width + 1, nodes)
    path = list(range(width, nodes))
    tree = draft_tree(1, np.array([tokens, child, sibling], np.int64), path, None, False)
    assert len(tree.tokens) == MOST_TOLD_DRAFTS
    assert tree.left_out == nodes - 1 - MOST_TOLD_DRAFTS
    kept = [token for token, f in zip(tree.tokens, tree.fates, strict=True) if f == "accepted"]
    assert kept == path
    for node, parent in enumerate(tree.parents):
        assert -1 <= parent < node
        assert parent == -1 or tree.tokens[node] == tree.tokens[parent] + 1


def test_what_the_end_cuts_is_not_told_as_accepted() -> None:
    fates: tuple[Fate, ...] = ("rejected", "accepted", "accepted", "masked")
    tree = DraftTree(1, (5, 6, 7, 8), (-1, -1, 1, 2), fates)
    assert tree.cut(2) is tree
    assert tree.cut(1).fates == ("rejected", "accepted", "cut", "masked")
    assert tree.cut(0).fates == ("rejected", "cut", "cut", "masked")


GRAMMARS = {
    "choice": Grammar.choice(["alpha beta gamma", "alpha beta delta", "epsilon"]),
    # Its table has no high counts: some drafts are for the mask to refuse.
    "pattern": Grammar.regex("([a-f]{9} ){3}"),
    "free": None,
}


@pytest.mark.parametrize("overlap", few(("once-sync", "none"), "once-sync"))
@pytest.mark.parametrize("tree", few([{}, TREE], TREE))
def test_the_trees_agree_with_the_statistics(
    tiny: dict[str, str], tree: dict[str, int], overlap: str
) -> None:
    """What is told sums up to what is counted, and telling it changes no token."""
    settings = {**tiny, **tree, "num_steps": 3, "context_length": 160, "overlap": overlap}
    with Engine(**settings) as engine:
        for name, grammar in GRAMMARS.items():
            asked = {"temperature": 0.0, "max_tokens": 30, "complete": False}
            plain = engine.generate("abc", grammar, asked)
            handle = engine.submit("abc", grammar, asked, draft_trees=True)
            deltas = list(engine.pieces(handle))
            assert handle.output is not None
            assert handle.output.token_ids == plain.token_ids
            told = [delta.tree for delta in deltas if delta.token_ids]
            assert None not in told
            trees = [each for each in told if each is not None]
            assert [t.step for t in trees] == sorted({t.step for t in trees})
            assert not trees[0].tokens, "nothing is drafted behind a prompt"
            fates = [fate for each in trees for fate in each.fates]
            stats = handle.output.stats
            assert len(fates) == stats.drafted_tokens
            assert fates.count("accepted") == stats.accepted_drafts
            assert fates.count("late") == 0
            if name == "pattern":
                assert "masked" in fates
            if name == "free":
                assert set(fates) <= {"accepted", "rejected", "cut"}
            for each, delta in zip(trees, (d for d in deltas if d.token_ids), strict=True):
                path = [t for t, f in zip(each.tokens, each.fates, strict=True) if f == "accepted"]
                assert tuple(path) == delta.token_ids[: len(path)]


def test_what_is_masked_is_what_the_lane_counted(tiny: dict[str, str]) -> None:
    """One step at a time, so that none is drafted whose results nobody reads."""
    settings = {**tiny, "num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 9, "overlap": "none"}
    settings |= {"context_length": 160}
    with Engine(**settings) as engine:
        handle = engine.submit(
            "abc", GRAMMARS["pattern"], {"temperature": 0.0, "draft_trees": True}
        )
        trees = [delta.tree for delta in engine.pieces(handle) if delta.tree is not None]
        assert handle.output is not None
        masked = sum(tree.fates.count("masked") for tree in trees)
        assert masked == handle.output.stats.illegal_drafts > 0


def test_nothing_is_copied_or_told_that_nobody_asked_for(tiny: dict[str, str]) -> None:
    with Engine(**tiny, num_steps=3, context_length=160) as engine:
        before = 0
        for asks in (False, True):
            deltas = list(engine.stream("abc", None, max_tokens=9, draft_trees=asks, origins=True))
            copies = sum(span.name == "tree" for span in engine.timeline.spans())
            assert (copies > before) == asks
            assert all((delta.tree is not None) == asks for delta in deltas if delta.token_ids)
            before = copies
