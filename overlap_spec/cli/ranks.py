"""Commands that ``torchrun`` starts once for each rank of tensor parallelism."""

from __future__ import annotations

import os
from typing import Any


def follow(flags: dict[str, Any]) -> None:
    """Do the work of a rank other than 0, and end the process; in any other process nothing.

    Args:
        flags: The command's, of which rank 0's count.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
        return
    from overlap_spec.engine import Engine

    # Ends the process.
    Engine(flags["model"], tensor_parallel_size=flags["tensor_parallel_size"])
