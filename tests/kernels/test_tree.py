"""Tree building, rerank and acceptance against slow, obvious versions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_spec.kernels import accept_path, build_chain, build_tree, grow, rerank

PARENTS = st.lists(st.integers(0, 10**6), min_size=0, max_size=12).map(
    lambda xs: [x % (i + 1) for i, x in enumerate(xs)]
)


def paths_of(parents: list[int]) -> list[list[int]]:
    """Path from the root to each node; ``parents`` are those of nodes 1 .. n."""
    paths = [[0]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    return paths


@given(PARENTS)
@settings(max_examples=200, deadline=None)
def test_links_depths_and_ancestors(parents: list[int]) -> None:
    paths = paths_of(parents)
    depth = max(len(path) for path in paths) - 1
    tree = build_tree(
        torch.tensor([7]), torch.arange(len(parents))[None], torch.tensor([parents]).long(), depth
    )
    assert tree.tokens[0].tolist() == [7, *range(len(parents))]
    assert tree.depths[0].tolist() == [len(path) - 1 for path in paths]
    for node, path in enumerate(paths):
        assert tree.ancestors[0, node].nonzero().flatten().tolist() == path
        children = [i for i, parent in enumerate(parents, start=1) if parent == node]
        walked, child = [], int(tree.first_child[0, node])
        while child >= 0:
            walked.append(child)
            child = int(tree.next_sibling[0, child])
        assert walked == children


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_rerank_keeps_parents_even_among_ties(steps: int, k: int, keep: int, seed: int) -> None:
    """Scores rounded so hard that most are equal, as when probabilities round to 1."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.zeros(k)]
    parents = [torch.full((k,), -1)]
    frontier, base = torch.arange(k), torch.zeros(k)
    for _ in range(1, steps):
        drop = torch.randint(0, 2, (k, k), generator=generator).float()
        wide = (base[:, None] - drop).flatten()
        first = sum(map(len, scores))
        parents.append(frontier.repeat_interleave(k))
        scores.append(wide)
        best = wide.topk(k).indices
        frontier, base = first + best, wide[best]
    flat, up = torch.cat(scores), torch.cat(parents)
    kept = rerank(flat[None], min(keep, len(flat)))[0].tolist()
    assert kept == sorted(set(kept))
    assert all(up[i] < 0 or int(up[i]) in kept for i in kept)
    worst = min(flat[kept])
    assert all(flat[i] <= worst for i in range(len(flat)) if i not in kept)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 4), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_growth_takes_the_best_children_of_all_branches(
    batch: int, k: int, seen: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = -torch.randint(0, 3, (batch, k), generator=generator).float()
    added = -torch.randint(0, 3, (batch * k, k), generator=generator).float()
    choices = torch.randint(0, 99, (batch * k, k), generator=generator)
    mask = torch.rand(batch, k, seen, generator=generator) < 0.5
    scores = added.clone()
    got = grow(score, scores, choices, mask)
    for tree in range(batch):
        candidates = [
            (-float(score[tree, branch] + added[tree * k + branch, child]), branch, child)
            for branch in range(k)
            for child in range(k)
        ]
        children = scores[tree * k : (tree + 1) * k]
        assert children.flatten().tolist() == [-least for least, _, _ in candidates]
        for place, (least, branch, child) in enumerate(sorted(candidates)[:k]):
            assert float(got.score[tree, place]) == -least
            assert int(got.branch[tree, place]) == branch
            assert int(got.best[tree, place]) == branch * k + child
            assert int(got.token[tree, place]) == int(choices[tree * k + branch, child])
            own = [other == place for other in range(k)]
            assert got.mask is not None
            assert got.mask[tree, place].tolist() == [*mask[tree, branch].tolist(), *own]
    assert grow(score, added, choices).mask is None


def walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], int]:
    """Accepted nodes below the root, and the bonus: the definition."""
    node, path = 0, []
    while True:
        children = [i for i, p in enumerate(parents, start=1) if p == node]
        match = [c for c in children if tokens[c] == targets[node]]
        if not match:
            return path, targets[node]
        node = match[0]
        path.append(node)


@given(PARENTS, st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_acceptance_is_the_walk(parents: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = len(parents) + 1
    tokens = [int(t) for t in torch.randint(0, 3, (nodes,), generator=generator)]
    # Siblings are distinct tokens: number the ones that are not.
    for node in range(1, nodes):
        twins = [tokens[i] for i in range(1, node) if parents[i - 1] == parents[node - 1]]
        while tokens[node] in twins:
            tokens[node] += 1
    targets = [int(t) for t in torch.randint(-1, 4, (nodes,), generator=generator)]
    depth = max(len(path) for path in paths_of(parents)) - 1
    tree = build_tree(
        torch.tensor([tokens[0]]),
        torch.tensor([tokens[1:]]).long(),
        torch.tensor([parents]).long(),
        depth,
    )
    got = accept_path(torch.tensor([targets]), tree, depth + 1)
    path, bonus = walk(tokens, parents, targets)
    length = int(got.lengths[0])
    assert got.path[0, : length + 1].tolist() == [0, *path]
    assert int(got.bonus[0]) == bonus
    root_only = accept_path(torch.tensor([targets]), tree, depth + 1, torch.tensor([0]))
    assert (int(root_only.lengths[0]), int(root_only.bonus[0])) == (0, targets[0])


def test_a_chain_is_a_tree() -> None:
    root, tokens = torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [6, 7, 8]])
    for count in range(4):
        parents = torch.arange(count).expand(2, count)
        chain = build_chain(root, tokens[:, :count])
        for got, want in zip(
            chain, build_tree(root, tokens[:, :count], parents, count), strict=True
        ):
            assert torch.equal(got, want)
