"""What the ranks of one engine compute together and tell each other, over ``torch.distributed``.

Two groups of their own: one for tensors of the passes (NCCL on GPUs, gloo on CPUs), which the
compute stream uses alone, and one for what rank 0 tells the others (gloo, host memory), so that
neither waits for the other.
"""

# mypy: disable-error-code="no-any-return"
# TorchScript reads the annotations of a function as they are.

import hashlib
import itertools
import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from overlap_spec.kernels.scripting import traceable
from overlap_spec.parallel.launch import Launch, Store, dist

c10d: Any = _distributed_c10d
# A rank that lets the others wait for so long is given up.
STALL = timedelta(seconds=180)
# What a rank waits for the next step, or for others to load: no time at all means that none comes.
PATIENCE = timedelta(days=365)
POLL_S = 0.02
SETTINGS, KEY = "settings", "key"
# Under torchrun: a secret of all ranks, for machines whose other users may reach its store.
KEY_VARIABLE = "OVERLAP_SPEC_RANKS_KEY"
LOOPBACK = "127.0.0.1"

_numbers = itertools.count()


class Group:
    """One rank's end; made by all ranks at once.

    Args:
        device: Of the passes' tensors.
        settings: Rank 0: what the others must know to come here, as plain data; they read it by
            :func:`told`.

    Attributes:
        key: What rank 0 signs its calls with, 32 bytes: who reaches a port of a rank does not know
            it. It is in the ranks' store, a private folder on one machine.

    Raises:
        EngineUnavailable: a rank that this process has started ended instead.
    """

    def __init__(self, launched: Launch, device: torch.device, settings: object = None) -> None:
        shard, store, loopback, processes = launched
        self.shard, self._store, self._processes = shard, store, processes
        if not shard.rank:
            store.set(KEY, secrets.token_hex())
            store.set(SETTINGS, json.dumps(settings, default=os.fspath))
        self._meet("groups")
        own = os.environ.get(KEY_VARIABLE, "").encode()
        self.key = hashlib.blake2b(own + store.get(KEY), digest_size=32).digest()
        gloo, place = dist.ProcessGroupGloo, (shard.rank, shard.size)
        options = gloo._Options()
        options._timeout = STALL
        own_machine = loopback and gloo.create_device(hostname=LOOPBACK)
        options._devices = [own_machine or gloo.create_default_device()]
        self._control = gloo(dist.PrefixStore("control", store), *place, options)
        own, kind = dist.PrefixStore("passes", store), dist.ProcessGroup.BackendType.GLOO
        made: Any = gloo
        if device.type == "cuda":
            made, kind = dist.ProcessGroupNCCL, dist.ProcessGroup.BackendType.NCCL
            options = made.Options()
            options._timeout = STALL
        self._passes: Any = made(own, *place, options)
        # By a name, which a recorded pass can hold.
        self.name = f"overlap_spec-{os.getpid()}-{next(_numbers)}"
        # Of which the registry keeps no more than a weak reference.
        self._named = dist.ProcessGroup(own, *place)
        self._named._set_default_backend(kind)
        self._named._register_backend(torch.device(device.type), kind, self._passes)
        self._named._set_group_name(self.name)
        c10d._register_process_group(self.name, self._named)

    # Of the passes

    def sum(self, x: Tensor) -> Tensor:
        """See :class:`overlap_spec.models.parallel.Collectives`."""
        return _sum(x, self.name)

    def gather(self, x: Tensor) -> Tensor:
        """See :class:`overlap_spec.models.parallel.Collectives`."""
        return _gather(x, self.shard.size, self.name)

    # Of the host

    def send(self, tensor: Tensor) -> None:
        """Tell all others a tensor in host memory; returns when it is under way."""
        self._broadcast(tensor, self.shard.rank, STALL)

    def receive(self, tensor: Tensor, source: int = 0) -> None:
        """Wait until rank ``source`` has told it: rank 0 however long that takes; another, which
        was asked for it, as long as a rank may stall."""
        self._broadcast(tensor, source, STALL if source else PATIENCE)

    def _broadcast(self, tensor: Tensor, source: int, patience: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, patience
        self._control.broadcast([tensor], options).wait()

    def least(self, name: str, number: int) -> int:
        """The least of all ranks' numbers of what ``name`` says; waits for the slowest rank."""
        self._meet(name)
        found = torch.tensor([number])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._control.allreduce([found], options).wait()
        return int(found)

    def _meet(self, name: str) -> None:
        """Wait for all ranks; they may take very different times to load."""
        store, shard = self._store, self.shard
        if shard.rank:
            store.set(f"{name}/{shard.rank}", "here")
            store.wait([f"{name}/go"], PATIENCE)
            return
        others = [f"{name}/{rank}" for rank in range(1, shard.size)]
        while not store.check(others):
            if self._processes is not None:
                self._processes.check()
            time.sleep(POLL_S)
        store.set(f"{name}/go", "go")

    def abort(self) -> None:
        """Let go of what waits for ranks that are gone."""
        if hasattr(self._passes, "abort") and self._passes.name() == "nccl":
            self._passes.abort()

    def close(self) -> None:
        """Leave; nothing of the passes may be under way."""
        c10d._unregister_process_group(self.name)
        self._passes = self._named = self._control = None


def told(store: Store) -> Any:
    """The settings that rank 0 tells the others, as plain data; waits for them."""
    store.wait([SETTINGS], PATIENCE)
    return json.loads(store.get(SETTINGS))


# A group's name cannot be traced.
@traceable
def _sum(x: Tensor, group: str) -> Tensor:
    out = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(out)


@traceable
def _gather(x: Tensor, size: int, group: str) -> Tensor:
    out = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    parts = torch.ops._c10d_functional.wait_tensor(out)
    rows = parts.view(size, x.size(0), x.size(1)).transpose(0, 1)
    return rows.reshape(x.size(0), size * x.size(1))
