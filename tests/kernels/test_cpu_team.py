"""A thread's team: loops are done whole, and a fault in one is the caller's."""

import threading

import pytest
import torch

from overlap_spec import kernels
from overlap_spec.kernels import cpu
from overlap_spec.worker.streams import get_pass_threads, pass_threads

pytestmark = pytest.mark.skipif(not cpu.native(), reason="no native products on this machine")


def test_many_teams_at_once_compute_what_one_thread_does() -> None:
    """More threads than cores, so that helpers come late or not at all."""
    torch.manual_seed(0)
    weight, rows = cpu.pack(torch.randn(4096, 512)), torch.randn(16, 9, 512)
    product = torch.ops.overlap_spec.product
    wanted = [product(x, weight, None, 4096) for x in rows]
    found: list[bool] = []

    def compute(members: int) -> None:
        for loop in range(160):
            # A team that grows and shrinks.
            with torch.inference_mode(), pass_threads(1 + (loop + members) % members):
                at = loop % len(rows)
                found.append(torch.equal(product(rows[at], weight, None, 4096), wanted[at]))

    threads = [threading.Thread(target=compute, args=(members,)) for members in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4 * 160


def test_a_fault_in_any_part_of_a_loop_is_raised_and_the_next_is_done() -> None:
    torch.manual_seed(0)
    rows, dim = 512, 64
    qkv, rotary = torch.randn(rows, 8, dim), torch.randn(rows, 2, dim)
    caches, slots = torch.zeros(2, rows // 4, 4, 2, dim), torch.arange(rows)
    wanted = kernels.rotate_and_store(qkv, rotary, caches[0], caches[1], slots)
    with pass_threads(3):
        for at in (0, 255, 511):
            wrong = slots.clone()
            wrong[at] = rows
            with pytest.raises(RuntimeError, match="slots: outside of the cache"):
                kernels.rotate_and_store(qkv, rotary, caches[0], caches[1], wrong)
            got = kernels.rotate_and_store(qkv, rotary, caches[0], caches[1], slots)
            assert torch.equal(got, wanted)


def test_threads_of_a_pass_are_one_threads_own() -> None:
    before = torch.get_num_threads()
    with pass_threads(3):
        assert get_pass_threads() == 3
        # Torch's own would spin on the team's cores.
        assert torch.get_num_threads() == 1
        with pass_threads(2):
            assert get_pass_threads() == 2
        assert get_pass_threads() == 3
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(cpu.team()))
        other.start()
        other.join()
        assert found == [0]
    assert torch.get_num_threads() == before
