"""Log-probabilities in OpenAI's two formats, and in SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from overlap_spec.server.events import GrowingList
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.types import Delta, Output, PromptLogprobs, Request, TokenLogprobs

# Stands for -inf, which JSON does not have.
LOWEST = -9999.0
# Tokens that are encoded together; between them, other threads run.
AT_ONCE = 64


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """``choice.logprobs`` of a chat completion."""
    return {
        "content": [
            {
                **_token(tokenizer, token, entry.logprob),
                "top_logprobs": [_token(tokenizer, each, value) for each, value in entry.top],
            }
            for token, entry in zip(ids, logprobs, strict=False)
        ],
        "refusal": None,
    }


def text_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offset: int,
    top: int,
) -> dict[str, Any]:
    """``choice.logprobs`` of a text completion.

    Args:
        logprobs: One entry a token; None of a prompt's first.
        offset: Characters before the first token.
        top: Most probable tokens that are shown of each.
    """
    tokens, offsets = [], []
    for token in ids[: len(logprobs)]:
        text = tokenizer.decode([token])
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [entry and _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            entry and {tokenizer.decode([each]): _finite(value) for each, value in entry.top[:top]}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[PromptLogprobs | None], top: int
) -> list[Any]:
    """vLLM's ``prompt_logprobs``: of each token of a prompt its own entry, then the most probable
    ones, by token id; null of the first."""
    return [
        entry and _ranked(tokenizer, token, entry, top)
        for token, entry in zip(ids, logprobs, strict=False)
    ]


def _ranked(tokenizer: Tokenizer, token: int, entry: PromptLogprobs, top: int) -> dict[str, Any]:
    best = enumerate(entry.top[:top], 1)
    ranked = [(token, entry.logprob, entry.rank), *((each, p, rank) for rank, (each, p) in best)]
    found: dict[str, Any] = {}
    for each, value, rank in ranked:
        text = tokenizer.vocabulary.text[each].decode("utf-8", errors="replace")
        shown = {"logprob": _finite(value), "rank": rank, "decoded_token": text}
        found.setdefault(str(each), shown)
    return found


def without_stop(output: Output) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
    """Tokens of an output without the stop token that ended it."""
    end = -1 if isinstance(output.stop_match, int) else None
    return output.token_ids[:end], output.logprobs[:end]


def cut_stop(request: Request, delta: Delta) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
    """Tokens of a piece without the stop token that ended the output."""
    ids = delta.token_ids
    stopped = delta.finish_reason == "stop" and ids and ids[-1] in request.stop_ids
    end = -1 if stopped else None
    return ids[:end], delta.logprobs[:end]


class SGLangLogprobs:
    """The log-probabilities of ``meta_info``, encoded once for each token; each entry is (logprob,
    token id, text or None)."""

    def __init__(self, tokenizer: Tokenizer, with_text: bool) -> None:
        self._tokenizer, self._with_text = tokenizer, with_text
        self._own, self._top = GrowingList(), GrowingList()

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""
        for first in range(0, len(logprobs), AT_ONCE):
            some = logprobs[first : first + AT_ONCE]
            pairs = zip(ids[first:], some, strict=False)
            self._own.push([self._entry(token, each.logprob) for token, each in pairs])
            self._top.push([[self._entry(*one) for one in each.top] for each in some])

    def parts(self) -> list[bytes]:
        """The fields of all tokens so far, as JSON to follow another field."""
        own, top = self._own.parts(), self._top.parts()
        return [b',"output_token_logprobs":', *own, b',"output_top_logprobs":', *top]

    def fields(self) -> dict[str, Any]:
        """Those of all tokens so far, for a reply as a whole."""
        own, top = (msgspec.Raw(b"".join(each.parts())) for each in (self._own, self._top))
        return {"output_token_logprobs": own, "output_top_logprobs": top}

    def _entry(self, token: int, value: float) -> tuple[float, int, str | None]:
        text = self._tokenizer.decode([token]) if self._with_text else None
        return _finite(value), token, text


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.vocabulary.text[token]
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


def _finite(value: float) -> float:
    return max(value, LOWEST)
