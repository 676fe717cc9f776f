"""A checkpoint padded to the cost of a larger model, with the function of the small one.

``python -m bench.padded --like 0.75b OUT`` writes ``OUT/target`` and ``OUT/eagle3``; a benchmark
that is told ``--model 0.75b`` does so by itself. Why text and acceptance stay the same (d, n, eps:
the source's hidden size, head size, eps; D: ours):

*Width.* What writes into the residual stream has zero rows for the D - d new channels, so these
stay 0, and zero columns for new heads and inner channels, whose own weights are random. RMSNorm's
mean of squares shrinks by d / D exactly: norm weights are multiplied by sqrt(d / D), and
``rms_norm_eps`` by d / D. Query and key norms share that eps but not the mean; a factor
sqrt(d / D) on their projections makes up for it.

*Depth.* New layers follow the source's and add 0. Feature layers keep their numbers, which are
written out where the source relies on the published rule.

*Heads.* A new key-value head holds an old one with as many of its query heads as fit; where they
do not all fit, a copy of it holds the rest. head_dim grows by whole multiples r: theta^(-2i / n)
is theta^(-2ri / (rn)), so channel ri turns as channel i did (a rope rule that breaks this is
refused); sqrt(r) on the queries undoes the new 1 / sqrt(head_dim).

*Vocabulary.* One new channel is c = 2^-40 in every embedding. Nothing writes or reads it but the
final norm, which makes it c * weight / rho = 1 / rho, rho = sqrt(mean + eps). Real rows of lm_head
hold 0 there and do not see it; new rows hold -L, so their logits are row . h - L / rho. Let R bound
\\|row . h\\| and rho_max bound rho, both by norms of weights alone (:func:`bounds`): with
L >= 4 rho_max (1e4 + 2 R) every new logit is 1e4 below every real one, whatever the input, and its
probability underflows to exactly 0 up to temperature 90. To a sum of squares c adds at most
1e-15 of its eps term for any d and eps in use. Float16 cannot hold c.

What is left is the rounding of sums in another order. A tensor whose factor is no power of two
stays float32, as bfloat16 would round it: exact where the engine computes in float32, as on the
CPU. With D = d * 4^k and r = 4^k there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.padding.sizes import PRESET_DTYPE, PRESETS, Sizes, check_rope, grow, like
from bench.padding.tensors import Padder, Part, Source, draft_parts, target_parts
from bench.padding.tokenizer import pad_tokenizer
from overlap_spec.config import EMBEDDED
from overlap_spec.errors import CheckpointError, ConfigError, OverlapSpecError
from overlap_spec.models.config import ModelConfig, read_config, read_json
from overlap_spec.models.eagle3 import feature_layers, read_eagle3_config

SHARD_BYTES = 2 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_parts(parts: Sequence[Part], folder: Path, step: Callable[[int], None]) -> None:
    """Write safetensors shards of at most 2 GiB (or one tensor), one tensor in memory at a time.

    Args:
        step: Called with the bytes of each tensor that was written.
    """
    shards: list[list[Part]] = [[]]
    for part in parts:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + part.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(part)
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for part in sorted(shard, key=lambda p: -p.dtype.itemsize):
            span = [start, start := start + part.bytes]
            header[part.name] = {
                "dtype": kinds[part.dtype], "shape": part.shape, "data_offsets": span
            }  # fmt: skip
            where[part.name] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in sorted(shard, key=lambda p: -p.dtype.itemsize):
                tensor = part.make()
                assert tensor.shape == part.shape, part.name
                assert tensor.dtype == part.dtype, part.name
                tensor.flatten().view(torch.uint8).numpy().tofile(file)
                step(part.bytes)
    if len(shards) > 1:
        total = sum(part.bytes for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def config_fields(old: ModelConfig, new: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What a padded ``config.json`` says otherwise than its source."""
    return {
        "vocab_size": new.vocab_size,
        "hidden_size": new.hidden_size,
        "intermediate_size": new.intermediate_size,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / new.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written: its tensors and its config."""

    folder: Path
    parts: list[Part]
    config: dict[str, Any]


def target_job(source: Path, sizes: Sizes, dtype: str | None, seed: int, out: Path) -> Job:
    """The padded target; ``dtype`` None keeps the source's."""
    tensors, old = Source(source), read_config(source)
    new = grow(old, sizes)
    kind = DTYPES[dtype] if dtype else tensors.get("model.embed_tokens.weight").dtype
    padder = Padder(tensors, old, new, kind, seed)
    hf = read_json(source / "config.json")
    hf.pop("dtype", None)
    if hf.get("layer_types"):
        hf["layer_types"] += ["full_attention"] * (new.num_layers - old.num_layers)
    config = hf | config_fields(old, new, kind)
    return Job(out, target_parts(padder), config)


def draft_job(
    draft: Path, source: Path, sizes: Sizes, dtype: str | None, seed: int, out: Path
) -> Job:
    """The padded draft head of ``source``; it grows with the target where its sizes are its."""
    tensors, config, target = Source(draft), read_eagle3_config(draft), read_config(source)
    old, grown = config.layer, grow(target, sizes)
    if old.vocab_size != target.vocab_size or config.target_hidden_size != target.hidden_size:
        raise CheckpointError(f"{draft} is no draft head of {source}: other vocabulary or width")
    wide = old.hidden_size == target.hidden_size
    heads = ("num_heads", "num_kv_heads", "head_dim")
    same = wide and all(getattr(old, name) == getattr(target, name) for name in heads)
    new = replace(
        old,
        vocab_size=grown.vocab_size,
        hidden_size=grown.hidden_size if wide else old.hidden_size,
        intermediate_size=max(grown.intermediate_size, old.intermediate_size)
        if grown.intermediate_size > target.intermediate_size
        else old.intermediate_size,
        **({name: getattr(grown, name) for name in heads} if same else {}),
    )
    check_rope(old, new)
    kind = DTYPES[dtype] if dtype else tensors.get("fc.weight").dtype
    padder = Padder(tensors, old, new, kind, seed + 1)
    hf = read_json(draft / "config.json")
    hf.pop("dtype", None)
    fields = config_fields(old, new, kind) | {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": grown.hidden_size,
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in feature_layers(config, target)],
    }
    hidden = (target.hidden_size, grown.hidden_size)
    return Job(out, draft_parts(padder, config.draft_vocab_size, hidden), hf | fields)


def pad(
    source: Path,
    draft: Path | None,
    out: Path,
    sizes: Sizes,
    dtype: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write ``out/target`` and, where there is a ``draft``, ``out/eagle3``.

    Args:
        source, draft: Folders of a target and its EAGLE-3 head.
        sizes: What to grow.
        dtype: ``bfloat16`` or ``float32``; None keeps the source's.
        seed: Of random weights and token texts; the same seed writes the same bytes.
        console: Where progress is shown; standard error if None.

    Returns:
        Figures: parameters and bytes of each checkpoint, seconds.

    Raises:
        ConfigError: sizes that cannot be, or a folder in ``out`` that holds a checkpoint.
        CheckpointError: a source that cannot be padded exactly.
    """
    began = time.perf_counter()
    jobs = [target_job(source, sizes, dtype, seed, out / "target")]
    if draft is not None:
        jobs.append(draft_job(draft, source, sizes, dtype, seed, out / "eagle3"))
    for job in jobs:
        if (job.folder / "config.json").exists():
            raise ConfigError(f"{job.folder} holds a checkpoint already: choose another folder")
        job.folder.mkdir(parents=True, exist_ok=True)
    old, new = read_config(source).vocab_size, jobs[0].config["vocab_size"]
    pad_tokenizer(source, jobs[0].folder, old, new, seed)
    figures: dict[str, Any] = {}
    with Progress(console=console or Console(stderr=True)) as progress:
        for job in jobs:
            size = sum(part.bytes for part in job.parts)
            task = progress.add_task(job.folder.name, total=size)
            write_parts(job.parts, job.folder, lambda n, t=task: progress.advance(t, n))  # type: ignore[misc]
            # Last, so that a folder which was not finished is no checkpoint.
            (job.folder / "config.json").write_text(json.dumps(job.config, indent=2) + "\n")
            count = sum(math.prod(part.shape) for part in job.parts)
            figures[job.folder.name] = {"parameters": count, "bytes": size}
    return figures | {"seconds": round(time.perf_counter() - began, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line of figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.padded")
    parser.add_argument("out", type=Path, help="folder for target/ and eagle3/")
    parser.add_argument("--like", choices=sorted(PRESETS), help="sizes of a known model")
    for name in asdict(Sizes()):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--source", type=Path, help="target to pad; the embedded one if absent")
    parser.add_argument("--draft-source", type=Path, help="its EAGLE-3 head, if any")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="the known model's, or the source's, if absent"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    source = options.source or EMBEDDED / "target"
    draft = options.draft_source or (EMBEDDED / "eagle3" if options.source is None else None)
    try:
        sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
        if options.like:
            sizes = like(options.like, read_config(source), sizes)
        dtype = options.dtype or (PRESET_DTYPE if options.like else None)
        figures = pad(source, draft, options.out, sizes, dtype, options.seed)
    except OverlapSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
