"""A byte-level BPE with tokens added that no text encodes to."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from overlap_spec.errors import CheckpointError
from overlap_spec.models.config import read_json

SIDE_FILES = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip


def word(rng: random.Random) -> str:
    """A made-up word or fragment of one of the scripts that large vocabularies hold."""
    script = rng.random()
    if script < 0.72:
        starts, ends = "b c d f g h l m n p r s t v w ch st tr pr sh", "a e i o u ar en er in on al"
        body = "".join(
            rng.choice(starts.split()) + rng.choice(ends.split())
            for _ in range(rng.choice((1, 1, 2, 2, 2, 3)))
        ) + rng.choice(("", "", "s", "ed", "ing", "tion", "ly", "able"))
        form = rng.random()
        shaped = body.capitalize() if form < 0.25 else body.upper() if form < 0.3 else body
        glue = rng.random()
        return f" {shaped}" if glue < 0.55 else f"_{shaped}" if glue < 0.6 else shaped
    ranges = ((0xE0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A),
              (0x905, 0x939), (0x3041, 0x3096), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),
              (0x1F600, 0x1F64F))  # fmt: skip
    low, high = rng.choice(ranges)
    body = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4)))
    return f" {body}" if rng.random() < 0.4 else body


def pieces(seed: int) -> Iterator[bytes]:
    """Endless plausible token texts: JSON punctuation, numbers, indents, words, cut UTF-8."""
    marks = ('"', ":", ",", "{", "}", "[", "]", " ", "\n", "\\", "'", "(", ")", ".", "-", "/")
    for first in marks:
        for second in marks:
            yield (first + second).encode()
            yield from ((first + second + third).encode() for third in marks[:8])
    yield from (f"{number:0{width}}".encode() for width in (2, 3) for number in range(10**width))
    yield from (b" " * count for count in range(2, 65))
    yield from (b"\n" + b" " * count for count in range(1, 33))
    rng = random.Random(seed)
    while True:
        text = word(rng).encode()
        # Byte-level vocabularies also hold characters cut in the middle.
        yield text[: rng.randint(2, len(text))] if rng.random() < 0.03 and len(text) > 2 else text


def pad_tokenizer(source: Path, out: Path, old: int, new: int, seed: int) -> None:
    """Copy a byte-level BPE with tokens ``old`` to ``new - 1`` added, which no text encodes to.

    They have no merges, at least two bytes, and texts that no other token has.

    Raises:
        CheckpointError: no ``tokenizer.json``, or a kind for which this does not hold.
    """
    spec = read_json(source / "tokenizer.json")
    model = spec.get("model") or {}
    byte_level = '"ByteLevel"' in json.dumps(spec.get("decoder"))
    if model.get("type") != "BPE" or not byte_level or model.get("ignore_merges"):
        raise CheckpointError(
            f"{source}/tokenizer.json: only byte-level BPE without ignore_merges can be padded"
        )
    vocab: dict[str, int] = model["vocab"]
    # An added token that is not in the vocabulary would be numbered after it.
    for added in spec.get("added_tokens") or []:
        vocab.setdefault(added["content"], added["id"])
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(256, 512))
    letters = [chr(byte if byte in kept else next(stand_ins)) for byte in range(256)]
    source_of_text = pieces(seed)
    for token in range(old, new):
        text = next(source_of_text)
        while len(text) < 2 or "".join(letters[byte] for byte in text) in vocab:
            text = next(source_of_text)
        vocab["".join(letters[byte] for byte in text)] = token
    (out / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
