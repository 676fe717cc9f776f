"""Times of passes are the passes' own: what else a busy machine does is not in them."""

import time

import torch
from torch import Tensor

from overlap_spec.worker.pass_times import RUNS, least_ms
from overlap_spec.worker.streams import pass_threads


def test_a_pass_of_one_thread_is_timed_by_its_work() -> None:
    """Where a pass waits for a core it has not worked: here it sleeps."""
    ran = 0

    def run() -> tuple[Tensor, ...]:
        nonlocal ran
        ran += 1
        time.sleep(0.1)
        return (torch.ones(3),)

    with pass_threads(1):
        took, outputs = least_ms(run, torch.zeros(1), together=True)
    assert ran == 1 + RUNS
    assert torch.equal(outputs[0], torch.ones(3))
    assert 0 < took < 100
    with pass_threads(2):
        took, _ = least_ms(run, torch.zeros(1), together=False)
    assert took >= 100
