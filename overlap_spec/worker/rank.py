"""The process of a rank that rank 0 has started: ``python -m overlap_spec.worker.rank``, then the
process id of rank 0, the folder of the store, the number of ranks, and this one's."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from overlap_spec.children import end_with, end_with_input
from overlap_spec.errors import OverlapSpecError
from overlap_spec.models.shard import Shard
from overlap_spec.parallel.launch import Launch, meeting
from overlap_spec.worker.build import run_follower


def main(arguments: list[str]) -> None:
    """Follow rank 0 until it ends."""
    # Also where this process is stopped.
    end_with(int(arguments[0]))
    end_with_input()
    size, rank = map(int, arguments[2:])
    status = 0
    try:
        run_follower(Launch(Shard(rank, size), meeting(Path(arguments[1]), size), True))
    except OverlapSpecError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # Threads of a group whose other ends are gone may wait for ever.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
