"""A race detector for the step: streams that run at once, and vector clocks that tell what a
device could have run in another order.

Work of a stream happens after what the host did before queuing it, after the stream's earlier
work, and after the events that the stream waited for. Two accesses to the same bytes, one of them
a write, that are ordered by none of these are a race. Accesses are found by dispatch: which
elements an operation reads and writes follows from its arguments, and of an indexed one from its
indices. New memory counts as written by whoever makes it, and is used after its end where a stream
may not be through with it when its owner may take it again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap_spec.worker.streams import Event, Stream, Streams, Value

# The last is what the host queues outside of its streams: no stream waits for it.
ACTORS = ("host", "compute", "prefill", "plan", "copy", "default")
INDEX = {name: number for number, name in enumerate(ACTORS)}
HOST = 0
DEFAULT = INDEX["default"]
# Bytes that are told apart.
GRAIN = 8

PLAIN_NUMPY, PLAIN_TOLIST = Tensor.numpy, Tensor.tolist
aten = torch.ops.aten
# Which elements of their first argument indexed operations touch, as reads of its offsets.
READS: dict[Any, Callable[..., Tensor]] = {
    aten.index_select.default: lambda o, dim, index: o.index_select(dim, index),
    aten.index.Tensor: lambda o, indices: aten.index.Tensor(o, indices),
    aten.gather.default: lambda o, dim, index, *_: o.gather(dim, index),
    aten.embedding.default: lambda o, index, *_: o.index_select(0, index.flatten()),
}
WRITES: dict[Any, Callable[..., Tensor]] = {
    aten.index_copy_.default: lambda o, dim, index, _: o.index_select(dim, index),
    aten.index_put_.default: lambda o, indices, *_: aten.index.Tensor(o, indices),
    aten._index_put_impl_.default: lambda o, indices, *_: aten.index.Tensor(o, indices),
    aten.index_add_.default: lambda o, dim, index, *_: o.index_select(dim, index),
    aten.index_fill_.int_Scalar: lambda o, dim, index, _: o.index_select(dim, index),
    aten.scatter_.src: lambda o, dim, index, _: o.gather(dim, index),
    aten.scatter_add_.default: lambda o, dim, index, _: o.gather(dim, index),
}


class Race(NamedTuple):
    """An access that nothing orders after another one."""

    kind: str
    actor: str
    label: str
    other: str
    memory: str


class Memory:
    """Who has last written each grain of a storage, and when each actor has read it.

    Attributes:
        exempt: Grains that may be accessed in any order.
        unread: Those of them that nobody may read, whatever was written.
    """

    def __init__(self, tensor: Tensor, owner: int, tick: int, label: str) -> None:
        storage = tensor.untyped_storage()
        grains = -(-storage.nbytes() // GRAIN)
        self.ref, self.owner = StorageWeakRef(storage), owner
        self.name = f"{tuple(tensor.shape)} {tensor.dtype} of {ACTORS[owner]}/{label}"
        self.writer = np.full(grains, owner, np.int8)
        self.written = np.full(grains, tick, np.int32)
        self.read = np.zeros((len(ACTORS), grains), np.int32)
        self.exempt, self.unread = np.zeros(grains, bool), np.zeros(grains, bool)


class World:
    """All clocks and memory, and the races found.

    Attributes:
        dropped: (actor, event) pairs whose waits are left out: planted faults.
        waited: Those that were waited for.
    """

    def __init__(self) -> None:
        self.clocks = np.zeros((len(ACTORS), len(ACTORS)), np.int32)
        self.actor, self.label = HOST, "host"
        self.memory: dict[int, Memory] = {}
        self.races: Counter[Race] = Counter()
        self.accesses = self.freed = 0
        self.dropped: set[tuple[str, str]] = set()
        self.waited: Counter[tuple[str, str]] = Counter()

    def join(self, actor: int, clock: Any) -> None:
        np.maximum(self.clocks[actor], clock, out=self.clocks[actor])

    def settle(self) -> None:
        """All that has been queued has passed, as far as the host knows."""
        self.join(HOST, self.clocks.max(0))

    def enter(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor; new memory is written by whoever makes it."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        found = self.memory.get(storage._cdata)
        if found is None or found.ref.expired():
            tick = int(self.clocks[self.actor][self.actor])
            found = self.memory[storage._cdata] = Memory(tensor, self.actor, tick, self.label)
        return found

    def access(self, tensor: Tensor, write: bool, offsets: Tensor | None = None) -> None:
        """Note that the actor at work reads or writes a tensor, or its elements at ``offsets``."""
        memory = self.enter(tensor)
        if memory is None:
            return
        self.accesses += 1
        at = _grains(tensor, offsets)
        if not write and memory.unread[at].any():
            self._tell("read", "of what holds nothing of", {ACTORS[memory.owner]}, memory)
        if memory.exempt.any():
            at = at[~memory.exempt[at]]
        actor, clock = self.actor, self.clocks[self.actor]
        late = memory.written[at] > clock[memory.writer[at]]
        late &= memory.writer[at] != actor
        if late.any():
            others = {ACTORS[n] for n in np.unique(memory.writer[at][late])}
            self._tell("write" if write else "read", "after a write of", others, memory)
        if not write:
            memory.read[actor, at] = clock[actor]
            return
        for other in range(len(ACTORS)):
            if other != actor and (memory.read[other, at] > clock[other]).any():
                self._tell("write", "after a read of", {ACTORS[other]}, memory)
        memory.writer[at], memory.written[at] = actor, clock[actor]
        memory.read[:, at] = 0

    def _tell(self, what: str, how: str, others: set[str], memory: Memory) -> None:
        for other in sorted(others):
            race = Race(f"{what} {how}", ACTORS[self.actor], self.label, other, memory.name)
            self.races[race] += 1

    def poll(self) -> None:
        """Find memory that has been freed: its owner may take it again, after its own work."""
        for key in [key for key, memory in self.memory.items() if memory.ref.expired()]:
            memory = self.memory.pop(key)
            self.freed += 1
            if memory.owner == HOST:
                continue
            known = np.maximum(self.clocks[memory.owner], self.clocks[HOST])
            used = memory.read.max(1)
            for actor in range(len(ACTORS)):
                mine = memory.written[memory.writer == actor]
                last = max(int(used[actor]), int(mine.max(initial=0)))
                if actor not in (HOST, memory.owner) and last > known[actor]:
                    race = Race("freed", ACTORS[memory.owner], "", ACTORS[actor], memory.name)
                    self.races[race] += 1

    @contextmanager
    def at_work(self, actor: int, label: str) -> Iterator[None]:
        before = self.actor, self.label
        self.actor, self.label = actor, label
        try:
            yield
        finally:
            self.actor, self.label = before

    def upload(self, host: Tensor) -> Tensor:
        """A copy to the device, by the stream at work: outside of one that is the default's."""
        if self.actor != HOST:
            return host.clone()
        self.clocks[HOST][HOST] += 1
        self.join(DEFAULT, self.clocks[HOST])
        self.clocks[DEFAULT][DEFAULT] += 1
        with self.at_work(DEFAULT, "upload"):
            return host.clone()

    def by_host(self, tensor: Tensor, write: bool) -> None:
        """The host's own access, by way of numpy or a list."""
        self.clocks[HOST][HOST] += 1
        with self.at_work(HOST, "host"):
            self.access(tensor, write)


@lru_cache(maxsize=512)
def _offsets(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    """The number of each element of a tensor among those of its storage."""
    found = torch.full((), offset, dtype=torch.int64)
    for n, step in zip(size, stride, strict=True):
        found = found[..., None] + torch.arange(n) * step
    return found


def offsets_of(tensor: Tensor) -> Tensor:
    return _offsets(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _grains(tensor: Tensor, offsets: Tensor | None) -> Any:
    """Numbers of the grains that elements are on."""
    if offsets is None and tensor.is_contiguous():
        first = tensor.storage_offset() * tensor.element_size()
        return np.arange(first // GRAIN, -(-(first + tensor.nbytes) // GRAIN))
    with torch.utils._python_dispatch._disable_current_modes():
        elements = offsets_of(tensor) if offsets is None else offsets
        return np.unique(PLAIN_NUMPY(elements.flatten()) * tensor.element_size() // GRAIN)


class Watch(TorchDispatchMode):
    """Notes what every operation reads and writes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, world = kwargs or {}, self.world
        returns = func._schema.returns
        aliases = [r.alias_info for r in returns]
        is_view = bool(returns) and all(a is not None and not a.is_write for a in aliases)
        read, write = READS.get(func), WRITES.get(func)
        for number, argument in enumerate(func._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if given is None or (is_view and not is_write):
                continue
            for tensor in tree_leaves(given):
                if isinstance(tensor, Tensor):
                    at, chosen = None, write if is_write else read
                    if number == 0 and chosen is not None:
                        at = chosen(offsets_of(tensor), *args[1:], **kwargs)
                    world.access(tensor, is_write, at)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                world.enter(tensor)
        return out


class ClockEvent(Event):
    """An event that knows what came before it."""

    name = ""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Any = None

    def captured(self) -> Any:
        if self.clock is None:
            raise RuntimeError("waiting on an event that was never recorded")
        return self.clock

    def reset(self) -> None:
        self.clock = None

    def wait(self, actor: int) -> None:
        clock, pair = self.captured(), (ACTORS[actor], self.name)
        self.world.waited[pair] += 1
        if pair not in self.world.dropped:
            self.world.join(actor, clock)

    def synchronize(self) -> None:
        self.wait(HOST)

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, ClockEvent)
        later.captured()
        return 0.0

    idle_ms = elapsed_ms

    @property
    def time_ns(self) -> int:
        return 0


class ClockStream(Stream):
    """A stream whose work is done at once, under its own clock."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.actor = world, name, INDEX[name]

    def run(self, label: str, work: Callable[..., Any], *args: Any) -> Value[Any]:
        world, value = self.world, Value[Any]()
        world.clocks[HOST][HOST] += 1
        world.join(self.actor, world.clocks[HOST])
        world.clocks[self.actor][self.actor] += 1
        with world.at_work(self.actor, label):
            value.set(work(*args))
        world.poll()
        return value

    def record(self, event: Event) -> None:
        assert isinstance(event, ClockEvent)
        self.world.join(self.actor, self.world.clocks[HOST])
        event.clock = self.world.clocks[self.actor].copy()

    def wait(self, event: Event) -> None:
        assert isinstance(event, ClockEvent)
        event.wait(self.actor)


class ClockStreams(Streams):
    """The four streams of a GPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.compute, self.prefill, self.plan, self.copy = (
            ClockStream(world, name) for name in ACTORS[1:5]
        )

    def event(self) -> Event:
        return ClockEvent(self.world)
