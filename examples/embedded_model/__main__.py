"""Rebuild the embedded model, or train it on: tokenizer, target, draft head and draft model.

``python -m examples.embedded_model --gsm8k FILE --tokens-target 100 --minutes-head 25``

``--only draft-model`` makes the draft model anew for the target in ``--out``, and so does
``--only head`` the head: after a change of the target both are to be made again. ``--only
parallel`` makes a head that drafts in one pass from that head; it is made on request alone.

``--init FOLDER`` begins with the weights and the tokenizer of a folder that holds ``target`` (and
``eagle3``, ``draft_model``) instead of new ones, with no copying curriculum; ``--new-tokenizer``
makes the tokenizer anew there, and carries the rows of the embedding over; ``--layers`` adds layers
that do nothing yet; a lower ``--rate`` forgets less of what the target knows. ``--resume``
goes on from a work folder's checkpoint, with the optimizers' state; a larger ``--tokens-target``
there moves the decay of the learning rate, which lasts for the last ``--tokens-decay``.

``--device cuda`` trains on a GPU, with larger batches and without the compiler; ``--workers 12``
lets so many processes write the documents, which one process does too slowly for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor

from examples.embedded_model.data import END, PAD, DocumentMaker, read_gsm8k
from examples.embedded_model.draft_model import RECIPE, DraftModelTrainer, cut_out
from examples.embedded_model.stream import BatchStream, WorkerStream
from examples.embedded_model.target import (
    TargetRecipe,
    TargetTrainer,
    deepened,
    embedded_config,
    export_target,
    new_target,
)
from examples.embedded_model.tokenizer import corpus, moved_rows, special_id, train_tokenizer
from overlap_spec.kernels.dispatch import use
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Head
from overlap_spec.models.parallel_eagle import ParallelHead
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.training.batches import WIDTHS, Row, answer_row
from overlap_spec.training.budget import Budget
from overlap_spec.training.export import export_head
from overlap_spec.training.generate import AT_ONCE, answers
from overlap_spec.training.head import HeadRecipe, HeadTrainer, new_head
from overlap_spec.training.parallel import DEPTHS, ParallelTrainer, new_parallel
from overlap_spec.training.progress import COLUMNS, Bars
from overlap_spec.training.trainer import Model, Trainer

TOKENIZER_DOCUMENTS = 30000
# Kind of prompt, how many, longest answer in tokens.
OWN_OUTPUTS = (("extraction", 512, 128), ("tool_call", 160, 80), ("gsm8k", 256, 192))
# By device: the processor's cache holds a small batch; a GPU waits for launches in one. There a
# step of the target has two.
TOKENS_PER_BATCH = {"cpu": 3072, "cuda": 12288}
# Likewise, prompts that are answered together; and how often OWN_OUTPUTS, lest what a GPU learns
# from them be the same again and again.
ANSWERED_AT_ONCE = {"cpu": AT_ONCE, "cuda": 1024}
TIMES = {"cpu": 1, "cuda": 8}
HEAD_WIDTHS = (96, 144, 208, 320, 640, 2304)
# What can be trained, and for how many minutes.
PARTS = {"target": 70.0, "head": 25.0, "draft-model": 15.0, "parallel": 50.0}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.embedded_model")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K train split, .jsonl")
    for part, minutes in PARTS.items():
        limit = parser.add_mutually_exclusive_group()
        limit.add_argument(f"--minutes-{part}", type=float, default=minutes)
        limit.add_argument(f"--tokens-{part}", type=float, help="millions, padding left out")
    parser.add_argument(
        "--tokens-decay",
        type=float,
        default=8.0,
        help="of --tokens-target, with a falling learning rate",
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor on the target's learning rates"
    )
    parser.add_argument("--init", type=Path, help="folder of a model to begin with")
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="do not keep the tokenizer of --init"
    )
    parser.add_argument("--layers", type=int, help="make the model of --init this deep")
    parser.add_argument("--out", type=Path, default=Path("overlap_spec/embedded"))
    parser.add_argument("--work", type=Path, default=Path("build/embedded"), help="checkpoints")
    parser.add_argument("--only", choices=PARTS, help="train one")
    parser.add_argument("--resume", action="store_true", help="go on from the work folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="where no C++ compiler exists")
    parser.add_argument("--device", choices=TOKENS_PER_BATCH, default="cpu")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that write documents; 0: this one"
    )
    parser.add_argument("--tokens-batch", type=int, help="of a batch, with padding")
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


def load(folder: Path) -> Decoder:
    """A target or a draft model in float32 from its folder, to be trained on or not."""
    return load_decoder(folder, torch.float32, torch.device("cpu")).requires_grad_(True)


@dataclass(frozen=True)
class Builder:
    """Makes each part from what all of them need."""

    options: argparse.Namespace
    gsm8k: list[tuple[str, str]]
    tokenizer: Tokenizer
    bars: Bars

    @property
    def device(self) -> torch.device:
        """Where everything is trained."""
        return torch.device(self.options.device)

    def target(self) -> Decoder:
        """Train the target, or go on with it."""
        options, recipe, budget = self.options, TargetRecipe(), self._budget("target")
        if budget.tokens is not None:
            decay = round(1e6 * options.tokens_decay) / budget.tokens
            recipe = replace(recipe, decay_from=max(0.0, 1 - decay))
        recipe = replace(
            recipe,
            muon_lr=options.rate * recipe.muon_lr,
            adam_lr=options.rate * recipe.adam_lr,
            **self._settings(),
        )
        if options.device == "cuda":
            # A token more than one batch has: two batches.
            recipe = replace(recipe, tokens_per_step=self._tokens_per_batch() + 1)
        if options.init:
            model = load(options.init / "target")
            self._carry_over(model.embed_tokens.weight)
            model = deepened(model, options.layers or model.config.num_layers)
            recipe = replace(recipe, warm_up_share=0.0)
        else:
            model = new_target(embedded_config(self.tokenizer.get_vocab_size()), options.seed)
        model = model.to(self.device)
        with self._stream(0, model) as stream:
            trainer = TargetTrainer(model, stream, recipe, budget)
            return self._trained(trainer, "target")

    def head(self, target: Decoder) -> Eagle3Head:
        """Train the draft head, or go on with it."""
        recipe = HeadRecipe(**self._settings())
        replay, budget = self._own_rows(target), self._budget("head")
        head, init = new_head(target, recipe), self._init("eagle3")
        if init:
            head.load_state_dict(load_eagle3(init, target, torch.float32).state_dict())
            self._carry_over(head.lm_head.weight)
        with self._stream(2, target, widths=HEAD_WIDTHS, replay=replay, replay_share=0.5) as stream:
            return self._trained(HeadTrainer(target, head, stream, recipe, budget), "head")

    def parallel(self, target: Decoder) -> ParallelHead:
        """Train the head that drafts in one pass, from the draft head, or go on with it."""
        recipe = HeadRecipe(steps=DEPTHS, **self._settings())
        replay, budget = self._own_rows(target), self._budget("parallel")
        known = load_eagle3(self.options.out / "eagle3", target, torch.float32)
        head = new_parallel(target, recipe, special_id(self.tokenizer, PAD), known)
        # The few longest texts have no room for the masks behind all their slots.
        widths = HEAD_WIDTHS[:-1]
        with self._stream(4, target, widths=widths, replay=replay, replay_share=0.5) as stream:
            trainer = ParallelTrainer(target, head, stream, recipe, budget)
            return self._trained(trainer, "parallel")

    def draft_model(self, target: Decoder) -> Decoder:
        """Train the draft model, or go on with it."""
        init = self._init("draft_model")
        recipe, budget = replace(RECIPE, **self._settings()), self._budget("draft-model")
        with self._stream(3, target) as stream:
            if init:
                draft = load(init)
                self._carry_over(draft.embed_tokens.weight)
            else:
                draft = cut_out(target, stream.next())
            draft = draft.to(self.device)
            trainer = DraftModelTrainer(target, draft, stream, recipe, budget)
            return self._trained(trainer, "draft_model")

    def _settings(self) -> dict[str, Any]:
        """What every recipe takes from the command line."""
        # On a GPU a graph for each width would take longer to compile than it saves.
        compiled = not self.options.no_compile and self.device.type == "cpu"
        return {"seed": self.options.seed, "compile": compiled}

    def _tokens_per_batch(self) -> int:
        return self.options.tokens_batch or TOKENS_PER_BATCH[self.options.device]

    def _budget(self, part: str) -> Budget:
        name = part.replace("-", "_")
        tokens = getattr(self.options, f"tokens_{name}")
        if tokens:
            return Budget(tokens=round(1e6 * tokens))
        return Budget(minutes=getattr(self.options, f"minutes_{name}"))

    @contextmanager
    def _stream(
        self, number: int, model: Decoder, widths: tuple[int, ...] = WIDTHS, **replay: Any
    ) -> Iterator[BatchStream | WorkerStream]:
        """Documents for one of the trainings, none longer than the model's context."""
        longest = min(max(widths), model.config.max_position)
        size = self._tokens_per_batch()
        make = partial(
            BatchStream,
            self.tokenizer,
            self.gsm8k,
            tokens_per_batch=size,
            max_length=longest,
            widths=widths,
            **replay,
        )
        seed, workers = self.options.seed + number, self.options.workers
        if not workers:
            yield make(seed=seed)
            return
        stream = WorkerStream(make, seed, workers)
        try:
            yield stream
        finally:
            stream.close()

    def _init(self, part: str) -> Path | None:
        """The folder of a part to begin with, where there is one."""
        folder = self.options.init / part if self.options.init else None
        return folder if folder and folder.exists() else None

    def _carry_over(self, weights: Tensor) -> None:
        """Move the rows ``(V, H)`` of the model of ``--init`` to the tokenizer's ids, in place."""
        old = read_tokenizer(self.options.init)
        if old.get_vocab() != self.tokenizer.get_vocab():
            with torch.no_grad():
                weights.copy_(moved_rows(weights, old, self.tokenizer))

    def _own_rows(self, target: Decoder) -> list[Row]:
        """The target's greedy answers to training prompts, from the work folder or new."""
        path = self.options.work / "own_outputs.pt"
        if self.options.resume and path.exists():
            saved: list[Row] = torch.load(path)
            return saved
        maker = DocumentMaker(Random(self.options.seed + 1), self.gsm8k)
        ends, limit = [special_id(self.tokenizer, END)], target.config.max_position
        rows: list[Row] = []
        for kind, count, longest in OWN_OUTPUTS:
            if kind == "gsm8k" and not self.gsm8k:
                continue
            draw = getattr(maker, kind)
            count *= TIMES[self.options.device]
            texts = [draw()[0][0] for _ in range(count)]
            prompts = [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
            report, before = self.bars.share(f"own {kind} outputs"), len(rows)
            at_once = ANSWERED_AT_ONCE[self.options.device]
            for some in answers(target, prompts, ends, longest, limit, at_once=at_once):
                rows += (answer_row(prompts[number], answer) for number, answer in some)
                report((len(rows) - before) / count)
        torch.save(rows, path)
        return rows

    def _trained(self, trainer: Trainer[Model], name: str) -> Model:
        """What ``trainer`` makes of its model, from the checkpoint where that is asked for."""
        checkpoint = self.options.work / f"{name}.pt"
        if self.options.resume and checkpoint.exists():
            # The optimizers move what is theirs, and leave their counts on the host.
            trainer.restore(torch.load(checkpoint, map_location="cpu", weights_only=False))
        return trainer.run(checkpoint, self.bars.steps(name.replace("_", " "), trainer.budget))


def main(arguments: list[str] | None = None) -> None:
    """Build everything that is asked for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    gsm8k = read_gsm8k(options.gsm8k) if options.gsm8k else []
    tokenizer = build_tokenizer(options, gsm8k)
    # Kernels of a GPU are compiled when they are first called, and have no backward pass.
    kernels = use("reference") if options.device == "cuda" else nullcontext()
    with kernels, Progress(*COLUMNS) as progress:
        builder = Builder(options, gsm8k, tokenizer, Bars(progress))
        if options.only in (None, "target"):
            target = builder.target()
            export_target(target, tokenizer, options.out / "target")
        else:
            target = load(options.out / "target").to(builder.device)
        if options.only in (None, "head"):
            export_head(builder.head(target), options.out / "eagle3")
        if options.only in (None, "draft-model"):
            export_target(builder.draft_model(target), tokenizer, options.out / "draft_model")
        if options.only == "parallel":
            export_head(builder.parallel(target), options.out / "parallel")


if __name__ == "__main__":
    main()
