"""Tree building, rerank and acceptance against slow, obvious versions."""

import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from overlap_spec.kernels import accept_path, build_chain, build_tree, grow, rerank, select_nodes

DEAD = -torch.inf
PARENTS = st.lists(st.integers(0, 10**6), min_size=0, max_size=12).map(
    lambda xs: [x % (i + 1) for i, x in enumerate(xs)]
)


def paths_of(parents: list[int]) -> list[list[int]]:
    """Path from the root to each node; ``parents`` are those of nodes 1 .. n."""
    paths = [[0]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    return paths


def path_scores(parents: list[int], seed: int) -> list[float]:
    """Scores of nodes 1 .. n: a path's sum of steps, of which many are 0 and some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 4, (len(parents),), generator=generator).tolist()
    scores = [0.0]
    for parent, step in zip(parents, steps, strict=True):
        scores.append(scores[parent] + (0.0, 0.0, -1.0, DEAD)[step])
    return scores[1:]


def test_links_are_those_of_an_example() -> None:
    tree = build_tree(
        torch.tensor([9]),
        torch.tensor([[1, 2, 3, 4, 5]]),
        torch.tensor([[0, 0, 2, 1, 0]]),
        torch.tensor([[-1.0, torch.nan, DEAD, -2.0, -3.0]]),
        depth=2,
    )
    assert tree.tokens.tolist() == [[9, 1, 2, 3, 4, 5]]
    assert tree.parents.tolist() == [[-1, 0, -1, -1, 1, 0]]
    assert tree.first_child.tolist() == [[1, 4, -1, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 5, -1, -1, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 0, 0, 2, 1]]
    assert tree.scores.tolist() == [[0.0, -1.0, DEAD, DEAD, -2.0, -3.0]]
    seen = [row.nonzero().flatten().tolist() for row in tree.ancestors[0]]
    assert seen == [[0], [0, 1], [2], [3], [0, 1, 4], [0, 5]]


@given(PARENTS, st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_links_depths_and_ancestors(parents: list[int], seed: int) -> None:
    scores = path_scores(parents, seed)
    alive = [True, *(score > DEAD for score in scores)]
    paths = [
        path if is_alive else [node]
        for node, (path, is_alive) in enumerate(zip(paths_of(parents), alive, strict=True))
    ]
    tree = build_tree(
        torch.tensor([7]),
        torch.arange(len(parents))[None],
        torch.tensor([parents]).long(),
        torch.tensor([scores]),
        max(len(path) for path in paths) - 1,
    )
    assert tree.tokens[0].tolist() == [7, *range(len(parents))]
    assert tree.depths[0].tolist() == [len(path) - 1 for path in paths]
    assert tree.scores[0].tolist() == [0.0, *scores]
    for node, path in enumerate(paths):
        assert tree.ancestors[0, node].nonzero().flatten().tolist() == path
        assert int(tree.parents[0, node]) == (path[-2] if len(path) > 1 else -1)
        children = [i for i, p in enumerate(parents, start=1) if p == node and alive[i]]
        walked, child = [], int(tree.first_child[0, node])
        while child >= 0:
            walked.append(child)
            child = int(tree.next_sibling[0, child])
        assert walked == children


def selected(
    scores: list[list[float]], count: int, most: list[int]
) -> tuple[list[int], list[list[float]]]:
    """:func:`select_nodes`, one node after the other: the definition."""
    nodes = len(scores[0])
    chosen, dead = [], []
    for request, row in enumerate(scores):
        ranking = sorted(range(nodes), key=lambda node: (-row[node], node))
        for rank, node in enumerate(ranking):
            flat = request * nodes + node
            if rank > 0 and (row[node] == DEAD or rank >= most[request]):
                dead.append(flat)
            else:
                chosen.append((rank > 0, -row[node], flat))
    kept = [flat for *_, flat in sorted(chosen)][:count]
    left = [
        [row[node] if request * nodes + node in kept else DEAD for node in range(nodes)]
        for request, row in enumerate(scores)
    ]
    kept += sorted(dead)[: count - len(kept)]
    return sorted(kept), left


@given(st.data(), st.integers(1, 4), st.integers(0, 8), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_selection_is_the_best_of_the_batch_and_keeps_parents(
    data: st.DataObject, batch: int, drafted: int, seed: int
) -> None:
    parents = [[data.draw(st.integers(0, node)) for node in range(drafted)] for _ in range(batch)]
    scores = [[0.0, *path_scores(row, seed + i)] for i, row in enumerate(parents)]
    nodes = drafted + 1
    count = data.draw(st.integers(batch, batch * nodes))
    bound = st.lists(st.integers(0, nodes + 1), min_size=batch, max_size=batch)
    most = data.draw(st.none() | bound)
    got = select_nodes(torch.tensor(scores), count, None if most is None else torch.tensor(most))
    pack, left = selected(scores, count, most or [nodes] * batch)
    assert got.pack.dtype == torch.int64
    assert got.pack.tolist() == pack
    assert got.scores.tolist() == left
    for row, kept in zip(parents, left, strict=True):
        assert kept[0] == 0.0
        alive = [score > DEAD for score in kept]
        assert all(alive[up] for node, up in enumerate(row, start=1) if alive[node])


def test_selection_of_an_example() -> None:
    scores = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -0.5, -0.5, torch.nan]])
    got = select_nodes(scores, 5)
    assert got.pack.tolist() == [0, 1, 4, 5, 6]
    assert got.scores.tolist() == [[0.0, -1.0, DEAD, DEAD], [0.0, -0.5, -0.5, DEAD]]
    assert select_nodes(scores, 5, torch.tensor([4, 2])).pack.tolist() == [0, 1, 2, 4, 5]
    assert select_nodes(scores, 2).pack.tolist() == [0, 4]
    full = select_nodes(scores, 7, torch.tensor([2, 1]))
    assert full.pack.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert full.scores.tolist() == [[0.0, -1.0, DEAD, DEAD], [0.0, DEAD, DEAD, DEAD]]


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


def walk(
    tokens: list[int], parents: list[int], alive: list[bool], targets: list[int]
) -> tuple[list[int], int]:
    """Accepted nodes below the root, and the bonus: the definition."""
    node, path = 0, []
    while True:
        children = [i for i, p in enumerate(parents, start=1) if p == node and alive[i]]
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
    scores = path_scores(parents, seed)
    alive = [True, *(score > DEAD for score in scores)]
    tokens = [int(t) for t in torch.randint(0, 3, (nodes,), generator=generator)]
    # Living siblings are distinct tokens: number the ones that are not. Dead nodes have any, -1
    # among them, as padding has.
    for node in range(1, nodes):
        if not alive[node]:
            tokens[node] -= 1
            continue
        above = parents[node - 1]
        twins = [tokens[i] for i in range(1, node) if parents[i - 1] == above and alive[i]]
        while tokens[node] in twins:
            tokens[node] += 1
    targets = [int(t) for t in torch.randint(-1, 4, (nodes,), generator=generator)]
    depth = max(len(path) for path in paths_of(parents)) - 1
    tree = build_tree(
        torch.tensor([tokens[0]]),
        torch.tensor([tokens[1:]]).long(),
        torch.tensor([parents]).long(),
        torch.tensor([scores]),
        depth,
    )
    got = accept_path(torch.tensor([targets]), tree, depth + 1)
    path, bonus = walk(tokens, parents, alive, targets)
    length = int(got.lengths[0])
    assert got.path[0, : length + 1].tolist() == [0, *path]
    assert int(got.bonus[0]) == bonus
    root_only = accept_path(torch.tensor([targets]), tree, depth + 1, torch.tensor([0]))
    assert (int(root_only.lengths[0]), int(root_only.bonus[0])) == (0, targets[0])


def test_a_dead_node_is_never_accepted() -> None:
    """An empty mask row leaves the choice -1, which is also a dead node's token here."""
    root, parents = torch.tensor([4]), torch.tensor([[0, 1, 2]])
    for living in (0, 1):
        scores = torch.tensor([[-1.0] * living + [DEAD] * (3 - living)])
        tokens = torch.tensor([[5] * living + [-1] * (3 - living)])
        targets = torch.tensor([[5] * living + [-1] * (4 - living)])
        for tree in (
            build_chain(root, tokens, scores),
            build_tree(root, tokens, parents, scores, 3),
        ):
            got = accept_path(targets, tree, 4)
            assert (got.lengths.tolist(), got.bonus.tolist()) == ([living], [-1])


def test_a_chain_is_a_tree() -> None:
    root, tokens = torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [6, 7, 8]])
    scores = torch.tensor([[-0.5, -1.0, torch.nan], [-0.25, DEAD, DEAD]])
    for given_scores in (scores, scores.nan_to_num(-3.0, neginf=-4.0)):
        for count in range(4):
            parents = torch.arange(count).expand(2, count)
            some = tokens[:, :count], given_scores[:, :count]
            chain = build_chain(root, *some)
            tree = build_tree(root, some[0], parents, some[1], count)
            alive = (tree.scores > DEAD)[:, :, None]
            # Which nodes a dead one sees is of no interest.
            chain = chain._replace(ancestors=chain.ancestors & alive)
            tree = tree._replace(ancestors=tree.ancestors & alive)
            for name, got, want in zip(tree._fields, chain, tree, strict=True):
                assert torch.equal(got, want), name


def test_trees_are_traced_without_their_numbers() -> None:
    """A recording of one batch is right for another one, of another size."""

    def work(root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        count = torch.ones_like(root)
        chosen = select_nodes(F.pad(scores, (1, 0)), 5, count + 2)
        left = chosen.scores[:, 1:]
        tree = build_tree(root, tokens, parents, left, 3)
        accepted = accept_path(tree.tokens.roll(-1, 1), tree, 4)
        return *chosen, *tree, *build_chain(root, tokens, left), *accepted

    def inputs(batch: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        parents = torch.tensor([[0, 0, 1]]).expand(batch, 3)
        tokens = torch.randint(0, 9, (batch, 4), generator=generator)
        scores = -torch.rand(batch, 3, generator=generator).cumsum(1)
        return tokens[:, 0], tokens[:, 1:], parents, scores

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(work, inputs(2, 0), check_trace=False)
    for given_inputs in (inputs(2, 1), inputs(3, 2)):
        got, want = traced(*given_inputs), work(*given_inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
