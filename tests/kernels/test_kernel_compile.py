"""Every kernel compiles as serving launches it, on a machine with no GPU; attention for more GPUs
in ``tests/proofs/test_attention_ir.py``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed")

from bench.kernel_work import Draw, Work, attention, latents, works
from overlap_spec import kernels
from overlap_spec.kernels import tuning
from overlap_spec.kernels.dispatch import use
from overlap_spec.kernels.triton.launch import Launch
from tests.support.kernel_ir import SHARED_BYTES, compile_for, figures, noted

CPU = torch.device("cpu")


def bent(work: Work) -> Work:
    """Attention with a window, a soft cap and sinks."""

    def draw() -> tuple[Any, ...]:
        q, *rest = work.draw()
        return q, *rest, 100, kernels.Scoring(0.1, 50.0, q[0, :, 0])

    return replace(work, draw=draw)


def all_works() -> list[Work]:
    """Serving's works in bfloat16, and attention in the other types, head sizes and scorings."""
    half, single = Draw(CPU, torch.bfloat16, 0), Draw(CPU, torch.float32, 0)
    serving = list(works(half, (1,)))
    more = [
        attention(half, 1, 16, 512, tree=True, head_dim=64),
        attention(half, 1, 16, 512, tree=True, head_dim=256),
        attention(half, 1, 256, 512, head_dim=256),
        attention(single, 1, 16, 512, tree=True, head_dim=128),
        attention(single, 1, 256, 512, head_dim=64),
        latents(half, 1, 1, 512),
        latents(half, 1, 16, 512, tree=True),
        latents(half, 1, 256, 512),
        latents(single, 1, 16, 512, tree=True),
        bent(attention(half, 1, 16, 512, tree=True, head_dim=256)),
        bent(attention(half, 1, 256, 512, head_dim=256)),
        bent(attention(half, 1, 256, 512, head_dim=64)),
        bent(attention(single, 1, 16, 512, head_dim=64)),
    ]
    assert len({work.name for work in serving}) == len(serving)
    return serving + more


def differing(launches: list[Launch]) -> list[Launch]:
    """One launch of each kernel, type and set of constants."""
    found = {}
    for one in launches:
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in one.args)
        found[one.kernel.__name__, types, tuple(one.constants.items())] = one
    return list(found.values())


@pytest.mark.ci
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path: Path) -> None:
    launches = [n for w in all_works() for n in noted(w, tuning.table(f"sm_{capability}"))]
    names = {one.kernel.__name__ for one in launches}
    assert len(names) >= 20, sorted(names)
    for one in differing(launches):
        found = figures(one, capability, tmp_path)
        where = one.kernel.__name__, one.constants, found
        assert found.shared_bytes <= SHARED_BYTES[capability], where
        types = {a.dtype for a in one.args if isinstance(a, torch.Tensor)}
        if one.kernel.__name__ != "_attend" or torch.bfloat16 in types:
            # Spilt registers cost more than any choice of blocks gains; float32 attention,
            # which has no tensor cores, is there to be exact.
            plain = one.kernel.__name__ == "_attend" and not (
                one.constants["WINDOW"] or one.constants["CAP"]
            )
            assert found.stack_bytes <= (0 if plain else 128), where


@pytest.mark.ci
def test_kernels_use_hoppers_matrix_instructions_where_rows_suffice() -> None:
    prefill = attention(Draw(CPU, torch.bfloat16, 0), 1, 256, 512)
    (launch,) = noted(prefill, tuning.table("sm_90"))
    assert "wgmma.mma_async" in compile_for(launch, 90).asm["ptx"]
    exact = attention(Draw(CPU, torch.float32, 0), 1, 256, 512)
    (launch,) = noted(exact, tuning.table("sm_90"))
    assert "tf32" not in compile_for(launch, 90).asm["ptx"]


def test_kernels_never_ask_for_the_devices_data() -> None:
    """On tensors of shapes alone a wait for a value raises, as does a grid made of one."""
    for dtype in (torch.bfloat16, torch.float32):
        for work in works(Draw(CPU, dtype, 0), (3,)):
            launches = noted(work, {})
            assert launches, work.name
            assert all(size > 0 for one in launches for size in one.grid), work.name
    with FakeTensorMode(), use("reference"):
        rows, places = torch.ones(2, 1, dtype=torch.int32), torch.arange(2)
        logits = torch.zeros(2, 9)
        with pytest.raises(RuntimeError, match="nonzero"):
            kernels.masked_choose(logits, rows, places)


def test_kernel_tables_name_what_serving_asks_for() -> None:
    asked = {work.config for work in all_works()} - {None}
    default = tuning.table("default")
    for name in ("sm_80", "sm_90", "sm_100"):
        own = tuning.own_table(name)
        assert own
        assert set(own) <= set(default)
        assert asked <= set(tuning.table(name))
        for entry, config in own.items():
            assert set(config) == set(default[entry]), entry
    assert tuning.table("sm_75") == default
