"""Rebuild the embedded model, or train it on: tokenizer, target, draft head and draft model.

``python -m overlap_spec.training.embedded --gsm8k FILE --tokens-target 100 --minutes-head 25``

``--only draft-model`` makes the draft model anew for the target in ``--out``, and so does
``--only head`` the head: after a change of the target both are to be made again.

``--init FOLDER`` begins with the weights and the tokenizer of a folder that holds ``target`` (and
``eagle3``, ``draft_model``) instead of new ones, with no copying curriculum; ``--new-tokenizer``
makes the tokenizer anew there, and carries the rows of the embedding over; ``--layers`` adds layers
that do nothing yet; a lower ``--rate`` forgets less of what the target knows. ``--resume``
goes on from a work folder's checkpoint, with the optimizers' state; a larger ``--tokens-target``
there moves the decay of the learning rate, which lasts for the last ``--tokens-decay``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor

from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.training.batches import WIDTHS, BatchStream, Row
from overlap_spec.training.budget import Budget
from overlap_spec.training.data import END, DocumentMaker, read_gsm8k
from overlap_spec.training.draft_model import (
    DraftModelRecipe,
    DraftModelTrainer,
    cut_out,
)
from overlap_spec.training.export import export_head, export_target
from overlap_spec.training.generate import own_outputs
from overlap_spec.training.head import HeadRecipe, HeadTrainer
from overlap_spec.training.progress import COLUMNS, progress_bar, share_bar
from overlap_spec.training.target import TargetRecipe, TargetTrainer, deepened, embedded_config
from overlap_spec.training.tokenizer import corpus, moved_rows, special_id, train_tokenizer

TOKENIZER_DOCUMENTS = 30000
# Kind of prompt, how many, longest answer in tokens.
OWN_OUTPUTS = (("extraction", 512, 128), ("tool_call", 160, 80), ("gsm8k", 256, 192))
TARGET_TOKENS = 3072
HEAD_TOKENS = 3072
HEAD_WIDTHS = (96, 144, 208, 320, 640, 2304)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m overlap_spec.training.embedded")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K train split, .jsonl")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--minutes-target", type=float, default=70.0)
    limit.add_argument("--tokens-target", type=float, help="million tokens, padding left out")
    parser.add_argument(
        "--tokens-decay", type=float, default=8.0, help="of these, with a falling learning rate"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor on the target's learning rates"
    )
    parser.add_argument("--init", type=Path, help="folder of a model to begin with")
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="do not keep the tokenizer of --init"
    )
    parser.add_argument("--layers", type=int, help="make the model of --init this deep")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--minutes-head", type=float, default=25.0)
    head.add_argument("--tokens-head", type=float, help="million tokens")
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--minutes-draft-model", type=float, default=15.0)
    draft.add_argument("--tokens-draft-model", type=float, help="million tokens")
    parser.add_argument("--out", type=Path, default=Path("overlap_spec/embedded"))
    parser.add_argument("--work", type=Path, default=Path("build/embedded"), help="checkpoints")
    parser.add_argument("--only", choices=("target", "head", "draft-model"), help="train one")
    parser.add_argument("--resume", action="store_true", help="go on from the work folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="where no C++ compiler exists")
    return parser.parse_args(arguments)


def build_tokenizer(options: argparse.Namespace, gsm8k: list[tuple[str, str]]) -> Tokenizer:
    """The tokenizer of a target that is there already or of the work folder, or a new one."""
    known = options.init if options.only in (None, "target") else options.out
    if known and not (options.new_tokenizer and known == options.init):
        return read_tokenizer(known)
    path = options.work / "tokenizer.json"
    if not (options.resume and path.exists()):
        tokenizer = train_tokenizer(corpus(options.seed, TOKENIZER_DOCUMENTS, gsm8k))
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that holds ``target``."""
    return Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))


def carry_over(weights: Tensor, folder: Path, tokenizer: Tokenizer) -> None:
    """Move the rows ``(V, H)`` of the model in ``folder`` to the ids of ``tokenizer``, in place."""
    old = read_tokenizer(folder)
    if old.get_vocab() != tokenizer.get_vocab():
        with torch.no_grad():
            weights.copy_(moved_rows(weights, old, tokenizer))


def load_target(folder: Path) -> Decoder:
    """A target in float32 from its folder."""
    return load_decoder(folder, torch.float32, torch.device("cpu"))


def build_target(
    options: argparse.Namespace,
    tokenizer: Tokenizer,
    gsm8k: list[tuple[str, str]],
    progress: Progress,
) -> Decoder:
    """Train the target, or go on with it."""
    recipe = TargetRecipe(seed=options.seed, compile=not options.no_compile)
    recipe = replace(
        recipe, muon_lr=options.rate * recipe.muon_lr, adam_lr=options.rate * recipe.adam_lr
    )
    budget = Budget(minutes=options.minutes_target)
    if options.tokens_target:
        budget = Budget(tokens=round(1e6 * options.tokens_target))
        recipe = replace(recipe, decay_tokens=round(1e6 * options.tokens_decay))
    init = None
    if options.init:
        init = load_target(options.init / "target")
        carry_over(init.embed_tokens.weight, options.init, tokenizer)
        init = deepened(init, options.layers or init.config.num_layers)
        recipe = replace(recipe, warm_up_share=0.0)
    config = init.config if init else embedded_config(tokenizer.get_vocab_size())
    longest = min(max(WIDTHS), config.max_position)
    stream = BatchStream(tokenizer, gsm8k, options.seed, TARGET_TOKENS, longest)
    trainer = TargetTrainer(config, stream, recipe, budget, init)
    checkpoint = options.work / "target.pt"
    if options.resume and checkpoint.exists():
        trainer.restore(torch.load(checkpoint, weights_only=False))
    return trainer.run(checkpoint, progress_bar(progress, "target"))


def own_rows(
    options: argparse.Namespace,
    target: Decoder,
    tokenizer: Tokenizer,
    gsm8k: list[tuple[str, str]],
    progress: Progress,
) -> list[Row]:
    """The target's greedy answers to training prompts, from the work folder or new."""
    path = options.work / "own_outputs.pt"
    if options.resume and path.exists():
        saved: list[Row] = torch.load(path)
        return saved
    maker = DocumentMaker(Random(options.seed + 1), gsm8k)
    rows: list[Row] = []
    for kind, count, longest in OWN_OUTPUTS:
        if kind == "gsm8k" and not gsm8k:
            continue
        draw = getattr(maker, kind)
        texts = [draw()[0][0] for _ in range(count)]
        prompts = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        bar = share_bar(progress, f"own {kind} outputs")
        rows += own_outputs(target, prompts, [special_id(tokenizer, END)], longest, report=bar)
    torch.save(rows, path)
    return rows


def build_head(
    options: argparse.Namespace,
    target: Decoder,
    tokenizer: Tokenizer,
    gsm8k: list[tuple[str, str]],
    rows: list[Row],
    progress: Progress,
) -> Eagle3Head:
    """Train the draft head, or go on with it."""
    stream = BatchStream(
        tokenizer,
        gsm8k,
        options.seed + 2,
        HEAD_TOKENS,
        min(max(HEAD_WIDTHS), target.config.max_position),
        widths=HEAD_WIDTHS,
        replay=rows,
        replay_share=0.5,
    )
    recipe = HeadRecipe(seed=options.seed, compile=not options.no_compile)
    init = options.init / "eagle3" if options.init else None
    head = load_eagle3(init, target, torch.float32) if init and init.exists() else None
    if head is not None:
        carry_over(head.lm_head.weight, options.init, tokenizer)
    budget = Budget(minutes=options.minutes_head)
    if options.tokens_head:
        budget = Budget(tokens=round(1e6 * options.tokens_head))
    trainer = HeadTrainer(target, stream, recipe, budget, head)
    checkpoint = options.work / "head.pt"
    if options.resume and checkpoint.exists():
        trainer.restore(torch.load(checkpoint, weights_only=False))
    return trainer.run(checkpoint, progress_bar(progress, "head"))


def build_draft_model(
    options: argparse.Namespace,
    target: Decoder,
    tokenizer: Tokenizer,
    gsm8k: list[tuple[str, str]],
    progress: Progress,
) -> Decoder:
    """Train the draft model, or go on with it."""
    longest = min(max(WIDTHS), target.config.max_position)
    stream = BatchStream(tokenizer, gsm8k, options.seed + 3, TARGET_TOKENS, longest)
    recipe = DraftModelRecipe(seed=options.seed, compile=not options.no_compile)
    budget = Budget(minutes=options.minutes_draft_model)
    if options.tokens_draft_model:
        budget = Budget(tokens=round(1e6 * options.tokens_draft_model))
    init = options.init / "draft_model" if options.init else None
    if init and init.exists():
        draft = load_decoder(init, torch.float32, torch.device("cpu"))
        carry_over(draft.embed_tokens.weight, options.init, tokenizer)
    else:
        draft = cut_out(target, stream.next())
    trainer = DraftModelTrainer(target, draft, stream, recipe, budget)
    checkpoint = options.work / "draft_model.pt"
    if options.resume and checkpoint.exists():
        trainer.restore(torch.load(checkpoint, weights_only=False))
    return trainer.run(checkpoint, progress_bar(progress, "draft model"))


def main(arguments: list[str] | None = None) -> None:
    """Build everything that is asked for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    gsm8k = read_gsm8k(options.gsm8k) if options.gsm8k else []
    tokenizer = build_tokenizer(options, gsm8k)
    with Progress(*COLUMNS) as progress:
        if options.only in (None, "target"):
            target = build_target(options, tokenizer, gsm8k, progress)
            export_target(target, tokenizer, options.out / "target")
        else:
            target = load_target(options.out / "target")
        if options.only in (None, "head"):
            rows = own_rows(options, target, tokenizer, gsm8k, progress)
            head = build_head(options, target, tokenizer, gsm8k, rows, progress)
            export_head(head, options.out / "eagle3")
        if options.only in (None, "draft-model"):
            draft_model = build_draft_model(options, target, tokenizer, gsm8k, progress)
            export_target(draft_model, tokenizer, options.out / "draft_model")


if __name__ == "__main__":
    main()
