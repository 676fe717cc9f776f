"""Tasks, what came of them, and what every measured system has to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from bench.common import mean, percentile


@dataclass(frozen=True)
class Task:
    """One greedy request.

    Attributes:
        prompt: One user turn, or the text itself where ``raw``.
        schema: JSON schema of the output; None is free text.
        max_tokens: Most tokens of the output.
        stop: Texts that end the output.
    """

    prompt: str
    schema: dict[str, Any] | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    raw: bool = False


@dataclass
class Reply:
    """What became of one task. Times in ms, from when the task was handed over.

    Attributes:
        tokens: Output tokens, the one that ends the text included where the system tells it.
        finish_reason: ``stop``, ``length`` or ``error``.
        verifies, verified_tokens: Verified drafts and the tokens that these emitted; None where
            the system does not tell.
        token_ids: Where the system tells them; not kept in a record.
    """

    text: str = ""
    tokens: int = 0
    finish_reason: str = "error"
    ttft_ms: float | None = None
    end_to_end_ms: float = 0.0
    verifies: int | None = None
    verified_tokens: int | None = None
    error: str | None = None
    token_ids: tuple[int, ...] = field(default=(), repr=False)

    def raw(self) -> dict[str, Any]:
        """As plain data, for a line of raw samples."""
        data = asdict(self)
        del data["token_ids"]
        return data


@dataclass
class Batch:
    """Replies to tasks in their order, and the seconds from the first task to the last reply.

    ``more``: what else the system tells of this batch, as plain data.
    """

    seconds: float
    replies: list[Reply]
    more: dict[str, Any] = field(default_factory=dict)

    def raw(self) -> dict[str, Any]:
        """As plain data, for a line of raw samples."""
        return {
            "seconds": self.seconds,
            "replies": [reply.raw() for reply in self.replies],
            **self.more,
        }


class System(Protocol):
    """Something that answers tasks.

    Attributes:
        how: What it is and how it is used, for a reader of the record.
    """

    how: str

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """Answer all tasks, at most ``parallel`` at once."""

    def close(self) -> None:
        """Free what it holds."""


def tpot_ms(reply: dict[str, Any]) -> float | None:
    """Mean time per token after the first, of a raw reply; None where there is no second one."""
    if reply["ttft_ms"] is None or reply["tokens"] < 2 or reply["error"] is not None:
        return None
    return float((reply["end_to_end_ms"] - reply["ttft_ms"]) / (reply["tokens"] - 1))


def figures(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of raw batches of one system, as every benchmark shows them.

    ``accept_length`` is None where a system does not tell it, or drafts nothing.
    """
    replies = [reply for batch in batches for reply in batch["replies"]]
    seconds = sum(batch["seconds"] for batch in batches)
    tokens = sum(reply["tokens"] for reply in replies)
    verifies = sum(reply["verifies"] or 0 for reply in replies)
    emitted = sum(reply["verified_tokens"] or 0 for reply in replies)
    return {
        "requests": len(replies),
        "failed": sum(reply["error"] is not None for reply in replies),
        "finished": sum(reply["finish_reason"] == "stop" for reply in replies),
        "output_tokens": tokens,
        "latency_s": seconds,
        "tokens_per_second": tokens / seconds,
        "accept_length": emitted / verifies if verifies else None,
        "ttft_ms": percentiles(reply["ttft_ms"] for reply in replies),
        "tpot_ms": percentiles(map(tpot_ms, replies)),
    }


def percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, percentiles, most and count of the values that there are; None where there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    middle = {f"p{p}": percentile(found, p) for p in (50, 90, 99)}
    return {"mean": mean(found), **middle, "max": max(found), "n": len(found)}


def rate(batch: dict[str, Any]) -> float:
    """Output tokens per second of one raw batch."""
    return float(sum(reply["tokens"] for reply in batch["replies"]) / batch["seconds"])
