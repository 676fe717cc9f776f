"""What interpreted kernels read and write: inside their arguments' storages, and never the same
bytes by two programs, which a GPU runs in any order, unless both only read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SEVERAL = -1


class Storage:
    """The bytes of an argument, and which program of a launch has read or written each of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.first, self.size = storage.data_ptr(), storage.nbytes()
        self.reader, self.writer = (np.zeros(self.size, np.int32) for _ in range(2))


class Launched:
    """The launch that is being interpreted; no other one runs beside it."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.program = 0

    def begin(self, arguments: Any) -> None:
        tensors = {a.untyped_storage().data_ptr(): a for a in arguments if hasattr(a, "data_ptr")}
        self.storages, self.program = [Storage(t) for t in tensors.values()], 0

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


def check_accesses(interpreter: Any) -> None:
    """Check every launch of this process's interpreter."""
    launched, builder = Launched(), interpreter.InterpreterBuilder
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
