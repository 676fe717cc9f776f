"""What a training of a draft head is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from overlap_spec.config import Help


@dataclass(frozen=True)
class HeadSettings:
    """What a training is asked for. Lengths and sizes in tokens."""

    target: Annotated[Path, Help("Folder of the target.")]
    data: Annotated[Path, Help("File with a chat (messages) or a text (text) a line, .jsonl.")]
    out: Annotated[Path, Help("Folder for the head; a stopped one is gone on with.")]
    algorithm: Annotated[
        str,
        Help(
            "Kind of head: eagle3, eagle (EAGLE-1 and EAGLE-2) or parallel (P-EAGLE).",
            ("--algorithm", "--head"),
        ),
    ] = "eagle3"
    epochs: Annotated[float | None, Help("Passes over the data; 1 by default.")] = None
    minutes: Annotated[
        float | None, Help("From start to end, answers and check too; in place of epochs.")
    ] = None
    own_answers: Annotated[
        bool, Help("Learn from the target's own greedy answers.", ("--own-answers",))
    ] = False
    max_length: Annotated[int, Help("Longer rows are cut, in tokens.")] = 1024
    batch_tokens: Annotated[int, Help("Tokens of a step, with padding.")] = 4096
    draft_vocab_size: Annotated[
        int,
        Help("Most tokens that the head can draft: the data's most frequent; eagle's drafts all."),
    ] = 32000
    cache_features: Annotated[
        bool, Help("Keep the target's features on disk.", ("--cache-features",))
    ] = False
    compile: Annotated[
        bool, Help("Compile the passes: slow to start, faster then.", ("--compile",))
    ] = False
    seed: Annotated[int, Help("Same seed, same order of the data.")] = 1
