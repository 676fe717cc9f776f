"""What attention's kernel becomes: copies that overlap products, no spilt register, room enough."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench.kernel_work import Draw, Work, attention, latents, ragged
from overlap_spec.kernels import tuning
from overlap_spec.kernels.tuning import Config
from tests.support.kernel_ir import KIB, SHARED_BYTES, Figures, figures, noted

pytestmark = pytest.mark.ci
# All head sizes on a GPU of each size of shared memory, one where another has as much.
PLACES = [*product((32, 64, 128, 256), (80, 90, 120)), (128, 89), (128, 100)]
HALF = Draw(torch.device("cpu"), torch.bfloat16, 0)


def sliding(work: Work) -> Work:
    """The same within a window of 1024 tokens."""

    def draw() -> tuple[Any, ...]:
        return *work.draw(), 1024

    return replace(work, name=f"{work.name}/sliding", draw=draw)


def works(head_dim: int) -> dict[str, Work]:
    """A tree's 64 rows, a larger tree's 256, a prefill's, and the draft cache's."""
    tree = partial(attention, HALF, 1, tree=True, head_dim=head_dim)
    found = {
        "tree of 16": tree(16, 32768),
        "tree of 64": tree(64, 32768),
        "prefill": attention(HALF, 1, 2048, 6144, head_dim=head_dim),
        "draft": tree(8, 4096, first=1),
    }
    if head_dim == 128:
        found["sliding tree"] = sliding(tree(16, 32768))
        found["sliding prefill"] = sliding(attention(HALF, 1, 2048, 6144))
        found["ragged trees"] = ragged(HALF, (16, 3, 9), 4096, 16)
        found["chunks"] = ragged(HALF, (1536, 300, 212), 1024)
    return found


def compiled(work: Work, capability: int, folder: Path, **blocks: int) -> Figures:
    """Attention's own kernel, by the table of an architecture with ``blocks`` in place of its."""
    table = tuning.table(f"sm_{capability}")
    assert work.config is not None
    entry: Config = table[work.config] | blocks
    launches = noted(work, {**table, work.config: entry})
    (one,) = (one for one in launches if one.kernel.__name__ == "_attend")
    return figures(one, capability, folder)


def check(work: Work, capability: int, folder: Path) -> Figures:
    found = compiled(work, capability, folder)
    assert found.waits, found
    assert min(found.waits) >= 2, found
    # Of a window's distances some are kept in memory where a tile has all registers.
    assert found.stack_bytes <= (32 if "sliding" in work.name else 0), found
    assert found.programs >= 1, found
    assert found.shared_bytes <= SHARED_BYTES[capability], found
    return found


@pytest.mark.parametrize(("head_dim", "capability"), PLACES)
def test_two_copies_are_under_way_while_a_block_is_computed(
    head_dim: int, capability: int, tmp_path: Path
) -> None:
    for work in works(head_dim).values():
        check(work, capability, tmp_path)


def test_a_pipeline_of_two_stages_is_told_from_one_of_three(tmp_path: Path) -> None:
    found = compiled(works(128)["tree of 16"], 90, tmp_path, num_stages=2)
    assert min(found.waits) < 2, found


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_the_default_table_fits_99_kib(head_dim: int, tmp_path: Path) -> None:
    """At each head size, in the type that takes most; whatever the GPU."""
    for name in ("tree of 16", "prefill") if head_dim in (128, 256) else ("prefill",):
        found = compiled(works(head_dim)[name], 120, tmp_path)
        assert found.shared_bytes <= 99 * KIB, (name, found)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_latents_fit_where_keys_do(capability: int, tmp_path: Path) -> None:
    """DeepSeek-V3's, of one token, of a tree, and of a chunk."""
    one, tree = latents(HALF, 1, 1, 4096), latents(HALF, 1, 16, 32768, tree=True)
    for work in (one, tree, latents(HALF, 1, 2048, 6144)):
        check(work, capability, tmp_path)


def shares(work: Work, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> int:
    module = "overlap_spec.kernels.triton.attention.multiprocessors"
    monkeypatch.setattr(module, lambda _: multiprocessors)
    return int(noted(work, tuning.table("sm_90"))[-1].constants.get("SPLITS", 1))


SHARES = [
    (64, 32768, 8, 8),
    (64, 32768, 4, 16),
    (32, 32768, 4, 32),
    (16, 32768, 8, 32),
    (64, 1024, 8, 4),
]


@pytest.mark.parametrize(("queries", "prefix", "heads", "expected"), SHARES)
def test_shares_fill_the_device_whatever_the_tree(
    queries: int, prefix: int, heads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 132 multiprocessors, where tiles of 128 rows do not."""
    monkeypatch.setattr("bench.kernel_work.KV_HEADS", heads)
    monkeypatch.setattr("bench.kernel_work.HEADS", 4 * heads)
    work = attention(HALF, 1, queries, prefix, tree=True)
    assert shares(work, 132, monkeypatch) == expected
