"""The choice of tokens: filters, noise, penalties, and losslessness on trees."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap_spec.errors import InvalidRequest
from overlap_spec.kernels import (
    accept_path,
    apply_bitmask,
    build_tree,
    choose,
    coins,
    filter_probs,
    masked_choose,
    noise_keys,
)
from overlap_spec.kernels.sampling import apply_penalties, draw, negative_exponentials
from overlap_spec.types import Request, SamplingParams
from overlap_spec.worker import sampler as sampler_module
from overlap_spec.worker.sampler import Masks, Nodes, Sampler, token_logprobs
from overlap_spec.worker.tables import RowTables
from tests.support.tiers import few


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """bool ``(L, V)`` → mask rows int32 ``(L, ceil(V / 32))``."""
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    words = -(-allowed.shape[1] // 32)
    bits = np.pad(bits, ((0, 0), (0, 4 * words - bits.shape[1])))
    return torch.from_numpy(bits.view(np.int32))


def test_penalties_by_hand() -> None:
    """Repetition makes what was seen less likely whatever its sign; a token twice in the output
    has presence once and frequency twice."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    counts, seen = torch.tensor([[2, 0, 0, 0]]).int(), torch.tensor([[True, True, False, False]])
    factors = (torch.tensor([value]) for value in (4.0, 0.5, 0.25))
    apply_penalties(logits, counts, seen, *factors)
    assert logits.tolist() == [[0.5 - 0.5 - 2 * 0.25, -8.0, 2.0, -2.0]]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70, 129])
def test_kernel_apply_bitmask(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    allowed = torch.rand(5, vocab, generator=generator) < 0.5
    logits = torch.randn(5, vocab, generator=generator)
    masked = logits.clone()
    apply_bitmask(masked, pack(allowed))
    assert torch.equal(masked, logits.masked_fill(~allowed, -torch.inf))
    some = logits.clone()
    apply_bitmask(some, pack(allowed)[[1, 4]], torch.tensor([-1, 0, -1, -1, 1]))
    assert torch.equal(some[[0, 2, 3]], logits[[0, 2, 3]])
    assert torch.equal(some[[1, 4]], masked[[1, 4]])


def test_filters_agree_with_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 2
    for top_k, top_p, min_p in itertools.product([3, 17, 50], [0.3, 0.9, 2.0], [0.0, 0.2]):
        kept = filter_probs(
            logits.softmax(-1),
            torch.full((40,), top_k),
            torch.full((40,), top_p),
            torch.full((40,), min_p),
        )
        ids = torch.zeros(40, 1, dtype=torch.int64)
        warped = TopKLogitsWarper(top_k)(ids, logits)
        if top_p < 1:
            warped = TopPLogitsWarper(top_p)(ids, warped)
        if min_p:
            warped = MinPLogitsWarper(min_p)(ids, warped)
        assert torch.equal(kept > 0, warped > -torch.inf), (top_k, top_p, min_p)


def test_coins_are_uniform_and_depend_on_seed_position_and_purpose_alone() -> None:
    seeds = torch.arange(-300, 300).repeat_interleave(100)
    positions = torch.arange(100).repeat(600)
    each = [coins(noise_keys(seeds, positions, purpose)) for purpose in range(4)]
    for drawn in each:
        assert drawn.min() >= 0
        assert drawn.max() < 1
        counts = torch.histc(drawn, 64, 0, 1).numpy()
        assert stats.chisquare(counts).pvalue > 1e-3
        neighbours = np.corrcoef(drawn[:-1].numpy(), drawn[1:].numpy())[0, 1]
        assert abs(neighbours) < 0.02
    between = np.corrcoef(torch.stack(each).numpy()) - np.eye(4)
    assert np.abs(between).max() < 0.02
    order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(1))
    assert torch.equal(coins(noise_keys(seeds[order], positions[order])), each[0][order])


def test_noise_is_exponential_independent_and_the_same_in_any_company() -> None:
    rows, vocab = 300, 3001
    keys = noise_keys(torch.arange(rows), torch.full((rows,), 9))
    tokens = torch.arange(vocab, dtype=torch.int32)
    noise = -negative_exponentials(keys, tokens)
    assert noise.min() > 0
    assert noise.max() < 17
    assert stats.kstest(noise.flatten()[::9].numpy(), "expon").pvalue > 1e-3
    # The least of many decides a choice: small ones must not be coarse.
    assert stats.kstest(noise.amin(1).double().numpy() * vocab, "expon").pvalue > 1e-3
    uniform = (-noise.double()).exp() - 0.5
    for lag in (1, 2, 32):
        for one, other in ((uniform[:, lag:], uniform[:, :-lag]), (uniform[lag:], uniform[:-lag])):
            scale = 12 * (one * other).sum() / one.numel() ** 0.5
            assert abs(float(scale)) < 4.5
    for row in (0, 7, rows - 1):
        alone = negative_exponentials(keys[row : row + 1], tokens[5:])
        assert torch.equal(alone, -noise[row : row + 1, 5:])


def test_zero_mass_never_yields_a_forbidden_token() -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0], [0.3, 0.7, 0.0], [1e-45, 0.0, 0.0], [0.0, 0.0, 1e-38]])
    for seed in range(200):
        keys = noise_keys(torch.arange(4), torch.full((4,), seed))
        token = draw(weights.clone(), keys)
        assert (weights.gather(1, token[:, None]) > 0).all()
    empty = torch.full((2, 3), -torch.inf)
    warm = torch.tensor([0.0, 1.0])
    assert choose(empty, warm, keys[:2]).tolist() == [-1, -1]
    broken = torch.tensor([[0.0, torch.nan, 1.0]] * 2)
    assert choose(broken, warm, keys[:2]).tolist() == [-2, -2]


def test_filters_cut_the_masked_ranking_before_the_noise() -> None:
    """Allowed are 4, 1, 1, 1, 2 and 1 parts in ids' order; 8 parts of id 2 are forbidden."""
    parts = torch.tensor([4.0, 1.0, 8.0, 1.0, 1.0, 2.0, 1.0])
    allowed = parts < 8
    off = (99, 2.0, 0.0)
    #          filters            kept ids in order, and their parts
    expected = {
        off: ([0, 1, 3, 4, 5, 6], [4, 1, 1, 1, 2, 1]),
        (3, 2.0, 0.0): ([0, 1, 5], [4, 1, 2]),
        (99, 0.65, 0.0): ([0, 1, 5], [4, 1, 2]),
        (4, 0.7, 0.0): ([0, 5], [4, 2]),
        (99, 2.0, 0.3): ([0, 5], [4, 2]),
        (99, 0.75, 0.2): ([0, 1, 3, 5], [4, 1, 1, 2]),
        (1, 0.01, 1.0): ([0], [1]),
    }
    count = 4000
    keys = noise_keys(torch.arange(count), torch.arange(count) % 7)
    heat = torch.ones(count)
    chosen = {}
    for (top_k, top_p, min_p), (ids, shares) in expected.items():
        filters = torch.full((count,), top_k), torch.full((count,), top_p)
        logits, rows = parts.log().repeat(count, 1), pack(allowed[None]).repeat(count, 1)
        limits = (*filters, torch.full((count,), min_p))
        got = masked_choose(logits, rows, None, heat, keys, limits)
        chosen[top_k, top_p, min_p] = got
        counts = torch.bincount(got, minlength=7)
        assert counts[ids].sum() == count
        if len(ids) > 1:
            wanted = np.array(shares) / sum(shares) * count
            assert stats.chisquare(counts[ids].numpy(), wanted).pvalue > 1e-4
    # The noise is the token's own: what the filters keep of the choices does not change.
    for filters, got in chosen.items():
        same = torch.isin(chosen[off], torch.tensor(expected[filters][0]))
        assert torch.equal(got[same], chosen[off][same])


VOCAB = 6
# Root 0; children of the root 2 and 4; below 2: 1 and 2; below 4: 4; below (2, 2): 0.
TREE_TOKENS = [5, 2, 4, 1, 2, 4, 0]
TREE_PARENTS = [0, 0, 1, 1, 2, 4]
TREE_PATHS = [(), (2,), (4,), (2, 1), (2, 2), (4, 4), (2, 2, 0)]
PROMPT, OUTPUT = (1, 5, 3), [5]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.25},
    {"temperature": 1.0, "repetition_penalty": 1.6},
    {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "logit_bias": {2: 1.0, 0: -1.0}},
    {"temperature": 1.0, "min_tokens": 3},
    {"temperature": 1.0, "allowed_token_ids": [0, 2, 4], "logit_bias": {2: 1.0, 3: 9.0}},
    {"temperature": 1.0, "bad_words": ["a"], "presence_penalty": 0.4},
]
# As tokens: wherever it stands; at the root; below it; over output and path; further back.
BANNED = ((1,), (5, 4), (4, 4), (5, 2, 1), (2, 3), (0, 5, 2))


def expected_probs(
    logits: np.ndarray, allowed: np.ndarray, path: tuple[int, ...], s: SamplingParams
) -> np.ndarray:
    """The distribution after ``path`` by the definitions, one token at a time."""
    z = logits.astype(np.float64).copy()
    for token, value in s.logit_bias.items():
        z[token] += value
    history = [*OUTPUT, *path]
    for token in range(VOCAB):
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            z[token] = -np.inf
        ends = [tuple([*history, token][-len(each) :]) for each in BANNED]
        if s.bad_words and any(end == each for end, each in zip(ends, BANNED, strict=True)):
            z[token] = -np.inf
    if len(history) < s.min_tokens:
        z[3] = -np.inf
    repetition = s.repetition_penalty or 1.0
    for token in range(VOCAB):
        count = history.count(token)
        if count or token in PROMPT:
            z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        z[token] -= s.presence_penalty * (count > 0) + s.frequency_penalty * count
    z[~allowed] = -np.inf
    p = np.exp((z - z.max()) / s.temperature)
    p /= p.sum()
    order = sorted(range(VOCAB), key=lambda t: (-p[t], t))[: s.top_k if s.top_k else VOCAB]
    total, mass, kept = p[order].sum(), 0.0, []
    for token in order:
        if mass >= (s.top_p or 1.0) * total and (s.top_p or 1.0) < 1:
            break
        kept.append(token)
        mass += p[token]
    kept = [t for t in kept if p[t] >= s.min_p * p.max()]
    q = np.zeros(VOCAB)
    q[kept] = p[kept]
    return q / q.sum()


@pytest.mark.parametrize("masked", few((False, True), True))
@pytest.mark.parametrize(
    "setting",
    # What filters keep has two tests above, and looking for words along each path takes long.
    few(SETTINGS, *(s for s in SETTINGS if not {"bad_words", "top_p", "min_p"} & {*s})),
    ids=lambda s: "-".join(s),
)
def test_tree_verification_has_plain_samplings_distribution(
    setting: dict[str, Any], masked: bool
) -> None:
    """Chi-square of what 20,000 seeds emit: first token, and second where the first was drafted."""
    count = 20_000
    params = SamplingParams(**setting)
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(len(TREE_PATHS), VOCAB, generator=generator)
    allowed = torch.rand(len(TREE_PATHS), VOCAB, generator=generator) < 0.6
    allowed[:, 2] = True
    if not masked:
        allowed[:] = True
    tables = RowTables(count, 1, VOCAB, torch.device("cpu"))
    request = Request(0, PROMPT, params, None, 99, frozenset({3}), 0, 0)
    request = replace(request, banned=BANNED if params.bad_words else ())
    tables.assign(0, request)
    tables.write(0, request, tuple(OUTPUT))
    features = tables.features([0])
    wide = [tables.output_counts, tables.in_prompt, tables.wide("bias", torch.float32)]
    wide += [tables.wide("stops", torch.bool), tables.banned, tables.recent]
    for value in [*vars(tables).values(), *tables.buffers(), *wide]:
        if isinstance(value, torch.Tensor):
            value[:] = value[0].clone()
    tables.seed[:count] = torch.arange(count) * 7919 + 13
    tree = build_tree(
        torch.full((count,), TREE_TOKENS[0]),
        torch.tensor(TREE_TOKENS[1:]).expand(count, -1),
        torch.tensor(TREE_PARENTS).expand(count, -1),
        torch.zeros(count, len(TREE_PARENTS)),
        3,
    )
    nodes = len(TREE_PATHS)
    rows = torch.arange(count).repeat_interleave(nodes)
    positions = (tree.depths + len(PROMPT) + len(OUTPUT)).flatten()
    batch = Nodes(rows, positions, tree, None)
    sampler = Sampler(tables)
    logits = table.repeat(count, 1)
    masks = Masks(pack(allowed).repeat(count, 1), None)
    processed = sampler.process(logits, batch, features)
    choices = sampler.choose(processed, batch, features, masks).view(count, nodes)
    accepted = accept_path(choices, tree, 4)
    emitted = choices.gather(1, accepted.path)

    seen: dict[tuple[int, ...], int] = {}
    for run, length in zip(emitted.tolist(), accepted.lengths.tolist(), strict=True):
        key = tuple(run[: min(length, 1) + 1])
        seen[key] = seen.get(key, 0) + 1
    expected: dict[tuple[int, ...], float] = {}
    root = expected_probs(table[0].numpy(), allowed[0].numpy(), (), params)
    for token in range(VOCAB):
        if token not in (2, 4):
            expected[token,] = root[token]
            continue
        node = TREE_PATHS.index((token,))
        after = expected_probs(table[node].numpy(), allowed[node].numpy(), (token,), params)
        for second in range(VOCAB):
            expected[token, second] = root[token] * after[second]
    assert {k for k in seen if expected[k] == 0} == set()
    keys = [k for k in expected if expected[k] * count >= 5]
    observed = np.array([seen.get(k, 0) for k in keys], float)
    wanted = np.array([expected[k] for k in keys]) * count
    assert observed.sum() > 0.98 * count
    wanted *= observed.sum() / wanted.sum()
    if len(keys) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Largest(TorchDispatchMode):
    """Remembers the most entries that any new tensor has."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        new = (x for x in tensors(out) if x.untyped_storage()._cdata not in given)
        self.entries = max([self.entries, *(x.numel() for x in new)])
        return out


@pytest.mark.parametrize("is_packed", [False, True])
def test_penalties_take_memory_for_a_block_of_nodes_alone(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    batch, nodes, vocab, block = 6, len(TREE_PATHS), 40, 3
    params = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, min_tokens=4,
        logit_bias={7: 1.5},
    )  # fmt: skip
    tables = RowTables(batch, 1, vocab, torch.device("cpu"))
    for row in range(batch):
        request = Request(row, PROMPT[row % 2 :], params, None, 99, frozenset({3}), 0, 0)
        tables.assign(row, request)
        tables.write(row, request, tuple(OUTPUT[: row + 1]))
    tree = build_tree(
        torch.full((batch,), TREE_TOKENS[0]),
        torch.tensor(TREE_TOKENS[1:]).expand(batch, -1),
        torch.tensor(TREE_PARENTS).expand(batch, -1),
        torch.zeros(batch, len(TREE_PARENTS)),
        3,
    )
    rows = torch.arange(batch).repeat_interleave(nodes)
    positions = (tree.depths + len(PROMPT)).flatten()
    pack = torch.randperm(batch * nodes, generator=generator)[: 2 * batch].sort().values
    place = Nodes(rows, positions, tree, None)
    if is_packed:
        place = Nodes(rows[pack], positions[pack], tree, pack)
    logits = torch.randn(len(place.rows), vocab, generator=generator)
    sampler, features = Sampler(tables), tables.features(range(batch))
    want = sampler.process(logits.clone(), place, features)
    assert not torch.equal(want, logits)
    monkeypatch.setattr(sampler_module, "BLOCK_ENTRIES", block * vocab + 1)
    with Largest() as largest:
        got = sampler.process(logits, place, features)
    assert torch.equal(got, want)
    assert block * vocab == largest.entries < logits.numel()
    first = sampler.process(logits[:0], place, features)
    assert first.shape == (0, vocab)


def test_a_row_keeps_nothing_of_the_bias_of_its_last_request() -> None:
    """Beside a request that has one: bias is added to every row of such a step."""
    tables = RowTables(2, 1, 40, torch.device("cpu"))
    plain, biased = SamplingParams(), SamplingParams(logit_bias={7: 50.0})
    for params in ((biased, plain), (plain, biased)):
        for row, each in enumerate(params):
            request = Request(row, (1, 2), each, None, 9, frozenset(), 0, 0)
            tables.assign(row, request)
            tables.write(row, request, ())
    place = Nodes(torch.arange(2), torch.full((2,), 2), None, None)
    logits = Sampler(tables).process(torch.zeros(2, 40), place, tables.features(range(2)))
    assert logits[:, 7].tolist() == [0.0, 50.0]
    assert logits.sum() == 50.0


def test_logprobs_are_before_temperature_and_list_no_forbidden_token() -> None:
    log_probs = torch.tensor([[1.0, 2.0, -torch.inf, 0.0]]).log_softmax(-1)
    (got,) = token_logprobs(log_probs[:, 1], *log_probs.topk(4), 4)
    want = torch.tensor([1.0, 2.0, 0.0]).log_softmax(0)
    assert got.logprob == pytest.approx(float(want[1]))
    assert [token for token, _ in got.top] == [1, 0, 3]
    assert [p for _, p in got.top] == pytest.approx([float(want[i]) for i in (1, 0, 2)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1}),
        ("seed", 1.5),
        ("logprobs", -1),
        ("temperature", "hot"),
        ("temperature", True),
    ],
)
def test_bad_sampling_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
