"""What the CPU is good for: how many threads a pass is to have, and whether bfloat16 pays."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from overlap_spec.memory import control_groups
from overlap_spec.models.packing import has_bfloat16

# On 2 cores one thread is faster at 8 MB of weights, two are at 80 MB: a team of threads waits for
# its slowest several times a layer, and a small pass is over sooner than that wait.
THREAD_BYTES = 32 << 20
# Smaller checkpoints stay in float32, where law 8 is exact whatever the batch: their passes are
# short anyhow.
BFLOAT16_BYTES = 32 << 20
CPUS = Path("/sys/devices/system/cpu")


def pick_threads(asked: int | None, weight_bytes: int, processes: int = 1) -> int:
    """Threads of torch for each stream: those ``asked`` for, or one for each :data:`THREAD_BYTES`
    of the weights that a pass reads, at least one. At most the physical cores, which ``processes``
    share, less one for the host and the lane where there are more than two; and at most what torch
    uses in the caller's thread, which its user may have set."""
    if asked is not None:
        return asked
    cores = physical_cores()
    cores = (cores - (cores > 2)) // processes
    return max(1, min(weight_bytes // THREAD_BYTES, cores, torch.get_num_threads()))


def pick_float(stored: torch.dtype, count: int) -> torch.dtype:
    """The type that weights are computed in, where the user names none: bfloat16 of a checkpoint
    ``stored`` in bfloat16 whose ``count`` parameters have at least :data:`BFLOAT16_BYTES`, on a
    processor with the instructions; otherwise float32."""
    large = count * torch.bfloat16.itemsize >= BFLOAT16_BYTES
    if stored is torch.bfloat16 and large and has_bfloat16():
        return torch.bfloat16
    return torch.float32


def physical_cores(cpus: Path = CPUS) -> int:
    """Cores that this process may use, by its affinity and by the quota of its control groups
    (at least one); hyperthreads of one core count once."""
    quota, cores = cpu_quota(), _own_cores(cpus)
    return cores if quota is None else min(cores, max(1, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Seconds of processor time a second that this process's control groups have, the least of
    all that hold it; None: no group has a limit."""
    shares = []
    for folder in control_groups("cpu", root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            # Without a limit version 2 says "max", version 1 a negative number.
            shares.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return min((share for share in shares if share > 0), default=None)


def _own_cores(cpus: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for number in os.sched_getaffinity(0):
        siblings = cpus / f"cpu{number}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(number))
    return len(cores)
