"""Masks, noise, choices, candidates, and trees."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from overlap_spec import kernels
from overlap_spec.kernels.sampling import negative_exponentials
from tests.support.kernel_harness import Draw, Inputs, case, equal, reference, small, triton


def _mask_rows(i: Inputs, rows: int, vocab: int) -> Tensor:
    """Mask rows: full, half, nearly empty and empty ones."""
    words = -(-vocab // 32)
    drawn = i.integers(-(2**31), 2**31, rows, words)
    sparse = drawn & i.integers(-(2**31), 2**31, rows, words) & (1 << 7)
    kind = i.integers(0, 4, rows, 1)
    some = torch.where(kind == 0, -1, torch.where(kind == 1, drawn, sparse))
    return torch.where(kind == 3, 0, some).to(torch.int32)


def _places(i: Inputs, count: int, rows: int) -> Tensor:
    """Which of so many mask rows each has; nearly half have none."""
    return torch.where(i.bools(0.6, count), i.integers(0, rows, count), -1)


@case
def apply_bitmask(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    count, vocab = i.size(1, 6), i.size(1, 150)
    logits, rows = i.normal(count, vocab + 3)[:, :vocab], _mask_rows(i, count, vocab)
    logits = torch.where(i.bools(0.01, count, vocab), torch.nan, logits)
    places = None
    if draw(st.booleans()):
        rows = rows[: i.size(1, count)]
        places = _places(i, count, len(rows))
    mine, theirs = logits.clone(), logits.clone()
    with small("apply_bitmask"):
        triton(kernels.apply_bitmask, mine, rows, places)
    reference(kernels.apply_bitmask, theirs, rows, places)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num(0.0, 1e4, -1e4), theirs.nan_to_num(0.0, 1e4, -1e4))


@case
def apply_penalties(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    count, vocab = i.size(1, 6), i.size(1, 150)
    logits = i.normal(count, vocab, dtype=torch.float32)
    counts = (i.integers(0, 3, count, vocab) * i.bools(0.3, count, vocab)).int()
    factors = i.uniform(count) + 0.5, i.uniform(count) - 0.5, i.uniform(count) - 0.5
    args = counts, i.bools(i.one_of(0.0, 0.3), count, vocab), *factors
    mine, theirs = logits.clone(), logits.clone()
    with small("apply_bitmask"):
        triton(kernels.apply_penalties, mine, *args)
    reference(kernels.apply_penalties, theirs, *args)
    torch.testing.assert_close(mine, theirs)


@case
def noise_keys(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    count = i.size(1, 300)
    args = i.integers(-(2**63), 2**63 - 1, count), i.integers(0, 2**40, count), i.size(0, 3)
    equal(triton(kernels.noise_keys, *args), reference(kernels.noise_keys, *args))


def _keys(i: Inputs, count: int) -> Tensor:
    return i.integers(-(2**63), 2**63 - 1, count)


def _right_draw(logits: Tensor, heat: float, key: Tensor, token: int) -> bool:
    """Whether the noise leaves the token ahead of all others, or within rounding of that."""
    tokens = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    noise = -(-negative_exponentials(key[None], tokens)[0].double()).log()
    score = logits.double() / heat + noise
    return float(score[token]) >= float(score.max()) - 1e-5 * (1 + float(score.max().abs()))


def _right_kept(
    logits: Tensor, heat: float, key: Tensor, token: int, filters: tuple[float, ...] = ()
) -> bool:
    """Whether a cut within 1e-5 of the filters' leaves the token, and the noise chooses it then."""
    if not filters:
        return _right_draw(logits, heat, key, token)
    top_k, top_p, min_p = filters
    ranked, order = logits.double().sort(descending=True, stable=True)
    weights = ((ranked - ranked[0]) / heat).exp()[: int(top_k)]
    before = weights.cumsum(0) - weights
    total, slack = weights.sum(), 1e-5
    surely = (before < (top_p - slack) * total) & (weights >= min_p + slack)
    maybe = (before < (top_p + slack) * total) & (weights >= min_p - slack)
    for count in range(max(1, int(surely.sum())), max(1, int(maybe.sum())) + 1):
        kept = torch.full_like(logits, -torch.inf)
        kept[order[:count]] = logits[order[:count]]
        if _right_draw(kept, heat, key, token):
            return True
    return False


def _compare(masked: Tensor, got: Tensor, want: Tensor, *settings: Tensor) -> None:
    """Equal, ties and all, but for noise that decides within rounding.

    ``settings``: temperature, key, and the three filters where there are any.
    """
    for row, (mine, theirs) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
        heat = float(settings[0][row]) if settings else 0.0
        filters = tuple(float(each[row]) for each in settings[2:])
        if theirs < 0 or heat == 0:
            # The reference may return any of several equal maxima; the kernel the first.
            best = int((masked[row] == masked[row].max()).int().argmax())
            assert mine == (theirs if theirs < 0 else best)
        elif mine != theirs:
            assert _right_kept(masked[row], heat, settings[1][row], mine, filters)
            assert _right_kept(masked[row], heat, settings[1][row], theirs, filters)


def _masked(logits: Tensor, rows: Tensor | None, places: Tensor | None) -> Tensor:
    masked = logits.clone()
    if rows is not None:
        reference(kernels.apply_bitmask, masked, rows, places)
    return masked


def _choice(i: Inputs, sampled: bool) -> None:
    count, vocab = i.size(1, 4), i.size(1, 130)
    logits = i.normal(count, vocab + 3)[:, :vocab] * 3
    if i.one_of(True, False):
        logits = logits.round()
    logits = torch.where(i.bools(i.one_of(0.0, 0.02), count, vocab), torch.nan, logits)
    kind = i.size(0, 2)
    rows = _mask_rows(i, count, vocab) if kind else None
    places = _places(i, count, count) if kind == 2 else None
    settings: tuple[Tensor, ...] = ()
    if sampled:
        settings = i.uniform(count) * i.integers(0, 4, count), _keys(i, count)
    with small("choose"):
        got = triton(kernels.masked_choose, logits.clone(), rows, places, *settings)
        if rows is None:
            equal(triton(kernels.choose, logits, *settings), got)
    want = reference(kernels.masked_choose, logits.clone(), rows, places, *settings)
    _compare(_masked(logits, rows, places), got, want, *settings)


@case
def greedy_choice(draw: Draw, device: torch.device) -> None:
    _choice(Inputs(draw, device), sampled=False)


@case
def sampled_choice(draw: Draw, device: torch.device) -> None:
    _choice(Inputs(draw, device), sampled=True)


@case
def filtered_choice(draw: Draw, device: torch.device) -> None:
    """Rows of all kinds side by side, most of them with many equal logits."""
    i = Inputs(draw, device)
    count, vocab = 9, i.size(1, 130)
    spread = i.integers(0, 4, count, 1)
    logits = (i.normal(count, vocab + 3)[:, :vocab] * spread).round()
    logits = logits + (spread == 3) * i.normal(count, vocab)
    broken = i.integers(0, 10 * vocab, count, 1) == torch.arange(vocab, device=device)
    logits = torch.where(broken, torch.nan, logits)
    heat = i.bools(0.9, count) * (0.2 + 2 * i.uniform(count))
    keys = _keys(i, count)
    top_k = torch.where(
        i.bools(0.5, count), i.integers(1, 6, count), i.integers(1, vocab + 2, count)
    )
    filters = (
        torch.where(i.bools(0.4, count), 2**40, top_k),
        torch.where(i.bools(0.4, count), 2.0, i.integers(0, 100, count) / 100 + 0.005),
        torch.where(i.bools(0.1, count), 1.0, i.bools(0.4, count) * i.uniform(count) ** 3),
    )
    rows = _mask_rows(i, count, vocab) if draw(st.booleans()) else None
    places = _places(i, count, count)
    with small("choose__filtered"):
        if rows is None:
            got = triton(kernels.choose, logits, heat, keys, filters)
        else:
            args = rows, places, heat, keys, filters
            got = triton(kernels.masked_choose, logits.clone(), *args)
    masked = _masked(logits, rows, places)
    want = reference(kernels.choose, masked, heat, keys, filters)
    _compare(masked, got, want, heat, keys, *filters)


@case
def scarce_choice(draw: Draw, device: torch.device) -> None:
    """Whatever the noise, of two possible tokens one is chosen, over chunks that hold none."""
    i = Inputs(draw, device)
    count, vocab = 24, 200
    logits, keys = i.normal(count, vocab), _keys(i, count)
    allowed = i.distinct(2, 160).sort().values + 40
    words = torch.zeros(count, 7 * 32, dtype=torch.int64, device=device)
    words[:, allowed] = 1
    rows = (words.view(count, 7, 32) << torch.arange(32, device=device)).sum(-1).to(torch.int32)
    heat = torch.full((count,), 50.0, device=device)
    with small("choose"):
        got = triton(kernels.masked_choose, logits, rows, None, heat, keys)
    assert set(got.tolist()) == set(allowed.tolist())


@case
def top_candidates(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    rows, vocab = i.size(1, 5), i.size(9, 200)
    count = i.size(1, 9)
    logits = i.normal(rows, vocab + 1)[:, 1:] * 2
    if draw(st.booleans()):
        logits = logits.round()
    offsets = i.integers(0, 1000, vocab) if draw(st.booleans()) else None
    noise = None
    if draw(st.booleans()):
        heat = i.uniform(rows) * i.integers(0, 3, rows)
        noise = kernels.Noise(heat, _keys(i, rows))
    with small("top_candidates"):
        scores, tokens = triton(kernels.top_candidates, logits, count, offsets, noise)
    want, _ = reference(kernels.top_candidates, logits, count, offsets, noise)
    log_probs = logits.double()
    if noise is not None:
        # The share of a token whose weight is 0 in float32 is beyond the reference.
        scores, want = scores.clamp(min=-60), want.clamp(min=-60)
        names = torch.arange(vocab, device=device) + (0 if offsets is None else offsets)
        gumbel = -(-negative_exponentials(noise.keys, names.int()).double()).log()
        warm = noise.temperature[:, None].double()
        log_probs = torch.where(warm > 0, log_probs / warm + gumbel, log_probs)
    torch.testing.assert_close(scores, want, rtol=5e-6, atol=5e-6)
    log_probs = log_probs.log_softmax(-1)
    if noise is not None:
        log_probs = log_probs.clamp(min=-60)
    targets = torch.arange(vocab, device=device) + (0 if offsets is None else offsets)
    for row in range(rows):
        # Ties are open: the tokens must have these scores, and be distinct ones.
        found = set()
        for score, token in zip(scores[row], tokens[row], strict=True):
            ids = (targets == token).nonzero()[:, 0].tolist()
            near = [t for t in ids if abs(log_probs[row, t] - score) < 2e-5 and t not in found]
            assert near
            found.add(near[0])


@case
def rerank(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    batch, candidates = i.size(1, 4), i.one_of(i.size(1, 90), i.size(91, 900))
    scores = -i.integers(0, i.one_of(2, 6, 10**6), batch, candidates).float()
    scores = torch.where(i.bools(i.one_of(0.0, 0.3), batch, candidates), -torch.inf, scores)
    count = i.size(1, candidates)
    equal(triton(kernels.rerank, scores, count), reference(kernels.rerank, scores, count))


@case
def grow(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    batch, k, seen = i.size(1, 4), i.size(1, 10), i.size(0, 40)
    score, added = (-i.integers(0, i.one_of(2, 10**6), batch * n, k).float() for n in (1, k))
    added = torch.where(i.bools(i.one_of(0.0, 0.2), batch * k, k), -torch.inf, added)
    # A broken draft head must not lead past the candidates, nor disturb another tree.
    added[:k] = torch.where(i.bools(i.one_of(0.0, 0.1), k, k), torch.nan, added[:k])
    choices = i.integers(0, 10**6, batch * k, k)
    masks = (
        None,
        i.bools(0.5, batch, k, seen),
        torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k),
    )
    mask = masks[i.size(0, 2)]
    mine, theirs = added.clone(), added.clone()
    got = triton(kernels.grow, score, mine, choices, mask)
    want = reference(kernels.grow, score, theirs, choices, mask)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert ((got.best >= 0) & (got.best < k * k)).all()
    sound = 1 if added.isnan().any() else 0
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            equal(a[sound:], b[sound:])


def _path_scores(i: Inputs, parents: Tensor) -> Tensor:
    """Scores of drafted nodes: below their parents' or equal, dead at random places and below."""
    batch, drafted = parents.shape
    step = -i.integers(0, i.one_of(2, 10**6), batch, drafted).float()
    step = torch.where(i.bools(i.one_of(0.0, 0.1, 0.5), batch, drafted), -torch.inf, step)
    scores = torch.zeros(batch, drafted + 1, device=i.device)
    for node in range(1, drafted + 1):
        above = scores.gather(1, parents[:, node - 1 : node])
        scores[:, node] = (above + step[:, node - 1 : node])[:, 0]
    nan = i.bools(i.one_of(0.0, 0.5), batch, drafted) & (scores[:, 1:] == -torch.inf)
    return torch.where(nan, torch.nan, scores[:, 1:])


@case
def select_nodes(draw: Draw, device: torch.device) -> None:
    """Scores of no tree, too: what is defined for them must hold."""
    i = Inputs(draw, device)
    batch, nodes = i.one_of((i.size(1, 9), i.size(1, 20)), (129, 65))
    scores = -i.integers(0, i.one_of(2, 6, 10**6), batch, nodes + 1).float()[:, :nodes]
    scores = torch.where(i.bools(i.one_of(0.0, 0.3), batch, nodes), -torch.inf, scores)
    scores = torch.where(i.bools(i.one_of(0.0, 0.1), batch, nodes), torch.nan, scores)
    scores[:, 0] = 0.0
    most = i.integers(0, nodes + 2, batch) if draw(st.booleans()) else None
    args = scores, i.size(batch, batch * nodes), most
    got, want = triton(kernels.select_nodes, *args), reference(kernels.select_nodes, *args)
    equal(got.pack, want.pack)
    equal(got.scores, want.scores)


def _trees(i: Inputs) -> kernels.Tree:
    """Random trees, by the reference; few distinct tokens, so that paths are found."""
    batch, drafted = i.size(1, 4), i.size(0, 40)
    ceiling = torch.arange(1, drafted + 1)
    near = i.one_of(1, 3, 1000)
    parents = torch.stack(
        [
            (ceiling - 1 - i.integers(0, near, drafted).cpu() % ceiling).clamp(min=0)
            for _ in range(batch)
        ]
    ).to(i.device)
    # Siblings are distinct: a node's token is its rank among them, and some spread.
    rank = (
        torch.stack([(parents[:, :n] == parents[:, n : n + 1]).sum(1) for n in range(drafted)], 1)
        if drafted
        else parents
    )
    scores = _path_scores(i, parents)
    # What a dead node's parent is must not matter, nor may its token be taken for a choice.
    dead = ~(scores > -torch.inf)
    parents = torch.where(dead & i.bools(0.5, batch, drafted), -1, parents)
    rank = torch.where(dead & i.bools(0.5, batch, drafted), -1, rank)
    args = i.integers(0, 3, batch), rank, parents, scores, drafted
    want = reference(kernels.build_tree, *args)
    got = triton(kernels.build_tree, *args)
    for name, mine, theirs in zip(kernels.Tree._fields, got, want, strict=True):
        assert torch.equal(mine, theirs), name
    return got


@case
def build_tree(draw: Draw, device: torch.device) -> None:
    _trees(Inputs(draw, device))


@case
def accept_path(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    if draw(st.booleans()):
        tree = _trees(i)
    else:
        batch, drafted = i.size(1, 4), i.size(0, 9)
        tokens = i.integers(-1, 2, batch, drafted)
        above = torch.arange(drafted, device=device).expand(batch, drafted)
        tree = kernels.build_chain(i.integers(0, 2, batch), tokens, _path_scores(i, above))
    batch, nodes = tree.tokens.shape
    targets = i.integers(-1, 2, batch, nodes)
    limits = i.integers(0, 5, batch) if draw(st.booleans()) else None
    width = nodes + i.size(0, 2)
    got = triton(kernels.accept_path, targets, tree, width, limits)
    want = reference(kernels.accept_path, targets, tree, nodes, limits)
    equal(got.lengths, want.lengths)
    equal(got.bonus, want.bonus)
    assert got.path.shape == (batch, width)
    assert ((got.path >= 0) & (got.path < nodes)).all()
    for mine, theirs, length in zip(got.path, want.path, want.lengths.tolist(), strict=True):
        equal(mine[: length + 1], theirs[: length + 1])


@case
def after_tokens(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    states, width, length, tokens, count = (
        i.size(1, 9),
        i.size(1, 12),
        i.size(1, 6),
        7,
        i.size(1, 70),
    )
    moves = (i.integers(0, states, states * width) * width).int()
    here = (i.integers(0, states, count) * width).int()
    texts = i.integers(0, width, tokens, length).int()
    # A part of a wider tensor, as drafts hand it over.
    chosen = i.integers(0, tokens, count, 2)[:, 1]
    given = moves, here, texts, chosen
    equal(triton(kernels.after_tokens, *given), reference(kernels.after_tokens, *given))


@case
def legal_candidates(draw: Draw, device: torch.device) -> None:
    i = Inputs(draw, device)
    rows, vocab, states, width, listed = i.size(1, 6), i.size(9, 40), i.size(3, 6), 12, 8
    moves = (i.integers(0, states, states, width) * width).int()
    # Where nothing can come.
    moves[1] = width
    few = i.integers(-1, vocab, states, listed + 1).int()
    few[:, -1] = i.integers(0, 2, states)
    few[0, :-1] = torch.randperm(vocab, device=device)[:listed]
    few[1] = -1
    # A token stands once in a list.
    for row in few[2:]:
        first = torch.stack([(row[:n] != row[n]).all() for n in range(listed)])
        row[:-1].masked_fill_(~first, -1)
    texts = i.integers(0, width, vocab, 3).int()
    here = (i.integers(0, states, rows) * width).int()
    standing = kernels.GrammarStanding(kernels.StateTables(moves.flatten(), texts, few), here)
    own, offsets, draft_ids = vocab, None, None
    if draw(st.booleans()):
        # Every second token cannot be drafted.
        own = (vocab + 1) // 2
        offsets = torch.arange(own, device=device)
        draft_ids = torch.full((vocab,), -1, device=device)
        draft_ids[::2] = offsets
    # Of numbers that are alike either may be drafted.
    ranks = torch.stack([i.distinct(own, own) for _ in range(rows)])
    logits, k, noise = ((ranks - own // 2) / 4).to(i.dtype), i.size(1, min(own, 9)), None
    if draw(st.booleans()):
        noise = kernels.Noise(i.integers(0, 3, rows).float(), _keys(i, rows))
    given: tuple[object, ...] = logits, k, standing, offsets, draft_ids, noise
    if draw(st.booleans()):
        most = min(own, max(k, listed) + i.size(0, 3))
        given = *given, reference(kernels.top_candidates, logits, most, offsets, noise)
    scores, tokens = triton(kernels.legal_candidates, *given)
    want, theirs = reference(kernels.legal_candidates, *given)
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=2e-5)
    living = want > -torch.inf
    equal(tokens[living], theirs[living])
    assert ((tokens >= 0) & (tokens < vocab)).all()
