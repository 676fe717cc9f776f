"""How many of the CPU's cores a pass computes with."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# On 2 cores one thread is as fast or faster below, two are above: a team of threads waits for its
# slowest several times a layer, and a small pass is over sooner than that wait.
THREAD_BYTES = 64 << 20
CPUS = Path("/sys/devices/system/cpu")


def pick_threads(asked: int | None, weight_bytes: int) -> int:
    """Threads of torch for each stream.

    Args:
        asked: The setting; taken as it is.
        weight_bytes: What a pass reads of weights.

    Returns:
        Without ``asked`` one for each :data:`THREAD_BYTES`, at least one. At most the physical
        cores, less one for the host and the lane where there are more than two; and at most what
        torch uses in the caller's thread, which its user may have set.
    """
    if asked is not None:
        return asked
    cores = physical_cores()
    if cores > 2:
        cores -= 1
    return max(1, min(weight_bytes // THREAD_BYTES, cores, torch.get_num_threads()))


def physical_cores(cpus: Path = CPUS) -> int:
    """Cores that this process may use; hyperthreads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
