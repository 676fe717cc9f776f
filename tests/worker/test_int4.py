"""Weights of 4 bits: as files have them or rounded here; a row's bits are its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from overlap_spec.engine import Engine
from overlap_spec.models.places import places
from overlap_spec.models.quantization import (
    GROUP,
    GridLinear,
    Int4Linear,
    has_int4,
    pack_grids,
    quantize,
    round_groups,
)
from overlap_spec.models.tensors import grid_names
from overlap_spec.models.weights import load_decoder
from overlap_spec.types import Output
from overlap_spec.worker.streams import pass_threads
from tests.support.quantised import CPU, LAYOUTS, draw, write
from tests.support.tiers import few

needs_int4 = pytest.mark.skipif(not has_int4(), reason="no products of 4 bits on this machine")
KEPT = [
    "AWQ", "GPTQ int4", "GPTQ, second format", "GPTQ, no g_idx", "compressed-tensors w4a16",
    "compressed-tensors w4a16, zeros",
]  # fmt: skip


def test_groups_are_rounded_by_their_own_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 4 * GROUP) * torch.logspace(-6, 2, 9)[:, None]
    weight[4, :GROUP] = 0
    weight[5].abs_()
    grid = round_groups(weight)
    assert grid.codes.max() == 15
    assert grid.scales.shape == grid.zeros.shape == (9, 4)
    steps = grid.scales.repeat_interleave(GROUP, 1)
    assert ((grid.weight() - weight).abs() <= steps * 1.0001).all()
    assert (grid.weight()[weight == 0] == 0).all()


@needs_int4
@pytest.mark.parametrize("sizes", [(64, 24), (192, 577), (1024, 512), (2048, 16)])
@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(sizes: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=size != 64).to(dtype)
    grid = round_groups(plain.weight.data, size)
    layer = Int4Linear(grid, plain.bias)
    # Rows of very different sizes: one must not decide how another is rounded.
    x = (torch.randn(130, sizes[0]) * torch.logspace(-3, 3, 130)[:, None]).to(dtype)
    with torch.inference_mode():
        bias = None if plain.bias is None else plain.bias.float()
        want = F.linear(x.float(), grid.weight(), bias)
        got = layer(x)
        assert ((got.float() - want).norm(dim=1) / want.norm(dim=1)).max() < 0.02
        for threads in (1, 2):
            with pass_threads(threads):
                for rows in (0, 1, 2, 3, 5, 6, 7, 12, 13, 33, 129):
                    assert torch.equal(layer(x[:rows]), got[:rows]), rows
                    assert torch.equal(layer(x[130 - rows :]), got[130 - rows :]), rows
        # A row that is no run of memory.
        assert torch.equal(layer(x.T.contiguous().T[3:9]), got[3:9])


@needs_int4
def test_whole_numbers_are_multiplied_exactly() -> None:
    """Digits and codes that need no rounding: the product is float32's, of any zero."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 40, bias=False)
    grid = round_groups(plain.weight.data)
    grid = grid._replace(scales=torch.full_like(grid.scales, 0.5))
    x = torch.randint(-127, 128, (7, 64)).float()
    x[:, ::GROUP] = 127.0
    with torch.inference_mode():
        assert torch.equal(Int4Linear(grid, None)(x), x @ grid.weight().T)


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_of_4_bits_are_kept_as_they_are(name: str, tmp_path: Path) -> None:
    quantised, make = LAYOUTS[name]
    stored, plain = draw(make)
    folder = write(tmp_path, quantised, stored)
    decoder = load_decoder(folder, torch.float32, CPU, keep_int4=True)
    grids = [m for m in decoder.modules() if isinstance(m, GridLinear)]
    assert len(grids) == (8 if name in KEPT else 0)
    assert bool(grid_names(folder)) == (name in KEPT)
    found = {}
    for kept, place in places(decoder).items():
        parts = kept.rpartition(".")
        if parts[2] == "codes":
            codes, scales, zeros = (
                places(decoder)[f"{parts[0]}.{part}"].published()
                for part in ("codes", "scales", "zeros")
            )
            wide = codes.unflatten(1, (scales.shape[1], -1)).float() - zeros.float()[..., None]
            found[f"{parts[0]}.weight"] = (wide * scales[..., None]).flatten(1)
        elif parts[2] not in ("scales", "zeros"):
            found[kept] = place.published()
    assert found.keys() == plain.keys()
    for weight, tensor in plain.items():
        assert torch.equal(found[weight], tensor.float()), weight


@needs_int4
def test_a_heads_inputs_that_are_no_whole_groups_are_in_int8() -> None:
    module = nn.Module()
    module.small, module.odd, module.lm_head = nn.Linear(64, 8), nn.Linear(20, 8), nn.Linear(64, 9)
    quantize([module], "int4")
    assert isinstance(module.small, Int4Linear)
    assert not isinstance(module.odd, Int4Linear)
    assert not isinstance(module.lm_head, Int4Linear)


def answers(engine: Engine, batch: int) -> list[tuple[int, ...]]:
    sampling: list[Any] = [
        {"max_tokens": 20, "temperature": 0.9 * (n % 2), "seed": n} for n in range(6)
    ]
    prompts = [f"prompt number {n * 37}" for n in range(6)]
    outputs: list[Output] = []
    for i in range(0, 6, batch):
        outputs += engine.generate(prompts[i : i + batch], None, sampling[i : i + batch])
    assert not any(output.error for output in outputs)
    return [output.token_ids for output in outputs]


@needs_int4
@pytest.mark.parametrize("kind", few(("GPTQ int4", "compressed-tensors w4a16", "int4"), "int4"))
def test_speculation_changes_no_text(kind: str, tmp_path: Path) -> None:
    """Law 8, with and without recordings, alone and in a batch."""
    settings: dict[str, Any] = {"grammar_isolated": False, "context_length": 128}
    quantised, make = LAYOUTS.get(kind, (None, None))
    stored, plain = draw(make or LAYOUTS["AWQ"][1])
    folder = write(tmp_path, quantised, stored if make else plain)
    if make is None:
        settings["quantization"] = kind
    with Engine(str(folder), **settings, algorithm="none", overlap="none") as engine:
        held = [m for m in engine.core.worker.runner.modules() if isinstance(m, Int4Linear)]
        assert len(held) == 8
        want = answers(engine, 1)
        assert answers(engine, 6) == want
    for graphs in (True, False):
        drafts: dict[str, Any] = {"algorithm": "ngram", "adaptive": "static", "graphs": graphs}
        with Engine(str(folder), **settings, **drafts) as engine:
            assert answers(engine, 3) == want
    if make is not None:
        # A type that is asked for holds for all weights.
        with Engine(str(folder), **settings, algorithm="none", dtype="float32") as engine:
            modules = engine.core.worker.runner.modules()
            assert not any(isinstance(m, Int4Linear) for m in modules)


def test_grids_are_laid_out_once(tmp_path: Path) -> None:
    quantised, make = LAYOUTS["AWQ"]
    folder = write(tmp_path, quantised, draw(make)[0])
    decoder = load_decoder(folder, torch.float32, CPU, keep_int4=True)
    pack_grids(decoder)
    assert not any(isinstance(m, GridLinear) for m in decoder.modules())
    assert sum(isinstance(m, Int4Linear) for m in decoder.modules()) == 8
