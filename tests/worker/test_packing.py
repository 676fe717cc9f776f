"""Packed layers compute what plain ones do, for any number of rows, with few sizes of kernels."""

import pytest
import torch
from torch import nn

from overlap_spec.kernels.dispatch import use
from overlap_spec.models.packing import PackedLinear, has_bfloat16, pack, rounded_rows
from overlap_spec.worker.streams import pass_threads


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 63, 65, 300])
def test_packed_equals_plain(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Sequential(nn.Linear(40, 24, bias=bias), nn.Linear(24, 56, bias=bias))
    x = torch.randn(rows, 40)
    with torch.inference_mode():
        want = plain(x)
        with use("reference"):
            pack(plain)
        assert all(isinstance(part, PackedLinear) for part in plain)
        got = plain(x)
    assert got.shape == (rows, 56)
    torch.testing.assert_close(got, want)


def test_rows_are_rounded_to_few_sizes() -> None:
    sizes = [rounded_rows(rows) for rows in range(1, 1025)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size <= max(rows * 1.5, rows + 3) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 40


@pytest.mark.skipif(not has_bfloat16(), reason="no bfloat16 instructions")
@pytest.mark.parametrize("sizes", [(192, 576), (512, 3072), (1024, 2048), (1024, 512)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_in_bfloat16_has_the_same_bits_at_any_number_of_rows(
    sizes: tuple[int, int], threads: int
) -> None:
    """Up to 32 rows; with more, oneDNN sums wide layers in another order."""
    torch.manual_seed(0)
    layer = PackedLinear(nn.Linear(*sizes).bfloat16())
    x = torch.randn(32, sizes[0]).bfloat16()
    with torch.inference_mode(), pass_threads(threads):
        want = layer(x)
        for rows in (1, 2, 3, 6, 8, 16, 24):
            assert torch.equal(layer(x[:rows]), want[:rows]), rows
