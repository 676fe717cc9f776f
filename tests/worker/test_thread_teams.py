"""Torch computes in parallel by one thread's team alone: with more threads of OpenMP's than cores,
none waits awake for its next product, and passes of a real size take a sixth longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")
# Else the tokenizer's threads would be counted, which come when they like.
ALONE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
# Large enough buffers that torch would fill them in parallel.
RUN = """
import os, sys, threading
import torch
from overlap_spec import Engine
torch.set_num_threads(4)
settings = {"threads": int(sys.argv[1]), "overlap": "once-sync", "max_running_requests": 256}
with Engine(**settings) as engine:
    asked = {"max_tokens": 24, "temperature": 0}
    engine.generate(["Maria is 34."] * 3, None, asked)
    print(len(os.listdir("/proc/self/task")) - threading.active_count())
"""


@pytest.mark.ci
@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted where Linux lists them")
def test_a_thread_more_for_passes_is_one_thread_more() -> None:
    counts = []
    for threads in (1, 2):
        command = [sys.executable, "-c", RUN, str(threads)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | ALONE
        )
        counts.append(int(done.stdout))
    assert counts[1] - counts[0] == 1
