"""What a training of a draft head is asked for."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from overlap_spec.config import setting


@dataclass(frozen=True)
class HeadSettings:
    """What a training is asked for. Lengths and sizes in tokens."""

    target: Path = setting("Folder of the target.", MISSING)
    data: Path = setting("File with a chat (messages) or a text (text) a line, .jsonl.", MISSING)
    out: Path = setting("Folder for the head; a stopped one is gone on with.", MISSING)
    algorithm: str = setting(
        "Kind of head: eagle3, eagle (EAGLE-1 and EAGLE-2) or parallel (P-EAGLE).",
        "eagle3",
        ("--algorithm", "--head"),
    )
    epochs: float | None = setting("Passes over the data; 1 by default.")
    minutes: float | None = setting("From start to end, answers and check too; in place of epochs.")
    own_answers: bool = setting(
        "Learn from the target's own greedy answers.", False, ("--own-answers",)
    )
    max_length: int = setting("Longer rows are cut, in tokens.", 1024)
    batch_tokens: int = setting("Tokens of a step, with padding.", 4096)
    draft_vocab_size: int = setting(
        "Most tokens that the head can draft: the data's most frequent; eagle's drafts all.", 32000
    )
    cache_features: bool = setting(
        "Keep the target's features on disk.", False, ("--cache-features",)
    )
    compile: bool = setting(
        "Compile the passes: slow to start, faster then.", False, ("--compile",)
    )
    seed: int = setting("Same seed, same order of the data.", 1)
