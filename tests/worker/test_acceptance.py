"""Thresholds and relaxed acceptance: what they emit, and how it is told."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap_spec import Engine, Grammar
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import Tree, accept_by_probability, accept_path, build_tree
from overlap_spec.types import Request, SamplingParams
from overlap_spec.worker.acceptance import AcceptanceRule
from overlap_spec.worker.sampler import Masks, Nodes, Sampler
from overlap_spec.worker.tables import RowTables, SamplingFeatures
from tests.support.tiers import few

COUNT, VOCAB, PROMPT = 12_000, 7, (1, 5, 3)
# Children of the root, and of each of these: a chain of two, and a tree.
SHAPES = {"chain": (1, 1), "tree": (3, 2)}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.3},
]


def rows_of(setting: dict[str, Any]) -> tuple[RowTables, SamplingFeatures]:
    """As many rows as seeds, all with one setting."""
    tables = RowTables(COUNT, 1, VOCAB, torch.device("cpu"))
    request = Request(0, PROMPT, SamplingParams(**setting), None, 99, frozenset({0}), 0, 0)
    tables.assign(0, request)
    tables.write(0, request, ())
    wide = [tables.output_counts, tables.in_prompt, tables.wide("bias", torch.float32)]
    wide += [tables.wide("stops", torch.bool), tables.banned]
    for value in [*vars(tables).values(), *tables.buffers(), *wide]:
        if isinstance(value, Tensor):
            value[:] = value[0].clone()
    tables.seed[:COUNT] = torch.arange(COUNT) * 7919 + 13
    tables.committed[:COUNT] = len(PROMPT) - 1
    return tables, tables.features([0])


def drafted(shape: tuple[int, int]) -> Tree:
    """Trees of a draft model whose tokens depend on the one before."""
    generator = torch.Generator().manual_seed(5)
    odds = (torch.randn(1 + VOCAB, VOCAB, generator=generator) * 1.5).softmax(-1)
    first, second = shape
    top = odds[:1].expand(COUNT, -1).multinomial(first, generator=generator)
    below = odds[1 + top.flatten()].multinomial(second, generator=generator).view(COUNT, -1)
    tokens = torch.cat([top, below], 1)
    parents = torch.tensor(
        [0] * first + [1 + n for n in range(first) for _ in range(second)]
    ).expand(COUNT, -1)
    root = torch.full((COUNT,), PROMPT[-1])
    return build_tree(root, tokens, parents, torch.zeros_like(tokens).float(), 2)


def target(tree: Tree) -> tuple[Tensor, Tensor]:
    """Logits and allowed tokens of all nodes: they depend on the last two tokens of each path."""
    generator = torch.Generator().manual_seed(3)
    size = VOCAB + 1
    table = torch.randn(size * size, VOCAB, generator=generator)
    allowed = torch.rand(size * size, VOCAB, generator=generator) < 0.7
    allowed[:, 2] = True
    parent = tree.parents.clamp(min=0)
    above = torch.where(tree.depths > 1, tree.tokens.gather(1, parent), VOCAB)
    place = torch.where(tree.depths > 0, tree.tokens * size + above, size * size - 1).flatten()
    return table[place], allowed[place]


def packed(allowed: Tensor) -> Tensor:
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    return torch.from_numpy(np.pad(bits, ((0, 0), (0, 4 - bits.shape[1]))).view(np.int32))


def emitted(
    rule: AcceptanceRule, tables: RowTables, features: SamplingFeatures, tree: Tree
) -> tuple[Tensor, Tensor, Tensor]:
    """Emitted tokens ``(COUNT, 3)``, accepted lengths, and the target's true distributions."""
    nodes = tree.tokens.shape[1]
    rows = torch.arange(COUNT).repeat_interleave(nodes)
    place = Nodes(rows, (tree.depths + len(PROMPT)).flatten(), tree, None)
    logits, allowed = target(tree)
    logits = Sampler(tables).process(logits, place, features)
    logits = logits.masked_fill(~allowed, -torch.inf)
    choices = Sampler(tables).choose(logits.clone(), place, features, None)
    masks = Masks(packed(allowed), None)
    chosen = rule(choices, logits.clone(), place, features, masks, None)
    chosen = chosen.view(COUNT, nodes)
    accepted = accept_path(chosen, tree, 3)
    return chosen.gather(1, accepted.path), accepted.lengths, logits.view(COUNT, nodes, VOCAB)


def exact(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by the definitions of temperature, top-k and top-p."""
    p = np.exp((logits.double().numpy() - float(logits.max())) / (params.temperature or 1.0))
    order = np.argsort(-p, kind="stable")[: params.top_k or VOCAB]
    before = np.cumsum(p[order]) - p[order]
    order = order[before < (params.top_p or 2.0) * p[order].sum()]
    q = np.zeros(VOCAB)
    q[order] = p[order]
    return q / q.sum()


def agrees(observed: np.ndarray, probs: np.ndarray) -> None:
    assert observed[probs == 0].sum() == 0
    kept = probs * observed.sum() >= 5
    if kept.sum() > 1:
        wanted = probs[kept] / probs[kept].sum() * observed[kept].sum()
        assert stats.chisquare(observed[kept], wanted).pvalue > 1e-4


def check_distribution(
    run: Tensor, lengths: Tensor, tree: Tree, logits: Tensor, params: SamplingParams
) -> None:
    """The first token's distribution, and each accepted first token's second one's."""
    agrees(np.bincount(run[:, 0], minlength=VOCAB), exact(logits[0, 0], params))
    for token in range(VOCAB):
        after = (lengths >= 1) & (run[:, 0] == token)
        if int(after.sum()) < 200:
            continue
        row = int(after.nonzero()[0])
        node = int(((tree.tokens[row] == token) & (tree.depths[row] == 1)).nonzero()[0])
        second = np.bincount(run[after, 1], minlength=VOCAB)
        agrees(second, exact(logits[row, node], params))


def least_threshold() -> EngineConfig:
    """As near to 1 as changes no draft's fate: the rule, and the target's distribution."""
    return EngineConfig(threshold_acc=1 - 1e-9)


@pytest.mark.parametrize("shape", few(SHAPES, "tree"))
@pytest.mark.parametrize("setting", few(SETTINGS, SETTINGS[1]), ids=lambda s: "-".join(s))
def test_thresholds_near_one_have_the_targets_distribution(
    setting: dict[str, Any], shape: str
) -> None:
    tables, features = rows_of(setting)
    # One tree for all seeds, of drafts that are allowed: it must not know of the coins.
    tree = drafted(SHAPES[shape])
    tree = Tree(*(x[4:5].expand(COUNT, *x.shape[1:]).contiguous() for x in tree))
    rule = AcceptanceRule(least_threshold(), tables)
    run, lengths, logits = emitted(rule, tables, features, tree)
    check_distribution(run, lengths, tree, logits, SamplingParams(**setting))
    assert 0 < float(lengths.double().mean()) < 2


def test_thresholds_accept_more_and_never_what_is_forbidden() -> None:
    tables, features = rows_of(SETTINGS[0])
    tree, rates = drafted((3, 2)), []
    for single, total in ((1.0, 1 - 1e-9), (1.0, 0.5), (0.05, 1.0), (0.0, 0.3)):
        config = EngineConfig(threshold_single=single, threshold_acc=total)
        rule = AcceptanceRule(config, tables)
        run, lengths, logits = emitted(rule, tables, features, tree)
        rates.append(float(lengths.double().mean()))
        assert (logits[:, 0].gather(1, run[:, :1]) > -torch.inf).all()
    assert rates[0] < min(rates[1:])
    assert max(rates) == rates[3]


def test_the_kernel_by_an_example() -> None:
    """A root with children of 0.2, 0.3 and 0.0; the first has one of 0.9."""
    tree = build_tree(
        torch.tensor([0]),
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[0, 0, 0, 1]]),
        torch.zeros(1, 4),
        2,
    )
    probs = torch.tensor([[0.0, 0.2, 0.3, 0.0, 0.9]])

    def root_child(coin: float, single: float, total: float) -> int:
        thrown = torch.full((1, 5), coin * total)
        return int(accept_by_probability(probs, torch.tensor(single), tree, thrown)[0, 0])

    assert [root_child(c, 2.0, 1.0) for c in (0.0, 0.19, 0.21, 0.49, 0.51)] == [1, 1, 2, 2, -1]
    assert [root_child(c, 2.0, 0.5) for c in (0.39, 0.41, 0.99)] == [1, 2, 2]
    assert [root_child(c, 0.3, 1.0) for c in (0.1, 0.5, 0.99)] == [1, 2, 2]
    assert root_child(0.99, 0.0, 1.0) == 1
    # Without a coin, and of another bound at each node.
    least = torch.tensor([[0.25, 0.9, 0.0, 0.0, 0.0]])
    assert accept_by_probability(probs, least, tree)[0].tolist() == [2, 4, -1, -1, -1]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"acceptance": "rejection"}, "unknown setting 'acceptance'.*threshold_acc"),
        ({"threshold_acc": 0}, "threshold_acc"),
        ({"threshold_single": 1.5}, "threshold_single"),
        ({"relaxed_delta": 0.3}, "relaxed_delta needs relaxed_topk"),
        ({"relaxed_topk": -1}, "relaxed_topk"),
        ({"relaxed_topk": 1, "relaxed_delta": -0.1}, "relaxed_delta"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig.build(**settings)


ENGINE = {"adaptive": "static", "num_steps": 3, "dtype": "float32", "grammar_isolated": False}


def test_greedy_requests_know_no_rule_and_lossy_ones_are_marked() -> None:
    prompts = ["Maria Lopez is 34.", "Count: 1, 2, 3,"]
    asks = [{"temperature": 0, "max_tokens": 30}, {"temperature": 1, "seed": 3, "max_tokens": 30}]
    with Engine(**ENGINE, algorithm="none") as engine:
        want = engine.generate(prompts, None, asks)
    with Engine(**ENGINE, threshold_acc=0.3, eagle_topk=2) as engine:
        got = engine.generate(prompts, None, asks)
    assert got[0].token_ids == want[0].token_ids
    assert [output.stats.lossy for output in got] == [False, True]


def test_relaxed_acceptance_is_for_the_thinking_alone_and_is_told() -> None:
    answer = Grammar.regex(r"\{\"age\":\d{2}\}")
    asks = {"temperature": 0, "max_tokens": 60, "complete": False}
    prompts = ["Tom has 3 boxes with 12 pencils each. How many pencils?"] * 2
    grammars = [answer.after_thinking(end="}"), answer]
    runs = []
    for top_k in (0, 20):
        relaxed = {"relaxed_topk": top_k, "relaxed_delta": 4.0} if top_k else {}
        with Engine(**ENGINE, eagle_topk=2, **relaxed) as engine:
            runs.append(engine.generate(prompts, grammars, asks))
    (thought, plain), (loose, same) = runs
    assert same.token_ids == plain.token_ids
    assert (plain.stats.relaxed_steps, same.stats.relaxed_steps) == (0, 0)
    assert thought.stats.relaxed_steps == 0
    assert loose.stats.relaxed_steps > 0
    assert loose.stats.accept_length > thought.stats.accept_length
    assert json.loads(same.text) == json.loads(plain.text)


@pytest.mark.parametrize(("delta", "taken"), [(0.0, 0), (0.5, 0), (0.7, 1), (1.7, 2), (9.0, 2)])
def test_relaxed_acceptance_goes_by_log_probabilities(delta: float, taken: int) -> None:
    """Of 0.6, 0.3, 0.06 and 0.04 the logarithms are 0.69, 2.3 and 2.7 below the best one's; a
    chain of the second and then the third is accepted as far as ``relaxed_delta`` goes."""
    probs = torch.tensor([[0.6, 0.3, 0.06, 0.04, 0, 0, 0], [0.3, 0.4, 0.1, 0.2, 0, 0, 0]])
    tables, features = RowTables(1, 1, VOCAB, torch.device("cpu")), SamplingFeatures()
    tables.assign(0, Request(0, PROMPT, SamplingParams(), None, 9, frozenset({0}), 0, 0))
    token = torch.tensor([[1, 2]])
    tree = build_tree(torch.tensor([3]), token, torch.tensor([[0, 1]]), torch.zeros(1, 2), 2)
    place = Nodes(torch.zeros(3, dtype=torch.int64), torch.arange(3) + 3, tree, None)
    logits = torch.cat([probs, probs[:1]]).log()
    masks = Masks(packed(torch.ones(3, VOCAB, dtype=torch.bool)), None)
    rule = AcceptanceRule(EngineConfig(relaxed_topk=4, relaxed_delta=delta), tables)
    chosen = rule(logits.argmax(-1), logits, place, features, masks, torch.tensor([True]))
    # At the second node the best is 0.4: 0.1 is 1.39 below it.
    assert int(accept_path(chosen.view(1, 3), tree, 3).lengths) == taken


@pytest.mark.parametrize("name", few(["threshold", "relaxed"], "relaxed"))
def test_rules_over_packed_nodes_decide_as_over_all(name: str) -> None:
    """Where only living nodes were verified, as where the dead ones were too."""
    tables, features = rows_of(SETTINGS[1])
    relaxed = name == "relaxed"
    loose = EngineConfig(relaxed_topk=3, relaxed_delta=1.1)
    rule = AcceptanceRule(loose if relaxed else least_threshold(), tables)
    tree = drafted((3, 2))
    # Some later siblings die, and what is below them.
    dead = torch.zeros_like(tree.scores, dtype=torch.bool)
    dead[::2, 3], dead[::2, 8:], dead[::3, 5] = True, True, True
    scores = tree.scores.masked_fill(dead, -torch.inf)[:, 1:]
    tree = build_tree(
        tree.tokens[:, 0], tree.tokens[:, 1:], tree.parents[:, 1:].clamp(min=0), scores, 2
    )
    nodes = tree.tokens.shape[1]
    living = (~dead).flatten().nonzero()[:, 0]
    rows = torch.arange(COUNT).repeat_interleave(nodes)
    positions = (tree.depths + len(PROMPT)).flatten()
    logits, allowed = target(tree)
    # Inside the thinking all rows are one, but at some nodes it has ended.
    allowed[:], free = True, torch.arange(COUNT) % 4 > 0
    allowed[::17, 0] = False
    logits = logits.masked_fill(~allowed, -torch.inf)
    found = []
    for pack in (None, living):
        index = torch.arange(len(rows)) if pack is None else pack
        place = Nodes(rows[index], positions[index], tree, pack)
        choices = Sampler(tables).choose(logits[index].clone(), place, features, None)
        masks = Masks(packed(allowed[index]), None)
        inside = free if relaxed else None
        chosen = rule(choices, logits[index].clone(), place, features, masks, inside)
        found.append((choices, chosen))
    (plain, every), (_, some) = found
    assert torch.equal(every[living], some)
    changed = (every != plain).view(COUNT, nodes)
    assert changed.any()
    if relaxed:
        # Nothing changes outside the thinking, nor where the target's own choice was drafted.
        assert not changed[~free].any()
        lengths = [accept_path(x.view(COUNT, nodes), tree, 3).lengths for x in (plain, every)]
        assert lengths[1].sum() > lengths[0].sum()


@pytest.mark.ci
def test_rules_never_ask_for_the_devices_data() -> None:
    """On tensors of shapes alone whatever waited for a value would raise."""
    tables, features = rows_of(SETTINGS[1])
    rule = AcceptanceRule(EngineConfig(threshold_acc=0.5, relaxed_topk=2), tables)
    tree = drafted((3, 2))
    nodes = tree.tokens.shape[1]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tree = Tree(*map(mode.from_tensor, tree))
        rows = torch.zeros(COUNT * nodes, dtype=torch.int64)
        place = Nodes(rows, rows, tree, rows)
        logits, words = torch.zeros(len(rows), VOCAB), torch.zeros(len(rows), 1)
        free = torch.zeros(COUNT, dtype=torch.bool)
        masks = Masks(words.int(), rows)
        chosen = rule(rows, logits, place, features, masks, free)
        assert chosen.shape == rows.shape
        with pytest.raises(RuntimeError):
            chosen.tolist()
