"""Draft head of tensor parallelism: whole on every rank, or split over them.

``python -m bench.cluster_draft [--quick] [--ranks T] [--rows N] [--json PATH] [--seed S]`` times
what the two ways differ in, in T processes with one thread each: the passes of one EAGLE-3 draft
step (layer and vocabulary's head, random weights) over N rows, and, where it is split, its two sums
and the gathering of its logits, over the engine's own group of ranks (gloo). Attention over the
cache is left out: it is the same work a head. The two ways take turns; a step counts as what the
slowest rank takes, as all wait for it.

Fields of the last line, beside those of every record (``bench.common``): ``ranks``, ``rows_a_step``
and ``heads``, each with ``hidden``, ``vocabulary``, ``dtype``, ``head_mib``, ``whole_ms`` and
``split_ms`` (medians) and ``ratio`` (split over whole: the median of neighbours).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import Run, flags, median, rounded
from overlap_spec.models.config import ModelConfig, llama_family
from overlap_spec.models.decoder import Heads
from overlap_spec.models.eagle3 import Eagle3Config, Eagle3Head
from overlap_spec.models.parallel import join_head
from overlap_spec.models.shard import WHOLE, Shard
from overlap_spec.parallel.group import Group, told
from overlap_spec.parallel.launch import Launch, launch, meeting
from overlap_spec.parallel.processes import exit_with_parent

# Hidden size, heads, channels of the feed-forward, draft vocabulary, type: about the embedded head,
# one twice as wide, one for a target of 0.75B parameters, and one for a target of 8B.
SIZES = (
    (256, 4, 768, 2048, torch.float32),
    (512, 8, 2048, 8192, torch.float32),
    (1024, 16, 4864, 32_000, torch.bfloat16),
    (4096, 32, 14_336, 32_000, torch.bfloat16),
)
WARM_STEPS = 3


def layer_of(hidden: int, heads: int, channels: int, vocabulary: int) -> ModelConfig:
    """The shape of a head's layer, with a key's head for four of queries."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": channels,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }
    return llama_family(shape, tie_embeddings=False, sliding_windows=(None,))


def head_of(layer: ModelConfig, dtype: torch.dtype, group: Group | None) -> Eagle3Head:
    """A head of random weights, whole or this rank's part."""
    config = Eagle3Config(
        layer=replace(layer, shard=WHOLE if group is None else group.shard),
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        feature_layers=None,
    )
    head = Eagle3Head(config).to(dtype).eval().requires_grad_(False)
    if group is not None:
        join_head(head, group)
    return head


def nothing_cached(_: int, heads: Heads) -> Tensor:
    """Attention over no cache: each row's own query."""
    return heads.rotated()[0].flatten(1)


def step_of(head: Eagle3Head, rows: int, like: nn.Linear) -> Callable[[], Tensor]:
    """A draft step: one pass of the head, and its logits."""
    hidden = head.config.target_hidden_size
    embeds, feature = torch.randn(2, rows, hidden).to(like.weight.dtype)
    positions = torch.arange(rows)

    def step() -> Tensor:
        return head.logits(head(embeds, feature, positions, nothing_cached))

    return step


@torch.inference_mode()
def measure(group: Group, rows: int, turns: int) -> list[dict[str, Any]]:
    """Milliseconds of each turn of each size, of this rank."""
    found = []
    for hidden, heads, channels, vocabulary, dtype in SIZES:
        layer = layer_of(hidden, heads, channels, vocabulary)
        ways = {}
        for way, ranks in (("whole", None), ("split", group)):
            head = head_of(layer, dtype, ranks)
            ways[way] = step_of(head, rows, head.fc)
            if ranks is None:
                size = dtype.itemsize * sum(w.numel() for w in head.parameters())
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(turns + WARM_STEPS):
            for way, step in ways.items():
                # All begin at once.
                group.sum(torch.zeros(1))
                start = time.perf_counter()
                logits = step()
                taken = 1e3 * (time.perf_counter() - start)
                assert logits.shape == (rows, vocabulary)
                # Of the slowest rank: all of them would wait for it.
                slowest = group.gather(torch.tensor([[taken]])).max()
                if turn >= WARM_STEPS:
                    times[way].append(float(slowest))
        name = str(dtype).removeprefix("torch.")
        found.append(
            {
                "hidden": hidden,
                "vocabulary": vocabulary,
                "dtype": name,
                "head_mib": size / 2**20,
                **times,
            }
        )
    return found


def follow(parent: str, folder: str, size: str, rank: str) -> None:
    """The whole work of a rank other than 0."""
    exit_with_parent(int(parent))
    torch.set_num_threads(1)
    shard = Shard(int(rank), int(size))
    store = meeting(Path(folder), shard.size)
    rows, turns = told(store)
    measure(Group(Launch(shard, store, True), torch.device("cpu")), rows, turns)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("cluster_draft", "A draft head whole on every rank, or split.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="of a draft step")
    options = parser.parse_args(arguments)
    run = Run("cluster_draft", options, arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    turns = 20 if options.quick else 100
    launched = launch(options.ranks, "bench.cluster_draft")
    group = Group(launched, torch.device("cpu"), (options.rows, turns))
    heads = []
    for times in measure(group, options.rows, turns):
        whole, split = times.pop("whole"), times.pop("split")
        for pair in zip(whole, split, strict=True):
            run.sample(**times, whole_ms=pair[0], split_ms=pair[1])
        ratio = median(b / a for a, b in zip(whole, split, strict=True))
        heads.append(
            {**times, "whole_ms": median(whole), "split_ms": median(split), "ratio": ratio}
        )
    assert launched.processes is not None
    launched.processes.close(lambda: None)
    group.close()
    run.finish(turns, ranks=options.ranks, rows_a_step=options.rows, heads=rounded(heads))


if __name__ == "__main__":
    # A rank gets what `launch` gives it: a process id, a folder, the number of ranks, its own.
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        follow(*sys.argv[1:])
    else:
        main()
