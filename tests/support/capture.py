"""What a CUDA graph's capture refuses, found on a machine without a GPU.

A worker's tensors give way to ones on torch's ``meta`` device, which have shapes and no values, and
say of themselves that they are CUDA's. So what runs is what would run on a GPU, Triton's wrappers
included, whose launches are noted; whatever asks for a value has none to read.
``worker/graphs.py`` records as on a GPU, but that :class:`Capture` stands where the driver would:
it raises at what a capture cannot hold.

- The host reads no value, and no size depends on one: ``item``, ``nonzero``, masks as indices.
- Nothing goes up from the host or down to it: pageable memory would be waited for, and pinned
  memory would be read again at every replay, whoever owns it then.
- The host pins no memory and waits for no stream or event.
- Nothing that a graph takes or gives is expanded, or lies in the memory that graphs share.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap_spec.engine import Engine
from overlap_spec.kernels.dispatch import use
from overlap_spec.kernels.triton.launch import Launch, recorded
from overlap_spec.worker import build as build_module
from overlap_spec.worker import recordings as recordings_module
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.graphs import CudaGraph
from overlap_spec.worker.worker import Worker
from tests.support import chaos

DEVICE = torch.device("meta")
# What waits for the host or the device, and is no operation on tensors.
WAITS = (
    "torch.cuda.synchronize",
    "torch.cuda.Stream.synchronize",
    "torch.cuda.Event.synchronize",
    "torch.cuda.Event.query",
    "torch.cuda.Event.elapsed_time",
)
aten = torch.ops.aten
# An index of these is a mask, whose set entries must be counted first.
MASKS = (torch.bool, torch.uint8)
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Of a single number on the host these copy; other operations take it as an argument.
COPIES = {aten.copy_, aten._to_copy, *INDEXED}
DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CaptureError(RuntimeError):
    """A capture cannot hold this."""


class Capture(TorchDispatchMode):
    """Stands where the driver would while a graph is captured.

    Attributes:
        recording: Whether a graph is being captured.
        graphs: That have been captured.
        operations: That they hold, but for kernels' launches.
        refused: What could not be captured, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.graphs = self.operations = 0
        self.refused: list[str] = []
        self._pool: dict[int, object] = {}

    def refuse(self, why: str) -> None:
        """Raise where a graph is being captured."""
        if self.recording:
            self.refused.append(why)
            raise CaptureError(why)

    def hold(self, graph: CudaGraph) -> None:
        """Raise where a graph's inputs or outputs cannot be written to call by call."""
        places = [
            (x.untyped_storage()._cdata, x.storage_offset()) for x in graph.inputs if x.numel()
        ]
        faults = {
            "is expanded": any(map(is_expanded, (*graph.inputs, *graph.outputs))),
            "lies in the pool": any(
                x.untyped_storage()._cdata in self._pool for x in (*graph.inputs, *graph.outputs)
            ),
            "is another one too": len(set(places)) < len(places),
        }
        for why, true in faults.items():
            if true:
                self.refused.append(f"an input or output {why}")
                raise CaptureError(self.refused[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        # Of what is made of other operations, each of those is seen.
        with self:
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        self.operations += 1
        found = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(found):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                # Held, so that no other one gets its number.
                self._pool[storage._cdata] = storage
        return found

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        name, packet = str(func), func.overloadpacket
        given = _tensors((args, kwargs))
        on_host = [x for x in given if x.device.type == "cpu"]
        on_device = len(given) > len(on_host)
        if kwargs.get("pin_memory") or packet in (aten.pin_memory, aten._pin_memory):
            self.refuse(f"{name} pins memory")
        # Masks as indices are known by their type, since other indices are as good as any.
        indices = tree_leaves(args[1]) if packet in INDEXED else []
        if any(isinstance(x, Tensor) and x.dtype in MASKS for x in indices):
            self.refuse(f"{name} counts a mask's entries")
        if on_device and packet not in INDEXED and DEPENDS & set(func.tags):
            self.refuse(f"{name} reads a value")
        if packet == aten._local_scalar_dense and on_device:
            self.refuse(f"{name} reads a value")
        goes_to = kwargs.get("device")
        target = torch.device(goes_to).type if goes_to is not None else None
        if packet == aten.copy_:
            target = args[0].device.type
        if target == "cpu" and on_device:
            self.refuse(f"{name} goes down to the host")
        if packet == aten.copy_ and is_expanded(args[0]):
            self.refuse(f"{name} writes to elements that share their memory")
        goes_up = target == DEVICE.type or on_device
        if goes_up and any(x.dim() or packet in COPIES for x in on_host):
            self.refuse(f"{name} comes up from the host")


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def is_expanded(x: Tensor) -> bool:
    """Whether several elements share their memory."""
    return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel: all but views and new memory. Those of Triton are
    counted by their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [r.alias_info for r in func._schema.returns]
        is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        self.count += not is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


class Exchange:
    """Gives modules tensors that are on the device and hold nothing; and theirs back."""

    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._made: dict[int, Tensor] = {}

    def exchange(self, root: nn.Module) -> None:
        """All tensors and devices of ``root`` and the modules in it."""
        for module in root.modules():
            own = vars(module)
            for holder in (own["_parameters"], own["_buffers"], own):
                for name, value in list(holder.items()):
                    new = self._of(value)
                    if new is not value:
                        self._undo.append((holder, name, value))
                        holder[name] = new

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, Tensor):
            if id(value) not in self._made:
                made = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=DEVICE
                )
                self._made[id(value)] = made
            return self._made[id(value)]
        if type(value) in (list, tuple) and any(isinstance(x, Tensor) for x in value):
            return type(value)(self._of(x) for x in value)
        if type(value) is dict and any(isinstance(x, Tensor) for x in value.values()):
            return {name: self._of(x) for name, x in value.items()}
        return value

    def undo(self) -> None:
        for holder, name, value in reversed(self._undo):
            holder[name] = value


class NoGraph:
    """In place of ``torch.cuda.CUDAGraph``: outputs without values need no replay."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._capture.recording = True

    def capture_end(self) -> None:
        self._capture.recording = False
        self._capture.graphs += 1

    def replay(self) -> None: ...


# These make a tensor on the host and take it up, which dispatch does not see.
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class Makers(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers while a graph is captured."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS:
            given = args[0] if isinstance(args[0], Tensor) else None
            device = kwargs.get("device", None if given is None else given.device)
            of_numbers = given is None or func is Tensor.new_tensor
            if of_numbers and device is not None and torch.device(device).type == DEVICE.type:
                self.capture.refuse(f"{func.__name__} comes up from the host")
        return func(*args, **kwargs)


@contextmanager
def as_on_a_gpu(worker: Worker) -> Iterator[tuple[Capture, CudaGraphs, list[Launch]]]:
    """A worker's passes as a GPU would run them: its captures, its recordings, its launches.

    Of an engine that does nothing else meanwhile; it is as before then.
    """
    exchange, capture = Exchange(), Capture()

    class Held(CudaGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            capture.hold(self)

    def waits(*_: Any, **__: Any) -> None:
        capture.refuse("the host waits for the device")

    stands: dict[str, Any] = {
        "torch.Tensor.is_cuda": property(lambda x: x.device.type == DEVICE.type),
        "torch.cuda.CUDAGraph": lambda: NoGraph(capture),
        "torch.cuda.graph_pool_handle": lambda: (0, 0),
        "torch.cuda.current_stream": lambda *_: None,
        "torch.cuda.memory_reserved": lambda *_: 0,
        "overlap_spec.worker.cuda_graphs.CudaGraph": Held,
        # An H100's.
        "overlap_spec.kernels.tuning.architecture": lambda _: "sm_90",
        "overlap_spec.kernels.triton.attention.multiprocessors": lambda _: 132,
        **dict.fromkeys(WAITS, waits),
    }
    with ExitStack() as stack:
        for name, stand in stands.items():
            stack.enter_context(patch(name, stand))
        # Results without values are not compared.
        stack.enter_context(patch.object(recordings_module, "same", lambda *_: True))
        for mode in (capture, Makers(capture), use("triton"), torch.inference_mode()):
            stack.enter_context(mode)
        launches = stack.enter_context(recorded())
        try:
            exchange.exchange(worker.runner)
            yield capture, CudaGraphs(worker.recordings.drafts, worker.guard), launches
        finally:
            exchange.undo()


@contextmanager
def engine_of(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Iterator[Engine]:
    """An engine that records nothing by itself."""
    # Weights that are packed for the CPU are no tensors.
    monkeypatch.setattr(build_module, "pack", lambda _: None)
    fixed = {"graphs": False, "overlap": "none", "lane_threads": 0, "adaptive": "static"}
    with chaos.build(tiny, **{**fixed, **settings}) as engine:
        yield engine
