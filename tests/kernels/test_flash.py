"""Attention by FlashAttention-3, of which a stand-in in torch does what its documentation says."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from overlap_spec.errors import ConfigError
from overlap_spec.kernels import dispatch
from overlap_spec.kernels.triton import flash
from overlap_spec.kernels.triton.launch import recorded
from tests.support.kernel_cases import run_flash
from tests.support.kernel_ir import compile_for

FAULTY = [
    ("tree_attention", "logarithms in base 2"),
    ("draft_attention", "draft caches are taken"),
    ("tree_attention", "windows of trees are taken"),
    ("ragged_attention", "sinks of chunks are taken"),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "examples", "kinds"),
    [
        ("tree_attention", 9, ["trees"]),
        ("causal_attention", 12, ["chunks"]),
        ("ragged_attention", 24, ["trees", "chunks"]),
        ("prefill_attention", 5, ["chunks"]),
        ("draft_attention", 9, []),
    ],
)
def test_prefixes_and_chunks_are_joined_with_trees(
    name: str, examples: int, kinds: list[str], interpreter: ProcessPoolExecutor
) -> None:
    """Attention's cases, canaries included, with all that FlashAttention-3 takes given to it."""
    calls = interpreter.submit(run_flash, name, examples).result()
    assert [kind for kind, count in sorted(calls.items(), reverse=True) if count] == kinds


@pytest.mark.ci
@pytest.mark.parametrize(("name", "fault"), FAULTY, ids=[fault for _, fault in FAULTY])
def test_what_is_joined_wrongly_is_seen(
    name: str, fault: str, interpreter: ProcessPoolExecutor
) -> None:
    with pytest.raises(AssertionError):
        interpreter.submit(run_flash, name, 15, fault).result()


@pytest.mark.ci
@pytest.mark.parametrize("capability", [80, 90])
def test_what_joins_compiles_for_gpus_that_flash_attention_knows(capability: int) -> None:
    half, single = torch.bfloat16, torch.float32
    mean, log_sum = torch.empty(12, 2, 128, dtype=single), torch.empty(12, 2, dtype=single)
    prefix = torch.empty(3, 4, 128, dtype=half), torch.empty(1, 4, 3, dtype=single)
    with recorded() as launches:
        flash.join(mean, log_sum, prefix, torch.empty(3, 512, dtype=half))
    (one,) = launches
    assert one.grid == (12,)
    assert compile_for(one, capability).asm["cubin"]


def test_it_is_off_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs FlashAttention-3"), dispatch.use("flash"):
        pass
    assert not dispatch.wants_flash()
