"""Masks, choices and noise in C++: the Triton kernels' cases, and wide vocabularies."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_spec import kernels
from overlap_spec.kernels import cpu
from overlap_spec.kernels.dispatch import use
from tests.support import kernel_harness
from tests.support.kernel_cases import CASES

pytestmark = pytest.mark.skipif(not cpu.native(), reason="no C++ compiler on this machine")
NAMES = [
    "apply_bitmask",
    "apply_penalties",
    "greedy_choice",
    "sampled_choice",
    "filtered_choice",
    "scarce_choice",
    "top_candidates",
    "legal_candidates",
    "page_slots",
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cases_of_triton(name: str, data: st.DataObject) -> None:
    with patch.object(kernel_harness, "KERNELS", "auto"):
        CASES[name](data.draw, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [2**40, 50, 3000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.01])
def test_wide_vocabularies(dtype: torch.dtype, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    count, vocab = 64, 5003
    logits = (3 * torch.randn(count, vocab)).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32))).int()
    keys = torch.randint(-(2**63), 2**63 - 1, (count,))
    heat, p, least = torch.rand(count) + 0.5, torch.tensor(top_p), torch.tensor(min_p)
    filters = torch.full((count,), top_k), p.expand(count), least.expand(count)

    def choose(part: slice) -> torch.Tensor:
        limits = filters[0][part], filters[1][part], filters[2][part]
        return kernels.masked_choose(
            logits[part].clone(), masks[part], None, heat[part], keys[part], limits
        )

    got = choose(slice(None))
    with use("reference"):
        want = choose(slice(None))
    # Where the cut or the noise is within rounding, another one may be chosen.
    assert (got != want).sum() <= 1
    # Each row by itself.
    assert torch.equal(torch.cat([choose(slice(i, i + 1)) for i in range(count)]), got)


def test_infinite_logits() -> None:
    logits = torch.zeros(2, 70)
    logits[0, 9], logits[1, 3] = torch.inf, 80.0
    filters = torch.tensor([5, 5]), torch.tensor([0.9, 0.9]), torch.tensor([0.1, 0.1])
    for more in ((), (filters,)):
        heat, keys = torch.ones(2), torch.arange(2)
        assert kernels.masked_choose(logits, None, None, heat, keys, *more).tolist() == [9, 3]
