"""How ranks find each other: rank 0 starts the others, or ``torchrun`` has started all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch.distributed

from overlap_spec.errors import ConfigError
from overlap_spec.models.shard import Shard
from overlap_spec.parallel.processes import Processes

# Its stubs leave out what builds of torch differ in.
dist: Any = torch.distributed
Store: TypeAlias = Any
FOLDER_PREFIX = "overlap-spec-ranks-"


class Launch(NamedTuple):
    """How this process stands to the others: the ``store`` where it meets them, whether all are on
    this machine (``loopback``), and their processes, if it has started them."""

    shard: Shard
    store: Store
    loopback: bool = False
    processes: Processes | None = None


def launched(environment: Mapping[str, str] = os.environ) -> Shard | None:
    """The rank that ``torchrun`` gave this process; None where it did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return Shard(int(environment["RANK"]), int(environment["WORLD_SIZE"]))


def launch(size: int, module: str) -> Launch:
    """Rank 0 of ``size`` with processes of its own, which run ``module``; or what torchrun says.
    ConfigError: it has started another number of processes."""
    shard = launched()
    if shard is None:
        # No other user may write here, as they may to a port.
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        processes = Processes(module, [str(folder), str(size)], size, folder)
        return Launch(Shard(0, size), meeting(folder, size), True, processes)
    if shard.size != size:
        raise ConfigError(
            f"tensor_parallel_size {size}: torchrun has started {shard.size} processes"
        )
    found = next(dist.rendezvous("env://"))[0]
    # Of an earlier attempt nothing counts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(shard, dist.PrefixStore(f"overlap_spec/{attempt}", found))


def meeting(folder: Path, size: int) -> Store:
    """The store of ranks on one machine, in a private folder."""
    return dist.FileStore(str(folder / "store"), size)
