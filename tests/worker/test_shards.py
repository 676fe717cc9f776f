"""A model in parts: what each rank reads of a checkpoint, and that together they are the whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models import weights
from overlap_spec.models.config import read_config
from overlap_spec.models.decoder import Decoder, Heads
from overlap_spec.models.dflash import load_dflash
from overlap_spec.models.quantization import has_int8, quantize
from overlap_spec.models.shard import Shard
from overlap_spec.models.weights import load_decoder, load_eagle3
from tests.support import checkpoints, dflash
from tests.support.models import Cache, reference
from tests.support.tiers import few

CPU = torch.device("cpu")
# Sizes that 2 and 3 ranks divide; 3 of them share 6 heads of queries, and 3 or 6 of keys.
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 72}
# As Falcon calls them.
OWN_SIZES = {"num_kv_heads": 6}
SHARDED = [
    "llama", "llama-tied-biased", "qwen2", "qwen3", "gemma2-caps", "phi3", "qwen3-moe", "gpt-oss",
    "mixtral", "qwen2-moe", "granite", "smollm3", "glm", "glm4", "stablelm", "cohere-plus",
    "starcoder2", "falcon-7b", "falcon-40b", "falcon-all-heads", "gpt2",
]  # fmt: skip


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def rank(self, rank: int) -> Rank:
        return Rank(self, rank)


class Rank:
    """One of them; see `Collectives`."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.shard = threads, Shard(rank, threads.size)
        self.sums = 0

    def _all(self, x: Tensor) -> list[Tensor]:
        threads = self.threads
        threads.given[self.shard.rank] = x
        threads.barrier.wait()
        found = list(threads.given)
        threads.barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        self.sums += 1
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), 1)


def together(folder: Path, size: int, tokens: Tensor, int8: bool = False) -> list[Tensor]:
    """The logits that each rank has."""
    threads = Threads(size)

    def one(rank: int) -> Tensor:
        with torch.inference_mode():
            own = threads.rank(rank)
            decoder = load_decoder(folder, torch.float32, CPU, 64, own)
            if int8:
                quantize([decoder])
            logits = Cache(decoder, 64).run(tokens, 0)
            layers = decoder.config.num_layers
            assert own.sums == 1 + 2 * layers
            return logits

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def write(case: str, path: Path, **sizes: Any) -> None:
    reference(case, path, **{**SIZES, **OWN_SIZES, **sizes})


@pytest.mark.parametrize("size", few((2, 3), 3))
@pytest.mark.parametrize("case", SHARDED)
def test_parts_compute_what_the_whole_does(case: str, size: int, tmp_path: Path) -> None:
    """Of every layout of a file; 131 tokens: the vocabulary's last part is filled up."""
    write(case, tmp_path)
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = Cache(load_decoder(tmp_path, torch.float32, CPU, 64), 64).run(tokens, 0)
    found = together(tmp_path, size, tokens)
    torch.testing.assert_close(found[0], want, atol=2e-4, rtol=1e-4)
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_draft_head_compute_what_the_whole_does(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large head's; its 77 rows of a vocabulary of its own are cut unevenly."""
    write("llama", tmp_path / "target")
    hidden = read_config(tmp_path / "target").hidden_size
    checkpoints.write_head(
        tmp_path / "head", vocab_size=131, hidden_size=hidden, draft_vocab_size=77, **SIZES
    )
    generator = torch.Generator().manual_seed(6)
    embeds, feature = torch.randn(2, 9, hidden, generator=generator)

    def logits(own: Rank | None) -> Tensor:
        with torch.inference_mode():
            target = load_decoder(tmp_path / "target", torch.float32, CPU, 64, own)
            head = load_eagle3(tmp_path / "head", target, torch.float32)
            is_split = own is not None and weights.SPLIT_HEAD_BYTES == 0
            assert head.config.layer.own_heads == (6 // size if is_split else 6)
            before = 0 if own is None else own.sums
            found = head.logits(head(embeds, feature, torch.arange(9), own_queries))
            assert own is None or own.sums - before == (2 if is_split else 0)
            return found

    want = logits(None)
    # Too small to be worth its sums.
    assert torch.equal(logits(Threads(size).rank(1)), want)
    monkeypatch.setattr(weights, "SPLIT_HEAD_BYTES", 0)
    threads = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: logits(threads.rank(rank)), range(size)))
    torch.testing.assert_close(found[0], want, atol=2e-4, rtol=1e-4)
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_parts_of_a_block_drafter_compute_what_the_whole_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states, and the keys and values that it makes of the target's features."""
    checkpoints.write_target(tmp_path / "target")
    dflash.write(tmp_path / "head", dflash.LAYOUTS["speculators"])
    generator = torch.Generator().manual_seed(6)
    embeds, features = torch.randn(9, 32, generator=generator), torch.randn(9, 96)

    def run(own: Rank | None) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            target = load_decoder(tmp_path / "target", torch.float32, CPU, 64, own)
            head, kept = load_dflash(tmp_path / "head", target, torch.float32), []
            head.context(
                features, torch.arange(9), lambda _, heads: kept.append(heads.rotated()[1:])
            )
            logits = head.logits(head(embeds, torch.arange(9), own_queries))
            return logits, torch.stack([torch.stack(both) for both in kept])

    logits, kept = run(None)
    monkeypatch.setattr(weights, "SPLIT_HEAD_BYTES", 0)
    threads = Threads(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: run(threads.rank(rank)), range(2)))
    for each, _ in found:
        torch.testing.assert_close(each, logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([own for _, own in found], 3), kept)


def own_queries(_: int, heads: Heads) -> Tensor:
    """Attention over nothing but each row itself."""
    return heads.rotated()[0].flatten(1)


@pytest.mark.parametrize("case", ["qwen3", "falcon-40b"])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (6, 2), (6, 3), (3, 3)])
def test_heads_of_keys_are_shared_by_more_ranks(
    case: str, size: int, kv_heads: int, tmp_path: Path
) -> None:
    counts = {"num_key_value_heads": kv_heads, "num_kv_heads": kv_heads}
    write(case, tmp_path, **counts)
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = Cache(load_decoder(tmp_path, torch.float32, CPU, 64), 64).run(tokens, 0)
    torch.testing.assert_close(together(tmp_path, size, tokens)[0], want, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(not has_int8(), reason="no AVX512-VNNI")
def test_parts_in_int8_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    write("llama", tmp_path)
    first, second = together(tmp_path, 2, torch.arange(20), int8=True)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_each_rank_holds_its_part_alone(tmp_path: Path) -> None:
    write("llama", tmp_path)

    def numbers(decoder: Decoder) -> int:
        return sum(p.numel() for p in decoder.parameters() if p.dim() > 1)

    whole = numbers(load_decoder(tmp_path, torch.float32, CPU))
    parts = [
        numbers(load_decoder(tmp_path, torch.float32, CPU, None, Threads(2).rank(rank)))
        for rank in range(2)
    ]
    # One row of the embedding and of the head fills up 131.
    assert parts == [(whole + 2 * 48) // 2] * 2


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (5, "tensor_parallel_size 5 does not divide the model's num_attention_heads, 6"),
        (4, "num_attention_heads, 6"),
        (3, "neither divides the model's num_key_value_heads, 2, nor is a multiple"),
    ],
)
def test_a_shape_that_cannot_be_cut_is_told(size: int, told: str, tmp_path: Path) -> None:
    write("qwen3", tmp_path, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=told):
        load_decoder(tmp_path, torch.float32, CPU, None, Threads(size).rank(0))


@pytest.mark.parametrize("case", ["olmo2", "stablelm-12b"])
def test_norms_that_cannot_be_cut_are_told(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    with pytest.raises(ConfigError, match="norms of queries and keys cannot be cut"):
        load_decoder(tmp_path, torch.float32, CPU, None, Threads(2).rank(0))


def test_a_feed_forward_that_cannot_be_cut_is_told(tmp_path: Path) -> None:
    write("llama", tmp_path, intermediate_size=75)
    with pytest.raises(ConfigError, match="intermediate_size, 75"):
        load_decoder(tmp_path, torch.float32, CPU, None, Threads(2).rank(0))


def test_a_part_is_as_strict_as_the_whole(tmp_path: Path) -> None:
    write("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    state[name] = state[name][:, :-8].contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj.weight has shape \[48, 40\], expected"):
        load_decoder(tmp_path, torch.float32, CPU, None, Threads(2).rank(1))
