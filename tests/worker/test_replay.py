"""Recorded passes: what is replayed is what was recorded, for every tier and size of batch."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels import Tree
from overlap_spec.steps import BY_NONE, DEAD, FEW_TOKENS, LOST, STATE_WIDTH, TOLD
from overlap_spec.tiers import Tier
from overlap_spec.worker import build as build_module
from overlap_spec.worker.graphs import Tensors, TracedGraph, padded_size
from overlap_spec.worker.model_runner import ModelRunner
from overlap_spec.worker.phases import Phases
from overlap_spec.worker.worker import Worker
from tests.support import chaos
from tests.support.held_graphs import all_columns, held_graphs
from tests.support.tiers import few

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TIERS: dict[str, dict[str, Any]] = {
    "no draft": {"num_steps": 0},
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 11},
}


class Scaled(nn.Module):
    """Work over one tensor of its own."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))

    def work(self, x: Tensor) -> Tensors:
        return (x * self.scale,)


def test_a_recording_owns_what_it_touches() -> None:
    """What Python alone owns takes the interpreter's lock in each replay."""
    module = Scaled()
    assert module.scale._use_count() == 1  # type: ignore[attr-defined]
    graph = TracedGraph(module, module.work, (torch.ones(2, 3),))
    assert module.scale._use_count() > 1  # type: ignore[attr-defined]
    assert graph(torch.ones(4, 3))[0].tolist() == [[2.0] * 3] * 4
    del graph
    gc.collect()
    assert module.scale._use_count() == 1  # type: ignore[attr-defined]


def state(runner: ModelRunner) -> list[Tensor]:
    """What passes write, among others: caches, tables, the drafter's states and features."""
    found = [buffer for buffer in runner.buffers() if not buffer.is_mkldnn]
    # Page 0 is padding's: of several writes any may win there.
    return [buffer[:, 1:] if buffer.dim() == 5 else buffer for buffer in found]


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        # A GPU's products of other shapes add in another order.
        bound = 1e-5 if a.device.type == "cpu" else 1e-4
        torch.testing.assert_close(a, b, atol=bound, rtol=bound)


def tier_of(engine: Engine) -> Tier:
    (tier,) = engine.core.budgets.policy.tiers
    return tier


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tier", few(TIERS, "tree"))
@torch.inference_mode()
def test_replay_equals_the_passes(tiny: dict[str, Any], tier: str, device: str) -> None:
    # CUDA's default stream cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
        check_replays(tiny, tier, device)


def check_replays(tiny: dict[str, Any], tier: str, device: str) -> None:
    settings = {"overlap": "none", "dtype": "float32", "page_size": 4}
    with Engine(**tiny, **settings, **TIERS[tier], device=device) as engine:
        worker, own = engine.core.worker, tier_of(engine)
        runner = worker.runner
        generator = torch.Generator().manual_seed(1)
        for buffer in state(runner):
            if buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        for batch in (1, 3, 9):
            tables = runner.tables
            columns = tables.pages.shape[1] if device == "cuda" else 8 + batch
            rows = torch.arange(batch, device=device)
            # Room for all nodes: in page 0 any write may win.
            tables.pages[:batch, :8] = rows[:, None] * 8 + 1 + torch.arange(8, device=device)
            tables.committed[:batch] = torch.arange(batch, device=device) + 7
            tables.roots[:batch] = rows + 30
            # The grammar forces no token, one, or more than the tier is deep.
            runner.told.forced[:batch] = -1
            runner.told.forced[1:batch:3, :1], runner.told.forced[2:batch:3, :7] = 40, 41
            tables.temperature[:batch] = torch.arange(batch, device=device) % 3 * 0.6
            # Of every third one two tokens alone can come, again and again.
            states, here = runner.told, 5 * STATE_WIDTH
            states.state[:batch] = LOST
            states.state[:batch:3] = here
            states.texts[50:52, 0] = torch.tensor([7, 8], device=device)
            states.moves[here : here + STATE_WIDTH] = DEAD
            states.moves[here + 7 : here + 9], states.moves[here + BY_NONE] = here, here
            states.few[5] = torch.tensor([50, 51, *[-1] * (FEW_TOKENS - 2), 1], device=device)
            size = padded_size(batch)
            rows = torch.cat([rows, rows.new_full((size - batch,), tables.padding_row)])
            pages = tables.pages[rows, :columns]
            verify, commit = (
                find(own, size) for find in (worker.recordings.verify, worker.recordings.commit)
            )
            extend = worker.recordings.extend(own, size)
            # Recording wrote to the row of padding, and to page 0.
            tables.committed[:batch] = torch.arange(batch, device=device) + 7
            for told in product((True, False), repeat=2):
                want = tuple(
                    x.clone() for x in worker.recordings.drafts.trees(own, *told, rows, pages)
                )
                recorded = worker.recordings.draft(own, size, *told)
                got = recorded(rows, pages)
                drafted = set(got[4][0, 1:].tolist())
                assert own.steps == 0 or bool(drafted & {50, 51}) == told[1]
                close([x[:batch] for x in got[4:]], [x[:batch] for x in want[4:]])
            # As a step does: a CUDA graph takes the one before's outputs where they are.
            _, positions, _, _, *tensors = got
            tree = Tree(*tensors)
            rows, pages = recorded.kept(rows, pages)
            inputs = rows, pages, positions, tree.tokens, tree.depths, tree.ancestors
            want = tuple(x.clone() for x in runner.verify_trees(own, *inputs))
            after = [x.clone() for x in state(runner)]
            got = verify(*inputs)
            real = batch * own.nodes
            close([x[:real] for x in got], [x[:real] for x in want])
            close(state(runner), after)
            packed(worker, own, tree, inputs, want, real)

            choices = tree.tokens.roll(-1, 1).flatten()
            limits = torch.full_like(positions, own.steps)
            runs = choices[:, None].repeat(1, TOLD).int()
            runs[::3], runs[:, 4:] = -1, -1
            given = rows, pages, positions, *tree, choices, limits, runs
            before = [x.clone() for x in state(runner)]
            done = [x.clone() for x in runner.commit_trees(own, *given)]
            after = [x.clone() for x in state(runner)]
            for buffer, content in zip(state(runner), before, strict=True):
                buffer.copy_(content)
            close([x[:batch] for x in commit(*given)], [x[:batch] for x in done])
            close(state(runner), after)

            chosen = torch.randint(200, (batch, own.steps + 1), generator=generator)
            path = torch.arange(own.steps + 1).expand(batch, -1) % own.nodes
            lengths = torch.arange(batch) % (own.steps + 1)
            more = [
                torch.cat([x, x.new_zeros(size - batch, *x.shape[1:])]).to(device)
                for x in (chosen, path, lengths)
            ]
            runner.extend_trees(rows, pages, positions, *more, want[1])
            after = [x[:batch].clone() for x in (runner.drafter.root_state,)]
            runner.drafter.root_state.zero_()
            extend(rows, pages, positions, *more, want[1])
            close([runner.drafter.root_state[:batch]], after)


def packed(
    worker: Worker, tier: Tier, tree: Tree, inputs: Tensors, want: Tensors, real: int
) -> None:
    """Verify of fewer nodes gives those nodes what the whole trees' gave them."""
    rows, nodes = tree.tokens.shape
    for count in {rows, (rows * nodes + rows) // 2, rows * nodes}:
        # Parents outrank their children: by depth, all roots first.
        order = tree.depths.flatten().argsort(stable=True)
        pack = order[:count].sort().values
        logits, features = worker.recordings.packed(tier, rows, count)(pack, *inputs)
        mine = pack < real
        got = logits[mine], features[pack[mine]]
        close(list(got), [x[pack[mine]] for x in want])


def test_sizes_are_few_and_waste_little() -> None:
    sizes = [padded_size(n) for n in range(1, 257)]
    assert all(n <= size <= max(n + 1, n * 1.25) for n, size in enumerate(sizes, 1))
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(set(sizes)) <= 32


@pytest.mark.parametrize("overlap", few(["none", "once-sync"], "once-sync"))
def test_nothing_is_recorded_where_it_is_switched_off(tiny: dict[str, Any], overlap: str) -> None:
    outputs = []
    # Nine are filled up to ten where there is something to replay.
    prompts, grammars = [str(n) for n in range(9)], [None, Grammar.regex("[a-f]{30}"), None] * 3
    for graphs in (True, False):
        with Engine(**{**tiny, "adaptive": "default"}, overlap=overlap, graphs=graphs) as engine:
            outputs.append(
                engine.generate(prompts, grammars, {"max_tokens": 20, "complete": False})
            )
            assert bool(engine.core.worker.recordings.count) == graphs
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]


def test_chains_of_all_lengths_have_the_same_recordings(tiny: dict[str, Any]) -> None:
    """The first draft, a further one, and their links, with states and without; verify, commit and
    extend."""
    with Engine(**{**tiny, "adaptive": "default"}) as engine:
        assert len(engine.core.budgets.policy.tiers) == 3
        graphs = engine.core.worker.recordings
        engine.generate("a", None, {"max_tokens": 2})
        assert graphs.count == 9
        engine.generate(list("abcdefghi"), None, {"max_tokens": 90})
        assert len({key[1] for key in graphs._known if key[0] == "draft"}) > 1
        assert graphs.count == 9


def test_trees_are_recorded_when_they_are_needed(tiny: dict[str, Any]) -> None:
    """Their verify and extend are those of other trees; their drafts and commits their own."""
    with Engine(**tiny, eagle_topk=2, num_steps=3) as engine:
        graphs = engine.core.worker.recordings
        engine.generate("a", None, {"max_tokens": 2})
        assert graphs.count == 5
        assert graphs.record(Tier(2, 2, 4))
        assert not graphs.record(Tier(2, 2, 4))
        assert graphs.count == 7


def test_an_idle_moment_records_what_later_steps_want(tiny: dict[str, Any]) -> None:
    """A request whose batch takes another tier, or that samples, waits for no recording then."""
    with Engine(**{**tiny, "adaptive": "default"}) as engine:
        graphs = engine.core.worker.recordings
        while engine.prepare_next():
            pass
        ready = graphs.count
        assert ready >= len(engine.core.budgets.policy.tiers)
        engine.generate(list("abcdefghi"), None, {"max_tokens": 90})
        engine.generate(list("ab"), None, {"max_tokens": 9, "temperature": 1.0, "seed": 1})
        assert graphs.count == ready
        ticket = engine.submit("a", None, {"max_tokens": 2})
        assert not engine.prepare_next()
        engine.release([ticket])


def test_recordings_end_with_their_engine(tiny: dict[str, Any]) -> None:
    """TorchScript's own tracing would give the process functions that it never frees."""
    counts = []
    for _ in range(3):
        with Engine(**{**tiny, "adaptive": "default"}) as engine:
            engine.generate("one", None, {"max_tokens": 4})
        counts.append(len(torch.jit._state._python_cu.get_functions()))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.ci
@pytest.mark.parametrize("tier", few(chaos.TIERS, "tree"))
def test_chaos_with_fixed_inputs_and_outputs(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """What a replay overwrites has been read by then, whatever the streams' delays."""
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, 7)
    monkeypatch.setattr(build_module, "recordings_of", held_graphs)
    settings = {**chaos.TIERS[tier], "mask_deadline_ms": None}
    with oracle, chaos.build(tiny, **settings) as engine:
        monkeypatch.setattr(Phases, "_visible", all_columns)
        for seed in range(70, 82):
            asks = [replace(ask, abort_step=None) for ask in chaos.random_asks(seed)]
            got = chaos.run(engine, asks)
            want = chaos.run(oracle, asks)
            assert [o.token_ids for o in got] == [o.token_ids for o in want], seed
        sizes = {key[-1] for key in engine.core.worker.recordings._known if key[0] == "verify"}
        assert sizes == {1, 2, 3, 4}


@pytest.mark.parametrize("tier", ["chain", "tree"])
def test_a_pass_takes_what_another_one_has_where_it_is(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The draft's rows and pages alone come up to it; a commit gets choices, limits and runs."""
    monkeypatch.setattr(build_module, "recordings_of", held_graphs)
    settings = {**chaos.TIERS[tier], "adaptive": "static", "overlap": "none"}
    with chaos.build(tiny, **settings) as engine:
        worker = engine.core.worker
        monkeypatch.setattr(Phases, "_visible", all_columns)
        engine.generate(list("abc"), None, {"max_tokens": 12, "temperature": 0})
        graphs: Any = worker.recordings
        draft = graphs.draft(tier_of(engine), 3, False, False)
        finders = graphs.verify, graphs.commit, graphs.extend
        passes = [draft, *(find(tier_of(engine), 3) for find in finders)]
        for recorded in passes:
            recorded.copied.clear()
        engine.generate(list("abc"), None, {"max_tokens": 12, "temperature": 0})
    fields = len(Tree._fields)
    # Tokens, path and lengths of extend, which commit gives.
    after = {3 + fields, 4 + fields, 5 + fields}
    assert [recorded.copied for recorded in passes] == [{0, 1}, set(), after, {3, 4, 5}]
