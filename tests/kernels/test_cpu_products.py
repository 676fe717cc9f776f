"""Native products: what plain layers compute, the same bits for a row beside any others."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overlap_spec.kernels import cpu
from overlap_spec.kernels.dispatch import use
from overlap_spec.models.packing import NativeLinear, PackedLinear, onednn_packs, pack
from overlap_spec.models.quantization import (
    LARGEST,
    LEAST,
    Int8Linear,
    NativeInt8Linear,
    has_vnni,
    round_rows,
)
from overlap_spec.worker.graphs import TracedGraph
from overlap_spec.worker.streams import pass_threads

native = pytest.mark.skipif(not cpu.native(), reason="no native products on this machine")
DTYPES = [torch.float32, torch.bfloat16]
# Of a row's sums: what float32 rounds, and bfloat16 its result.
LEAST_OFF = {torch.float32: 4e-6, torch.bfloat16: 4e-3}
SIZES = [(40, 24), (192, 577), (1024, 512), (2052, 256)]


def rows_of_very_different_sizes(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)


@native
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_floats(
    sizes: tuple[int, int], bias: bool, threads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=bias).to(dtype)
    layer = NativeLinear(plain)
    x = rows_of_very_different_sizes(130, sizes[0], dtype)
    with torch.inference_mode(), pass_threads(threads):
        got = layer(x)
        exact = copy.deepcopy(plain).double()(x.double())
        off = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert off.max() < LEAST_OFF[dtype]
        for rows in (1, 2, 5, 6, 7, 9, 12, 13, 33, 129):
            assert torch.equal(layer(x[:rows]), got[:rows]), rows
            assert torch.equal(layer(x[-rows:]), got[-rows:]), rows
        # A row that is no run of memory, and no row at all.
        assert torch.equal(layer(x.T.contiguous().T[3:9]), got[3:9])
        assert layer(x[:0]).shape == (0, sizes[1])


@native
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_bytes_are_exact(
    sizes: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=bias).to(dtype)
    ours = NativeInt8Linear(plain)
    x = rows_of_very_different_sizes(40, sizes[0], dtype)
    x[7], x[8, 0], x[9, 1] = 0, torch.nan, torch.inf
    fine = [row for row in range(40) if row not in (8, 9)]
    with torch.inference_mode():
        got = ours(x)
        assert torch.equal(got[fine], in_integers(plain, x[fine]))
        if has_vnni():
            assert torch.equal(got[fine], Int8Linear(plain)(x)[fine])
        assert not got[8:10].isfinite().any()
        for rows in (1, 6, 13):
            assert torch.equal(ours(x[-rows:]), got[-rows:])


def in_integers(plain: nn.Linear, x: Tensor) -> Tensor:
    """Of the product with a weight in 8 bits every sum as an integer."""
    weight, scale = round_rows(plain.weight.data)
    unit = x.float().abs().amax(1, True).clamp(min=LEAST) / LARGEST
    digits = (x.float() / unit).round()
    out = (digits.double() @ weight.double().T).float() * scale * unit
    return (out if plain.bias is None else out + plain.bias).to(x.dtype)


@native
@pytest.mark.parametrize("sizes", SIZES)
def test_a_weight_that_bfloat16_holds_is_read_in_it(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes).bfloat16().float()
    layer = NativeLinear(plain)
    assert layer.packed.dtype is torch.bfloat16
    whole = torch.ops.overlap_spec.pack(plain.weight.data)
    x = rows_of_very_different_sizes(20, sizes[0], torch.float32)
    for rows in (1, 5, 6, 13, 20):
        wanted = torch.ops.overlap_spec.product(x[:rows], whole, plain.bias.data, sizes[1])
        with torch.inference_mode():
            assert torch.equal(layer(x[:rows]), wanted)
    with torch.no_grad():
        plain.weight[-1, -1] = 1 + 2**-12
    assert NativeLinear(plain).packed.dtype is torch.float32


@native
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_product_takes_any_number_of_rows(dtype: torch.dtype) -> None:
    layer = NativeLinear(nn.Linear(64, 48).to(dtype))
    x = torch.randn(9, 64).to(dtype)
    with torch.inference_mode():
        recorded = TracedGraph(layer, lambda x: (layer(x),), (x[:3],))
        for rows in (1, 3, 9):
            assert torch.equal(recorded(x[:rows])[0], layer(x[:rows]))


def test_references_and_other_sizes_are_onednns() -> None:
    dtypes = [dtype for dtype in DTYPES if onednn_packs(dtype)]
    with use("reference"):
        module = nn.Sequential(*(nn.Linear(8, 8).to(dtype) for dtype in dtypes))
        pack(module)
    wide = nn.Sequential(*(nn.Linear(6, 8).to(dtype) for dtype in dtypes))
    pack(wide)
    assert all(isinstance(part, PackedLinear) for part in (*module, *wide))


@native
def test_what_cannot_be_compiled_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    fresh = cpu.library.__wrapped__
    assert not fresh()
    assert "there is no C++ compiler: install g++, or set CXX" in caplog.text
    compiler = tools / "g++"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{Path(shutil.which('sh') or '').parent}")
    assert not fresh()
    assert "failed: broken" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))
