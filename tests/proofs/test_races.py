"""No two streams touch the same bytes unordered, in any tier, mode and mix of requests; and each
wait of the step that is left out is found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec.engine import Engine
from overlap_spec.engine import build as engine_build
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels import attention
from overlap_spec.kernels.dispatch import use
from overlap_spec.types import SamplingParams
from overlap_spec.worker import build as build_module
from overlap_spec.worker import phases as phases_module
from overlap_spec.worker.batch import Staging
from overlap_spec.worker.extras import choices as choices_module
from overlap_spec.worker.in_flight import Buffers, Events, InFlightStep, Mirrored
from overlap_spec.worker.worker import Worker
from tests.support import chaos, checkpoints
from tests.support.held_graphs import all_columns, change_traits, held_graphs
from tests.support.models import HYBRID
from tests.support.race import PLAIN_NUMPY, PLAIN_TOLIST, ClockEvent, ClockStreams, Watch, World
from tests.support.tiers import few, pairs


@pytest.fixture(autouse=True)
def in_torch() -> Iterator[None]:
    """By torch's own operations, of which it is known which elements they touch."""
    with use("reference"):
        yield


def watch_host(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reads and writes, the lane for it."""

    def reading(plain: Callable[[Tensor], Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *rest: Any) -> Any:
            if world.actor == 0 and tensor.untyped_storage()._cdata in world.memory:
                world.by_host(tensor, write=False)
            return plain(tensor, *rest)

        return read

    monkeypatch.setattr(Tensor, "numpy", reading(PLAIN_NUMPY))
    monkeypatch.setattr(Tensor, "tolist", reading(PLAIN_TOLIST))
    read_trees = InFlightStep.read_trees

    def lent(step: InFlightStep) -> Any:
        found = read_trees(step)
        nodes = int(found.offsets[-1])
        buffers = step.buffers
        for buffer in (
            buffers.masks.host[:nodes],
            buffers.runs.host[1 : 1 + nodes],
            buffers.limits.host,
        ):
            world.by_host(buffer, write=True)
        return found

    monkeypatch.setattr(InFlightStep, "read_trees", lent)


def give_the_device_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what goes up is copied, by the stream that uploads it; events have names."""
    make_buffers, make_events = Buffers.__init__, Events.__init__

    def buffers(self: Buffers, *args: Any) -> None:
        make_buffers(self, *args)
        for name in ("masks", "limits", "runs", "places"):
            host = getattr(self, name).host
            setattr(self, name, Mirrored(host, host.clone()))

    def events(self: Events, *args: Any) -> None:
        make_events(self, *args)
        for name, event in vars(self).items():
            event.name = name

    monkeypatch.setattr(Buffers, "__init__", buffers)
    monkeypatch.setattr(Events, "__init__", events)
    monkeypatch.setattr(
        Staging, "upload", lambda _, numbers, __: torch.from_numpy(numbers.copy()).clone()
    )
    for module in (phases_module, choices_module):
        monkeypatch.setattr(module, "uploaded", lambda host, _: world.upload(host))
    monkeypatch.setattr(engine_build, "build_streams", lambda *_: ClockStreams(world))
    # Weights that are packed for the CPU are no tensors of the device's kind.
    monkeypatch.setattr(build_module, "pack", lambda _: None)
    # Keys of a request's own pages alone are read: others' are masked, and may be anything.
    monkeypatch.setattr(attention, "TOGETHER_BYTES", 0)


@contextmanager
def watched(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, held: bool = False, **settings: Any
) -> Iterator[tuple[World, Engine]]:
    world = World()
    watch_host(world, monkeypatch)
    give_the_device_memory(world, monkeypatch)
    if held:
        monkeypatch.setattr(build_module, "recordings_of", held_graphs)
        monkeypatch.setattr(phases_module.Phases, "_visible", all_columns)
    more = {"lane_threads": 0, "mask_deadline_ms": None, "graphs": held, **settings}
    with Watch(world), chaos.build(tiny, **more) as engine:
        worker = engine.core.worker
        for event in worker._accepted:
            assert isinstance(event, ClockEvent)
            event.name = "accepted"
        exempt(world, worker)
        # The worker waits for the device before its first step.
        world.settle()
        yield world, engine
        world.poll()


def exempt(world: World, worker: Worker) -> None:
    """Padding's: in page 0, and where features of no page go, any write may win; the latter are
    read by nobody."""
    runner = worker.runner
    for pool in (runner.pool, *runner.draft_pools):
        for cache in (pool.k, pool.v):
            found = world.enter(cache)
            assert found is not None
            layers, pages = cache.shape[:2]
            found.exempt.reshape(layers, pages, -1)[:, 0] = True
    if runner.feature_layers:
        found = world.enter(runner.page_features)
        assert found is not None
        for marks in (found.exempt, found.unread):
            marks.reshape(len(runner.page_features), -1)[-1] = True


def races(world: World) -> list[str]:
    return [" ".join(race) for race in world.races]


def serve(engine: Engine, first: int, batches: int) -> None:
    for seed in range(first, first + batches):
        chaos.run(engine, chaos.random_asks(seed))


def test_no_stream_races_another(tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, settings = chaos.settings_of("tree", "crowded")
    with watched(tiny, monkeypatch, held=True, **settings) as (world, engine):
        serve(engine, first, 2)
    assert races(world) == []
    assert world.accesses > 10_000
    assert world.freed > 100


@pytest.mark.ci
def test_no_stream_races_another_for_states(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints.write_target(tmp_path, **HYBRID)
    first, settings = chaos.settings_of("tree", "crowded")
    target = {**tiny, "model": str(tmp_path)}
    with watched(target, monkeypatch, held=True, **settings) as (world, engine):
        # Batches that preempt requests.
        serve(engine, first + 9, 2)
        assert engine.core.scheduler.preemptions > 0
    assert races(world) == []


HOSTED: dict[str, Any] = {"algorithm": "ngram", "num_steps": 3, "adaptive": "static"}
THOUGHT = Grammar.regex("[a-c]{4}").after_thinking(end="e")


def serve_uploads(engine: Engine) -> None:
    """What the host makes for the device besides plans and masks: drafts, flags, choices' tries."""
    serve(engine, 1000, 1)
    sampling = SamplingParams(max_tokens=20)
    weighed = Grammar.choice(["alpha", "beta", "alphabet"], faithful=True)
    engine.generate(["abcabcabc", "pick"], [THOUGHT, weighed], sampling)


@pytest.mark.ci
def test_uploads_are_the_streams_own(tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(tiny, monkeypatch, relaxed_topk=2, **HOSTED) as (world, engine):
        serve_uploads(engine)
    assert races(world) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("tier", "room", "mode", "held", "ahead"),
    pairs(chaos.TIERS, chaos.ROOM, chaos.MODES, (False, True), (False, True)),
)
def test_no_stream_races_another_in_any_mode(
    tiny: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    room: str,
    mode: str,
    held: bool,
    ahead: bool,
) -> None:
    change_traits(monkeypatch, verifies_ahead=ahead)
    first, settings = chaos.settings_of(tier, room)
    with watched(tiny, monkeypatch, held, overlap=mode, **settings) as (world, engine):
        serve(engine, first, 2)
    assert races(world) == []


FAULTS = [
    ("compute", "uploaded"),
    ("copy", "drafted"),
    ("host", "tree_on_host"),
    ("compute", "masks_ready"),
    ("copy", "accepted"),
    ("host", "results_on_host"),
    ("prefill", "pages_entered"),
    ("compute", "prefilled"),
    ("prefill", "accepted"),
    ("compute", "prefill_extended"),
]


@pytest.mark.ci
@pytest.mark.parametrize("fault", few([(each,) for each in FAULTS], (FAULTS[0],)), ids="-".join)
def test_a_wait_that_is_left_out_is_found(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str]
) -> None:
    with watched(tiny, monkeypatch, num_steps=3, adaptive="static") as (world, engine):
        world.dropped.add(fault)
        for seed in range(1000, 1003):
            if not world.races:
                serve(engine, seed, 1)
    assert world.waited[fault]
    assert races(world)
