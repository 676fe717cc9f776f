"""Int8 weights: close to the plain ones, and a token's result is the same beside any others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels.scripting import scripted
from overlap_spec.models.packing import PackedLinear
from overlap_spec.models.quantization import (
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    NativeInt8Linear,
    has_int4,
    has_int8,
    has_vnni,
    int8_linear,
    quantize,
    round_groups,
    round_rows,
)
from overlap_spec.types import Output
from overlap_spec.worker import site
from overlap_spec.worker.build import build_streams
from overlap_spec.worker.site import check_quantization
from overlap_spec.worker.streams import pass_threads
from tests.support.tiers import few

needs_int8 = pytest.mark.skipif(not has_int8(), reason="no AVX512-VNNI")
needs_int4 = pytest.mark.skipif(not has_int4(), reason="no products of 4 bits on this machine")
needs_vnni = pytest.mark.skipif(not has_vnni(), reason="no AVX512-VNNI")
DTYPES = (torch.float32, torch.bfloat16)


def test_rows_are_rounded_by_their_own_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 33) * torch.logspace(-6, 2, 9)[:, None]
    weight[4] = 0
    rounded, scale = round_rows(weight)
    assert rounded.dtype is torch.int8
    assert rounded.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4
    assert ((rounded * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 24), (192, 576), (1024, 512), (2048, 256)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_at_any_number_of_rows(
    sizes: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes).to(dtype)
    layer = Int8Linear(plain)
    # Rows of very different sizes: one must not decide how another is rounded.
    x = (torch.randn(200, sizes[0]) * torch.logspace(-3, 3, 200)[:, None]).to(dtype)
    with torch.inference_mode(), pass_threads(threads):
        want = layer(x)
        off = (want - plain(x)).float().norm(dim=1) / plain(x).float().norm(dim=1)
        assert off.max() < 0.025
        for rows in (1, 2, 3, 6, 9, 16, 24, 33, 64, 129):
            assert torch.equal(layer(x[:rows]), want[:rows]), rows
            assert torch.equal(layer(x[-rows:]), want[-rows:]), rows
            held = layer.packed, layer.scale, layer.zero, layer.bias
            recorded = scripted(int8_linear)(x[:rows], *held)
            assert torch.equal(recorded, want[:rows]), rows


@pytest.mark.parametrize(
    "rounded",
    [
        pytest.param(Int8Linear, marks=needs_vnni),
        pytest.param(
            lambda plain: Int4Linear(round_groups(plain.weight.data), plain.bias), marks=needs_int4
        ),
    ],
)
def test_no_row_harms_another(rounded: Callable[[nn.Linear], nn.Module]) -> None:
    layer = rounded(nn.Linear(64, 8))
    x = torch.randn(4, 64)
    with torch.inference_mode():
        want = layer(x)
        x[0], x[1], x[2, 5] = 0, torch.nan, torch.inf
        got = layer(x)
        assert torch.equal(got[0], layer.bias)
        assert not got[1:3].isfinite().any()
        assert torch.equal(got[3], want[3])


@needs_int8
def test_shared_layers_stay_shared() -> None:
    table, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = table.weight
    target, drafter = nn.Module(), nn.Module()
    target.table, target.head, drafter.table = table, head, table
    tokens = torch.arange(50).view(5, 10)
    quantize([target, drafter])
    assert isinstance(target.table, Int8Embedding)
    assert drafter.table is target.table
    assert isinstance(target.head, Int8Linear | NativeInt8Linear)
    with torch.inference_mode():
        got = target.table(tokens)
    limit = table.weight.abs().amax(1)[tokens][..., None] / 254
    assert ((got - table(tokens)).abs() <= limit * 1.001).all()


GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,9}"), Grammar.json_object(), None]


def answer(engine: Engine, batch: int) -> list[Output]:
    """8 requests, ``batch`` at a time."""
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}]
    asked: list[Any] = [{"max_tokens": 24, **each} for each in sampling * 4]
    prompts = [f"prompt number {n * 37}" for n in range(8)]
    return [
        output
        for i in range(0, 8, batch)
        for output in engine.generate(
            prompts[i : i + batch], (GRAMMARS * 2)[i : i + batch], asked[i : i + batch]
        )
    ]


@pytest.mark.ci
@needs_int8
@pytest.mark.parametrize("dtype", few(("float32", "bfloat16"), "bfloat16"))
def test_speculation_changes_no_text(tiny: dict[str, Any], dtype: str) -> None:
    """Law 8, with and without recordings, alone and in a batch."""
    settings = {**tiny, "dtype": dtype, "quantization": "int8", "context_length": 256}
    with Engine(**settings, algorithm="none", overlap="none") as engine:
        every = engine.core.worker.runner.modules()
        linear = [m for m in every if isinstance(m, Int8Linear | NativeInt8Linear)]
        assert len(linear) == 4 * engine.core.worker.runner.target.config.num_layers + 1
        want = [output.token_ids for output in answer(engine, 1)]
        assert [output.token_ids for output in answer(engine, 8)] == want
    shapes: list[dict[str, Any]] = [
        {"num_steps": 3},
        {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 16},
    ]
    for shape in shapes:
        for graphs in (True, False):
            with Engine(**settings, **shape, graphs=graphs) as engine:
                modules = list(engine.core.worker.runner.modules())
                assert not any(isinstance(m, nn.Linear | PackedLinear) for m in modules)
                outputs = answer(engine, 4)
                assert [output.token_ids for output in outputs] == want
    assert any(output.stats.accepted_drafts for output in outputs)


def test_errors_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4: 'int7'"):
        EngineConfig.build(quantization="int7")
    with pytest.raises(ConfigError, match="quantization 'int8' is for the CPU alone"):
        check_quantization("int8", torch.device("cuda"))
    monkeypatch.setattr(site, "has_int8", lambda: False)
    with pytest.raises(ConfigError, match="quantization 'int8' needs a processor with AVX512-VNNI"):
        Engine(device="cpu", quantization="int8")


def test_threads_count_a_byte_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(asked: None, weights: int, ranks: int) -> int:  # noqa: ARG001
        seen.append(weights)
        return 1

    monkeypatch.setattr(site, "pick_threads", noted)
    for name in (None, "int8"):
        config = EngineConfig.build(
            device="cpu", dtype="float32", overlap="none", quantization=name
        )
        build_streams(config, lambda *_: None).close()
    assert seen[0] == 4 * seen[1]
