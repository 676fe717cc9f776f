"""What interpreted kernels read and write: elements of their arguments, and never the same bytes by
two programs, which a GPU runs in any order, unless both only read.

Elements, not storages: around a layer's keys lie other layers', and in a slice's gaps what is not
its own. Where a kernel's race is harmless (padding's, in page 0 and the like), the memory is named
by :meth:`Launched.exempt`.
"""

from typing import Any

import numpy as np
import torch

SEVERAL = -1


def elements(tensor: torch.Tensor) -> Any:
    """bool ``(bytes of its storage,)``: which are the tensor's."""
    own = np.zeros(tensor.untyped_storage().nbytes(), bool)
    size = tensor.element_size()
    if tensor.numel():
        strides = [stride * size for stride in tensor.stride()]
        view = np.lib.stride_tricks.as_strided(
            own[tensor.storage_offset() * size :], (*tensor.shape, size), (*strides, 1)
        )
        view[...] = True
    return own


class Storage:
    """The bytes of arguments of one storage, and which program of a launch has read or written
    each of them."""

    def __init__(self, tensors: list[torch.Tensor], exempt: Any) -> None:
        storage = tensors[0].untyped_storage()
        self.first, self.size = storage.data_ptr(), storage.nbytes()
        self.own = np.logical_or.reduce([elements(tensor) for tensor in tensors])
        self.exempt = exempt
        self.reader, self.writer = (np.zeros(self.size, np.int32) for _ in range(2))


class Launched:
    """The launch that is being interpreted; no other one runs beside it."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.program = self.launches = 0
        self._exempt: dict[int, Any] = {}

    def exempt(self, tensor: torch.Tensor) -> None:
        """Let programs write what they like to these elements, until :meth:`forget`."""
        first = tensor.untyped_storage().data_ptr()
        self._exempt[first] = self._exempt.get(first, False) | elements(tensor)

    def forget(self) -> None:
        """Exempt nothing: memory is given back, and will be others'."""
        self._exempt.clear()

    def begin(self, arguments: Any) -> None:
        together: dict[int, list[torch.Tensor]] = {}
        for argument in arguments:
            if hasattr(argument, "untyped_storage"):
                first = argument.untyped_storage().data_ptr()
                together.setdefault(first, []).append(argument)
        self.storages = [Storage(ts, self._exempt.get(at)) for at, ts in together.items()]
        self.program, self.launches = 0, self.launches + 1

    def access(self, pointers: Any, mask: Any, write: bool) -> None:
        """Check what a load or store of the current program touches.

        Raises:
            AssertionError: it lies outside of the arguments, or races another program.
        """
        addresses = np.asarray(pointers.data).astype(np.int64)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data.astype(bool), addresses.shape)]
        addresses = np.unique(addresses)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for storage in self.storages:
            here = (addresses >= storage.first) & (addresses + size <= storage.first + storage.size)
            at = addresses[here] - storage.first
            addresses = addresses[~here]
            strange = ~(storage.own[at] & storage.own[at + size - 1])
            assert not strange.any(), f"{strange.sum()} addresses lie beside their argument"
            if storage.exempt is not None:
                at = at[~storage.exempt[at]]
            self._note(storage, at, write)
        assert not len(addresses), f"{len(addresses)} addresses lie in no argument"

    def _note(self, storage: Storage, at: Any, write: bool) -> None:
        writer, reader = storage.writer[at], storage.reader[at]
        others = (writer != 0) & (writer != self.program)
        assert not others.any(), f"program {self.program} touches what {writer[others][0]} wrote"
        if write:
            others = (reader != 0) & (reader != self.program)
            assert not others.any(), f"program {self.program} writes what {reader[others][0]} read"
            storage.writer[at] = self.program
        else:
            alone = (reader == 0) | (reader == self.program)
            storage.reader[at] = np.where(alone, self.program, SEVERAL)


LAUNCHED = Launched()


def check_accesses(interpreter: Any) -> None:
    """Check every launch of this process's interpreter, by :data:`LAUNCHED`."""
    launched, builder = LAUNCHED, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    grid, call = builder.set_grid_idx, interpreter.GridExecutor.__call__

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launched.access(pointers, mask, write=False)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launched.access(pointers, mask, write=True)
        return store(self, pointers, value, mask, *rest)

    def checked_grid(self: Any, *place: int) -> None:
        launched.program += 1
        grid(self, *place)

    def checked_call(self: Any, *args: Any, **constants: Any) -> Any:
        launched.begin(args)
        return call(self, *args, **constants)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.set_grid_idx = checked_grid
    interpreter.GridExecutor.__call__ = checked_call
