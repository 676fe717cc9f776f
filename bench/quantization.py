"""Int8 and int4 weights: what they cost in accuracy, against other types.

``python -m bench.quantization [--model DIR] [--types T …] [--data FILE] [--texts N] [--quick]
[--json PATH]``: ``float32``, ``bfloat16``, ``int8`` over bfloat16 (``--dtype bfloat16
--quantization int8``) and, where the processor computes so, ``int4``, each with its weights in the
layout that the engine gives them. What they bring in speed, ``bench.peers --by-hand
dtype=bfloat16,quantization=int8`` tells.

One pass over each text, a question and its answer as a chat, of ``--data`` (rows of
GSM8K; the project's own questions if absent). ``perplexity`` is over all tokens but the first of
each; ``equal_greedy`` by base: the share of positions whose best token is the base's. Perplexity
says nothing of a padded vocabulary: a channel of 2^-40, which 8 bits round to 0, holds its new
tokens down.

Fields of the last line, beside those of every record (``bench.common``): ``perplexity``,
``equal_greedy``, and ``tokens``, that they are over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common import Run, command, flags, positive
from bench.gsm8k import OWN_QUESTIONS, read_rows
from overlap_spec.config import EMBEDDED
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.packing import pack
from overlap_spec.models.quantization import has_int4, quantize
from overlap_spec.models.weights import load_decoder
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.training.attention import CausalRows

# Name → its type, and its quantization.
TYPES: dict[str, tuple[str, str | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}


def load(model: Path, name: str) -> Decoder:
    """The decoder in ``model`` as an engine of this type computes with it."""
    dtype, quantization = TYPES[name]
    decoder = load_decoder(model, getattr(torch, dtype), torch.device("cpu"))
    if quantization is not None:
        quantize([decoder], quantization)
    pack(decoder)
    return decoder


def read_texts(data: Path, tokenizer: Tokenizer, count: int) -> list[Tensor]:
    """Token ids of the first ``count`` questions with their answers, int64 ``(T,)`` each."""
    return [
        torch.tensor(
            tokenizer.chat([{"role": "user", "content": row.question}])
            + tokenizer.encode(row.answer)
        )
        for row in read_rows(data)[:count]
    ]


@torch.inference_mode()
def read_through(decoder: Decoder, text: Tensor) -> tuple[float, Tensor]:
    """Summed negative log-likelihood of a text's tokens after the first, and the best token after
    each of its tokens ``(T,)``."""
    hidden, _ = decoder(text, torch.arange(len(text)), CausalRows(1, len(text)))
    logits = decoder.logits(hidden).float()
    loss = F.cross_entropy(logits[:-1], text[1:], reduction="sum")
    return float(loss), logits.argmax(-1)


def measure_accuracy(
    run: Run, model: Path, types: Sequence[str], texts: Sequence[Tensor]
) -> dict[str, Any]:
    """One pass of every type over every text."""
    found: dict[str, list[tuple[float, Tensor]]] = {}
    for name in types:
        decoder = load(model, name)
        found[name] = [read_through(decoder, text) for text in texts]
        del decoder
    losses: dict[str, float] = dict.fromkeys(types, 0.0)
    equal = {base: dict.fromkeys(types, 0) for base in types if TYPES[base][1] is None}
    for number, text in enumerate(texts):
        for name in types:
            loss, best = found[name][number]
            same = {base: int((best == found[base][number][1]).sum()) for base in equal}
            tokens = len(text)
            run.sample(type=name, text=number, tokens=tokens, loss=loss, equal=same)
            losses[name] += loss
            for base in equal:
                equal[base][name] += same[base]
    tokens = sum(len(text) for text in texts)
    return {
        "tokens": tokens,
        "perplexity": {name: math.exp(losses[name] / (tokens - len(texts))) for name in types},
        "equal_greedy": {
            base: {name: count / tokens for name, count in counts.items()}
            for base, counts in equal.items()
        },
    }


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    parser = flags("quantization", "Accuracy of int8 and int4 weights.")
    parser.add_argument("--model", type=Path, default=EMBEDDED / "target", help="checkpoint")
    plain = ["float32", "bfloat16"]
    parser.add_argument(
        "--types", nargs="+", choices=plain, default=plain, help="what they are held against"
    )
    parser.add_argument("--data", type=Path, default=OWN_QUESTIONS, help="GSM8K rows, .jsonl")
    parser.add_argument("--texts", type=positive, help="of --data (default 200, quick 20)")
    options = parser.parse_args(arguments)
    run = Run("quantization", options, arguments)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    count = options.texts or (20 if options.quick else 200)
    texts = read_texts(options.data, Tokenizer(options.model, vocabulary), count)
    types = [*options.types, "int8", *(["int4"] if has_int4() else [])]
    figures = measure_accuracy(run, options.model, types, texts)
    run.finish(1, data=options.data.name, **figures)


if __name__ == "__main__":
    main()
