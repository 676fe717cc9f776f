"""How ranks find each other: rank 0 starts the others, or ``torchrun`` has started all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch.distributed

from overlap_spec.errors import ConfigError
from overlap_spec.models.shard import Shard
from overlap_spec.parallel.processes import Processes

# Its stubs leave out what builds of torch differ in.
dist: Any = torch.distributed
Store: TypeAlias = Any
LOOPBACK = "127.0.0.1"
CONNECT_S = 120.0


class Launch(NamedTuple):
    """This process's rank, where it meets the others, and their processes if they are its own."""

    shard: Shard
    store: Store
    processes: Processes | None


def launched(environment: Mapping[str, str] = os.environ) -> Shard | None:
    """The rank that ``torchrun`` gave this process; None where it did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return Shard(int(environment["RANK"]), int(environment["WORLD_SIZE"]))


def launch(size: int, module: str) -> Launch:
    """Rank 0 of ``size`` with processes of its own, which run ``module``; or what torchrun says.

    Raises:
        ConfigError: torchrun has started another number of processes.
    """
    shard = launched()
    if shard is None:
        store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        arguments = [str(store.port), str(size)]
        return Launch(Shard(0, size), store, Processes(module, arguments, size))
    if shard.size != size:
        raise ConfigError(
            f"tensor_parallel_size {size}: torchrun has started {shard.size} processes"
        )
    found: Store = next(dist.rendezvous("env://"))[0]
    # Of an earlier attempt nothing counts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(shard, dist.PrefixStore(f"overlap_spec/{attempt}", found), None)


def connect(port: int) -> Store:
    """The store of the rank 0 that has started this process."""
    timeout = timedelta(seconds=CONNECT_S)
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
