"""What a GPU records is finite, made before the first request, and of known size; its passes have
few kernels. ``tests/mutants.py`` has a mutant of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench.device_model import TOLD_KERNELS, WIDE_KERNELS
from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_drafts import wide_tier
from overlap_spec.engine.start_up import batches, with_wide
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels import Tree
from overlap_spec.kernels.triton.launch import Launch
from overlap_spec.models.config import ModelConfig
from overlap_spec.tiers import Tier
from overlap_spec.worker import warm_up
from overlap_spec.worker.build import graph_bytes
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.drafts import Drafts
from overlap_spec.worker.examples import padding
from overlap_spec.worker.graphs import graph_size, packed_size, packed_sizes, padded_size
from overlap_spec.worker.in_flight import Buffers
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.worker import Worker
from tests.support import chaos
from tests.support.capture import Kernels, as_on_a_gpu, engine_of
from tests.support.held_graphs import HeldGraphs, serve_as_a_gpu
from tests.support.tiers import few

CHAIN: dict[str, Any] = {"num_steps": 5, "tries": True}
CODE = Grammar.regex(r"[a-f]{3}-\d{1,9}")
WORDS = Grammar.choice(["alpha", "beta", "alphabet", "gamma rays"])


@pytest.fixture
def as_served_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_as_a_gpu(monkeypatch)


def made_while_serving(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[int, int]:
    """Recordings and buffers that random requests wait for, after a start that made both."""
    made: list[Buffers] = []
    make = Buffers.__init__

    def noted(self: Buffers, *args: Any) -> None:
        made.append(self)
        make(self, *args)

    monkeypatch.setattr(Buffers, "__init__", noted)
    fixed = {"overlap": "none", "max_running_requests": 6, "mask_deadline_ms": None, **settings}
    with chaos.build(tiny, **fixed) as engine:
        graphs = engine.core.worker.recordings
        ready, buffers = graphs.count, len(made)
        assert ready > 20
        assert buffers == 2
        for seed in range(400, 404):
            chaos.run(engine, chaos.random_asks(seed))
        for count in (6, 5, 3, 2):
            # One after the other ends; some take no drafts, some draw their tokens.
            kinds = [{"seed": 1}, {"speculate": False}, {}, {}, {"temperature": 0.7, "seed": 4}, {}]
            asked = [
                {"temperature": 0.0, "max_tokens": 9 + 2 * n, **kind}
                for n, kind in enumerate(kinds[:count])
            ]
            grammars = [CODE, None, WORDS, CODE, None, WORDS][:count]
            engine.generate(["abc" * 5] * count, grammars, asked)
        assert len({key[1] for key in graphs._known if key[0] == "packed"}) > 1
        return graphs.count - ready, len(made) - buffers


SERVED: dict[str, dict[str, Any]] = {
    "chain": {"adaptive": "static", **CHAIN},
    "tree": {"adaptive": "static", "num_steps": 3, "eagle_topk": 2, "tries": True},
    "several": {"adaptive": "default", "tries": True},
    "auto": {"adaptive": "auto", "tries": True},
}


@pytest.mark.usefixtures("as_served_by_a_gpu")
@pytest.mark.parametrize("name", few(SERVED, "chain"))
def test_no_request_waits_for_a_recording_or_for_memory(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert made_while_serving(tiny, monkeypatch, **SERVED[name]) == (0, 0)


def test_verified_nodes_have_few_sizes_and_waste_little() -> None:
    for rows in (1, 2, 3, 8, 12, 32, 64):
        for nodes in (2, 6, 16, 32):
            sizes = [*packed_sizes(rows, nodes), rows * nodes]
            assert len(sizes) <= 8
            for wanted in range(rows, rows * nodes + 1):
                size = packed_size(rows, nodes, wanted)
                assert size in sizes
                assert wanted <= size < wanted + max(32, rows * nodes / 8 + 1)


@pytest.fixture(scope="module")
def chain_engine(tiny: dict[str, Any]) -> Iterator[Engine]:
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_of(tiny, patch, algorithm="eagle3", max_running_requests=6, **CHAIN) as engine,
    ):
        yield engine


def outputs_of(engine: Engine) -> tuple[int, int, int]:
    """Bytes of what the graphs of the target's pass have as outputs, and all others; and how many
    nodes the largest verifies."""
    core = engine.core
    limits = batches(engine.config, core.budgets.policy, with_wide(core.budgets.policy.tiers))
    with as_on_a_gpu(core.worker) as (_, graphs, _):
        warm_up.record_all(graphs, limits)
        assert core.worker.guard.fault is None
        assert graphs.count == at_start(core.worker, limits)
        seen: dict[int, int] = {}
        sums = {True: 0, False: 0}
        for key, recorded in sorted(graphs._known.items(), key=lambda of: of[0][0] != "verify"):
            for x in getattr(recorded, "outputs", ()):
                storage = x.untyped_storage()
                if storage._cdata not in seen:
                    seen[storage._cdata] = storage.nbytes()
                    sums[key[0] in ("verify", "packed")] += storage.nbytes()
    return sums[True], sums[False], max(n * tier.nodes for tier, n in limits.items())


def test_outputs_of_all_graphs_fit_into_what_is_set_aside(chain_engine: Engine) -> None:
    """Half of it is for what a pass has beside them. What other graphs give does not grow with the
    vocabulary, nor with the model: it is little beside a real one's."""
    runner = chain_engine.core.worker.runner
    own, rest, nodes = outputs_of(chain_engine)
    config: ModelConfig = runner.target.config
    layers = len(runner.feature_layers)
    assert layers
    assert own <= graph_bytes(config, layers, nodes, runner.pool.k.dtype) / 2
    real = replace(config, vocab_size=128_256, hidden_size=4096, intermediate_size=14_336)
    assert rest < 0.1 * graph_bytes(real, 3, nodes, torch.bfloat16)


def at_start(worker: Worker, limits: Mapping[Tier, int]) -> int:
    """How many graphs a GPU records before the first request; nothing is recorded."""

    def entered(graphs: CudaGraphs, key: tuple[Any, ...], *_: Any) -> Any:
        graphs._known[key] = key
        return key

    graphs = HeldGraphs(worker.recordings.drafts, worker.guard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphs, "_find", entered)
        warm_up.record_all(graphs, limits)
    return len(graphs._known)


# Graphs of all tiers and sizes at 32 rows and at 64.
GRAPHS = {"static": (190, 290), "auto": (830, 1250)}


def graphs_of(tiny: dict[str, Any], adaptive: str) -> tuple[int, ...]:
    found = []
    for rows in (32, 64):
        settings = {**CHAIN, "adaptive": adaptive, "max_running_requests": rows}
        fixed = {"graphs": False, "overlap": "none", "lane_threads": 0, "max_total_tokens": 4096}
        with chaos.build(tiny, **fixed, **settings) as engine:
            core = engine.core
            limits = batches(
                engine.config, core.budgets.policy, with_wide(core.budgets.policy.tiers)
            )
            found.append(at_start(core.worker, limits))
    return tuple(found)


@pytest.mark.parametrize("adaptive", few(GRAPHS, "auto"))
def test_few_graphs_are_recorded_at_the_start(tiny: dict[str, Any], adaptive: str) -> None:
    found = graphs_of(tiny, adaptive)
    assert all(count <= most for count, most in zip(found, GRAPHS[adaptive], strict=True)), found


def test_a_graph_of_the_target_takes_two_of_its_passes(
    chain_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiles and one is captured; nor does a capture wait or give memory back."""
    core, passes, emptied = chain_engine.core, list[str](), list[None]()
    for name in ("verify_trees", "verify_packed"):
        noted(monkeypatch, type(core.worker.runner), name, passes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    limits = batches(chain_engine.config, core.budgets.policy, core.budgets.policy.tiers)
    with as_on_a_gpu(core.worker) as (_, graphs, _):
        warm_up.record_all(graphs, limits)
        own = [key for key in graphs._known if key[0] in ("verify", "packed")]
    assert len(passes) == 2 * len(own) > 10
    assert len(emptied) == 2


@pytest.mark.usefixtures("as_served_by_a_gpu")
def test_what_is_recorded_is_not_run_again_at_the_start(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = list[str]()
    noted(monkeypatch, ModelRunner, "verify_packed", passes)
    fixed = {"overlap": "none", "max_running_requests": 6, "adaptive": "static"}
    with chaos.build(tiny, **fixed, **CHAIN) as engine:
        own = [key for key in engine.core.worker.recordings._known if key[0] == "packed"]
    assert len(passes) == len(own) > 2


def noted(monkeypatch: pytest.MonkeyPatch, of: type, name: str, calls: list[str]) -> None:
    """Enter each call of a method into ``calls``."""
    work = getattr(of, name)

    def entered(*args: Any) -> Any:
        calls.append(name)
        return work(*args)

    monkeypatch.setattr(of, name, entered)


def test_sizes_of_graphs_are_few_and_near() -> None:
    sizes = sorted({graph_size(batch) for batch in range(1, 65)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    for batch in range(1, 600):
        assert padded_size(batch) <= graph_size(batch) < max(batch + 8, batch * 5 / 4)


BUDGETS = {
    # Of a chain of 5, by what any of its rows has: noise, a grammar.
    "draft": {(False, False): 145, (True, False): 170, (False, True): 335, (True, True): 505},
    "wide draft": {(False, True): 420, (True, True): 590},
    "commit": 75,
    "extend": 40,
    # A layer of the target, and what comes before and behind the layers.
    "verify": 12,
}


def kernels(launches: Sequence[Launch], work: Callable[[], Any]) -> int:
    """How many kernels a GPU runs for it."""
    before = len(launches)
    with Kernels() as counter:
        work()
    return counter.count + len(launches) - before


def kernels_of_drafts(engine: Engine, wide: bool) -> dict[tuple[bool, bool], int]:
    """Of the draft's recordings, by ``sampled`` and ``told``."""
    (own,) = engine.core.budgets.policy.tiers
    tier = wide_tier(own) if wide else own
    with as_on_a_gpu(engine.core.worker) as (_, graphs, launches):
        given = padding(graphs.runner, 2)
        return {
            kind: kernels(launches, partial(graphs.drafts.trees, tier, *kind, *given))
            for kind in warm_up.variants(graphs.runner.reads_states, tier)
        }


def test_drafts_have_few_kernels(chain_engine: Engine) -> None:
    own, wide = (kernels_of_drafts(chain_engine, wide) for wide in (False, True))
    for found, budget in ((own, BUDGETS["draft"]), (wide, BUDGETS["wide draft"])):
        assert found.keys() == budget.keys()
        assert all(found[kind] <= most for kind, most in budget.items()), found
    # What the simulated device adds for them.
    assert own[False, True] - own[False, False] == TOLD_KERNELS
    assert wide[False, True] - own[False, True] == WIDE_KERNELS


def test_a_step_replays_the_draft_that_it_wants(
    chain_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and without a grammar neither noise nor states are computed."""
    (tier,), noted = chain_engine.core.budgets.policy.tiers, list[tuple[bool, bool]]()
    trees = Drafts.trees

    def spied(drafts: Drafts, tier: Any, sampled: bool, told: bool, *of: Any) -> Any:
        noted.append((sampled, told))
        return trees(drafts, tier, sampled, told, *of)

    monkeypatch.setattr(Drafts, "trees", spied)
    with as_on_a_gpu(chain_engine.core.worker) as (_, graphs, _):
        for tier_, kinds in ((tier, 4), (wide_tier(tier), 2)):
            variants = warm_up.variants(graphs.runner.reads_states, tier_)
            assert len(variants) == kinds
            first, *others = [graphs.draft(tier_, 2, *kind) for kind in variants]
            # What comes behind takes any one's outputs where they are.
            for other in others:
                assert other is not first
                assert other.outputs is first.outputs  # type: ignore[union-attr]
            for kind in variants[1:]:
                noted.clear()
                graphs._known.pop(("draft", tier_, *kind, 2))
                graphs.draft(tier_, 2, *kind)
                assert set(noted) == {kind}


def test_other_passes_have_few_kernels(chain_engine: Engine) -> None:
    runner = chain_engine.core.worker.runner
    (tier,) = chain_engine.core.budgets.policy.tiers
    layers = runner.target.config.num_layers

    def passes(graphs: CudaGraphs) -> Iterator[tuple[str, Callable[[], Any]]]:
        own, rows = graphs.runner, 2
        given = padding(graphs.runner, rows)
        _, roots, _, _, *tensors = graphs.drafts.dead(tier, *given)
        tree = Tree(*tensors)
        inputs = *given, roots, tree.tokens, tree.depths, tree.ancestors
        yield "verify", lambda: own.verify_trees(tier, *inputs)
        every = roots.new_zeros(rows * tier.nodes)
        chosen = *tree, every, roots, own.no_run.repeat(len(every), 1)
        yield "commit", lambda: own.commit_trees(tier, *given, roots, *chosen)
        path = roots.new_zeros(rows, tier.steps + 1)
        width = own.page_features.shape[1]
        features = own.page_features.new_zeros(rows * tier.nodes, width)
        yield "extend", lambda: own.extend_trees(*given, roots, path, path, roots, features)

    with as_on_a_gpu(chain_engine.core.worker) as (_, graphs, launches):
        found = {name: kernels(launches, work) for name, work in passes(graphs)}
    assert found["verify"] <= BUDGETS["verify"] * (layers + 1), found
    assert found["commit"] <= BUDGETS["commit"], found
    assert found["extend"] <= BUDGETS["extend"], found
