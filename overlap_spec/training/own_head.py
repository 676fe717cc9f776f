"""A draft head for a user's own target: `overlap-spec train` from the data file to the folder.

The folder gets the head (``config.json``, ``model.safetensors``), ``training.json`` with what the
training was asked for, ``report.json`` with its figures, and ``work``, which holds what makes an
interrupted training go on and may be deleted after it.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import file_digest, sha256
from pathlib import Path
from random import Random
from typing import Any

import torch

from overlap_spec.errors import ConfigError
from overlap_spec.models.config import read_config
from overlap_spec.models.decoder import NORMED_OUTPUT, Decoder
from overlap_spec.models.parallel_eagle import load_parallel
from overlap_spec.models.weights import load_decoder, load_eagle, load_eagle3
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.training.acceptance import Acceptance, Run, acceptance, head_guesses
from overlap_spec.training.batches import WIDTHS, Row, RowStream, answer_row
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import export_head
from overlap_spec.training.features import FeatureCache, fill_cache
from overlap_spec.training.generate import answers
from overlap_spec.training.head import (
    Head,
    HeadRecipe,
    HeadTrainer,
    new_eagle,
    new_head,
    spread_layers,
)
from overlap_spec.training.optim import product_type
from overlap_spec.training.parallel import DEPTHS, ParallelTrainer, new_parallel
from overlap_spec.training.progress import Bars
from overlap_spec.training.samples import Sample, read_samples
from overlap_spec.training.settings import HeadSettings
from overlap_spec.training.trainer import Report, save_atomically

CHECKED_PROMPTS = 32
CHECKED_TOKENS = 128
# Shares of ``minutes``: the target's own answers take no more than the first, the check at the end
# no more than the second, and steps no less than it.
ANSWERS_SHARE, CHECK_SHARE = 0.5, 0.1
# The embedded head's rate of AdamW and the width it was found at; wider heads take smaller steps.
ADAM_LR, ADAM_WIDTH = 0.002, 256
LOADERS: dict[str, Callable[[Path, Decoder, torch.dtype], Head]] = {
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "parallel": load_parallel,
}
# Settings that a training cannot change on its way.
FIXED = ("algorithm", "own_answers", "max_length", "batch_tokens", "draft_vocab_size", "seed")


def train_head(settings: HeadSettings, device: torch.device, bars: Bars) -> Acceptance:
    """Train a head, or go on with it, write it, and check it on prompts that were kept apart.

    Where ``bars`` are told to stop, KeyboardInterrupt leaves a checkpoint of that very step.

    Raises:
        ConfigError: settings or data are at fault, or the folder holds another training.
        CheckpointError: the target cannot be loaded.
    """
    begun = time.monotonic()
    check_settings(settings)
    tokenizer = Tokenizer(settings.target, read_config(settings.target).vocab_size)
    samples, left_out = read_samples(
        settings.data, tokenizer, settings.max_length, answered=not settings.own_answers
    )
    if left_out:
        bars.note(f"{left_out} lines left out: no answer within {settings.max_length} tokens")
    dtype = product_type(device)
    target = load_decoder(settings.target, dtype, device)
    layers = feature_layers(settings, target)
    claim_folder(settings, target)
    work = settings.out / "work"
    checked, learnt = split(samples, settings.seed)
    rows = [sample.row for sample in learnt]
    if settings.own_answers:
        until = begun + ANSWERS_SHARE * seconds_of(settings)
        rows = own_rows(work, learnt, target, tokenizer, settings, bars, until)
    cache = None
    if settings.cache_features:
        ids = [row[0] for row in rows]
        cache = fill_cache(work / "features.bin", ids, target, layers, bars.share("features"))
    minutes = step_minutes(settings, time.monotonic() - begun)
    trainer = make_trainer(settings, target, rows, tokenizer, cache, minutes)
    run(trainer, work / "checkpoint.pt", bars.steps("head"))
    seconds = trainer.budget.seconds()
    export_head(trainer.averaged(), settings.out)
    load = LOADERS[settings.algorithm]
    head = load(settings.out, target, dtype)
    until = time.monotonic() + CHECK_SHARE * seconds_of(settings)
    runs = target_runs(target, checked, tokenizer, bars.share("check"), until)
    found = acceptance(runs, head_guesses(target, head, trainer.recipe.steps), device)
    write_report(settings, trainer, seconds, found, len(runs))
    return found


def check_settings(settings: HeadSettings) -> None:
    """ConfigError for what cannot be done."""
    if settings.algorithm not in LOADERS:
        raise ConfigError(f"algorithm must be {', '.join(LOADERS)}: {settings.algorithm!r}")
    if settings.epochs is not None and settings.minutes is not None:
        raise ConfigError("give epochs or minutes, one of them")
    for name in ("epochs", "minutes", "batch_tokens", "draft_vocab_size"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be more than 0: {value}")
    config = read_config(settings.target)
    windows = [window for window in config.sliding_windows if window is not None]
    limit = min([config.max_position, *windows])
    if not 16 <= settings.max_length <= limit:
        raise ConfigError(
            f"max_length must be from 16 to {limit}, the target's context or sliding window: "
            f"{settings.max_length}"
        )


def seconds_of(settings: HeadSettings) -> float:
    """Seconds from the start of a training to its end."""
    return math.inf if settings.minutes is None else 60 * settings.minutes


def step_minutes(settings: HeadSettings, before: float) -> float | None:
    """Minutes that the steps have, ``before`` seconds after the start; of a training that goes on,
    those that it had at first, on which its rates depend."""
    if settings.minutes is None:
        return None
    file, asked = settings.out / "work" / "minutes.json", str(settings.minutes)
    kept: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    if asked not in kept:
        least = CHECK_SHARE * settings.minutes
        kept[asked] = max(least, settings.minutes - least - before / 60)
        file.write_text(json.dumps(kept) + "\n")
    return kept[asked]


def feature_layers(settings: HeadSettings, target: Decoder) -> tuple[int, ...]:
    """The target's layers whose inputs a head reads; ConfigError where it has too few."""
    if settings.algorithm == "eagle":
        return (NORMED_OUTPUT,)
    try:
        return spread_layers(target.config.num_layers)
    except ValueError as error:
        raise ConfigError(f"{settings.target}: {error}") from None


def claim_folder(settings: HeadSettings, target: Decoder) -> None:
    """Make the folder this training's, or see that it is.

    Raises:
        ConfigError: it holds something else, or a training that was asked for otherwise.
    """
    weights = target.norm.weight, target.lm_head.weight[:256]
    marks = b"".join(w.detach().float().cpu().numpy().tobytes() for w in weights)
    asked: dict[str, Any] = {
        "target": sha256(marks).hexdigest(),
        "data": file_hash(settings.data),
        **{name: getattr(settings, name) for name in FIXED},
    }
    file = settings.out / "training.json"
    if file.exists():
        before = json.loads(file.read_text())
        changed = [name for name in asked if before.get(name) != asked[name]]
        if changed:
            raise ConfigError(
                f"{settings.out} holds a training that differs in {', '.join(changed)}: go on with "
                "what it was asked for, or choose another out folder"
            )
        return
    if settings.out.is_dir() and any(settings.out.iterdir()):
        raise ConfigError(f"{settings.out} holds files of another origin: choose a new out folder")
    (settings.out / "work").mkdir(parents=True)
    file.write_text(json.dumps(asked, indent=2) + "\n")


def file_hash(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def split(samples: list[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples that are kept apart for the check at the end, a twentieth of them, and the others."""
    count = min(CHECKED_PROMPTS, max(1, len(samples) // 20))
    apart = set(Random(seed).sample(range(len(samples)), count))
    return (
        [sample for number, sample in enumerate(samples) if number in apart],
        [sample for number, sample in enumerate(samples) if number not in apart],
    )


def prompt_of(sample: Sample) -> list[int]:
    """The ids before its last answer."""
    return list(sample.row[0][: sample.prompt])


def own_rows(
    work: Path,
    samples: Sequence[Sample],
    target: Decoder,
    tokenizer: Tokenizer,
    settings: HeadSettings,
    bars: Bars,
    deadline: float,
) -> list[Row]:
    """The prompts with the target's greedy answers, up to ``max_length``; those that are answered
    by ``deadline``.

    Answers are kept in a file as they come: one JSON line each, the sample's number and ids.
    """
    path = work / "answers.jsonl"
    done: dict[int, list[int]] = {}
    if path.exists():
        whole = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
        path.write_text("".join(whole))
        done = dict(json.loads(line) for line in whole)
    left = [number for number in range(len(samples)) if number not in done]
    if settings.minutes is not None and (work / "checkpoint.pt").exists():
        # The steps go on with the rows that they began with.
        left = []
    prompts = [prompt_of(samples[number]) for number in left]
    longest = settings.max_length
    report = bars.share("own answers")
    with path.open("a") as file:
        for some in answers(target, prompts, tokenizer.eos_ids, longest, longest, deadline):
            new = {left[index]: answer for index, answer in some}
            file.writelines(json.dumps(item) + "\n" for item in new.items())
            file.flush()
            done.update(new)
            report(len(done) / len(samples))
    if len(done) < len(samples):
        bars.note(f"{len(done)} of {len(samples)} prompts were answered in half of the minutes")
    return [answer_row(prompt_of(samples[number]), done[number]) for number in sorted(done)]


def draft_vocabulary(rows: Sequence[Row], size: int, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The ends of text and the most frequent tokens, weighted as in the loss; ascending ids."""
    counts: Counter[int] = Counter()
    for ids, weights in rows:
        for token, weight in zip(ids, weights, strict=True):
            counts[token] += 1 if weight == 1 else 0
    for token in eos_ids:
        counts[token] += 1 << 60
    ordered = sorted(counts, key=lambda token: (-counts[token], token))
    return tuple(sorted(ordered[:size]))


def make_trainer(
    settings: HeadSettings,
    target: Decoder,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    cache: FeatureCache | None,
    minutes: float | None,
) -> HeadTrainer[Any]:
    """The trainer of a new head over the rows."""
    vocabulary = None
    if settings.algorithm != "eagle" and settings.draft_vocab_size < target.config.vocab_size:
        ends = sorted(tokenizer.eos_ids)
        vocabulary = draft_vocabulary(rows, settings.draft_vocab_size, ends)
    recipe = HeadRecipe(
        adam_lr=ADAM_LR * min(1.0, ADAM_WIDTH / target.config.hidden_size),
        seed=settings.seed,
        compile=settings.compile,
        draft_vocab=vocabulary,
        steps=DEPTHS if settings.algorithm == "parallel" else HeadRecipe.steps,
    )
    widths = (*(w for w in WIDTHS if w < settings.max_length), settings.max_length)
    stream = RowStream(rows, settings.seed, settings.batch_tokens, pad=0, widths=widths)
    if minutes is not None:
        budget = Budget(minutes=minutes)
    else:
        epochs = 1.0 if settings.epochs is None else settings.epochs
        budget = Budget(tokens=round(epochs * sum(len(ids) for ids, _ in rows)))
    if settings.algorithm == "eagle":
        return HeadTrainer(target, new_eagle(target, recipe), stream, recipe, budget, cache)
    if settings.algorithm == "parallel":
        # The last id is a rare token's, if any's; what stands beside it tells a mask from one.
        head = new_parallel(target, recipe, target.config.vocab_size - 1)
        return ParallelTrainer(target, head, stream, recipe, budget, cache)
    return HeadTrainer(target, new_head(target, recipe), stream, recipe, budget, cache)


def run(trainer: HeadTrainer[Any], checkpoint: Path, report: Report) -> None:
    """Train to the end of the budget, from the checkpoint where there is one."""
    if checkpoint.exists():
        trainer.restore(torch.load(checkpoint, map_location=trainer.device, weights_only=True))
    try:
        trainer.run(checkpoint, report)
    except KeyboardInterrupt:
        save_atomically(trainer.state(), checkpoint)
        raise


def target_runs(
    target: Decoder,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    report: Callable[[float], None],
    deadline: float,
) -> list[Run]:
    """The target's greedy answers to the prompts that were kept apart, cut at CHECKED_TOKENS and
    at ``deadline``."""
    runs: list[Run] = []
    prompts, longest = [prompt_of(sample) for sample in samples], target.config.max_position
    for some in answers(target, prompts, tokenizer.eos_ids, CHECKED_TOKENS, longest, deadline):
        runs += ((prompts[number], answer) for number, answer in some)
        report(len(runs) / len(samples))
    return runs


def write_report(
    settings: HeadSettings,
    trainer: HeadTrainer[Any],
    seconds: float,
    found: Acceptance,
    prompts: int,
) -> None:
    """Write the figures of the training into the folder."""
    budget = trainer.budget
    report = {
        **{name: str(value) if isinstance(value, Path) else value
           for name, value in asdict(settings).items()},
        "steps": budget.done,
        "tokens": budget.tokens_done,
        "seconds": round(seconds, 1),
        "checked_prompts": prompts,
        "accept_length": round(found.length, 4),
        "accepted_by_position": [round(share, 4) for share in found.by_position],
        "tried_by_position": list(found.tried),
    }  # fmt: skip
    (settings.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
