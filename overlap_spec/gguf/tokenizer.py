"""The tokenizer of a GGUF file as the files of a Hugging Face checkpoint.

``gpt2`` is byte-level BPE, whose pre-tokenizer has a name of llama.cpp's; ``llama`` is
SentencePiece's BPE, whose merges follow from the scores: of the neighbours that are a token
together, those of the best score are merged first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_spec.errors import CheckpointError

KEY = "tokenizer.ggml"
# GGUF's kinds of tokens.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
# How text is cut before merges, by llama.cpp's name: words with the mark before them, numbers of so
# many digits, marks, ends of lines, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": WORDS % "{1,3}",
    "qwen2": WORDS % "",
}
# Of SentencePiece's text a space.
SPACE = "\u2581"


def tokenizer_files(file: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` and ``tokenizer_config.json``, from a GGUF file's key-value pairs.

    Raises:
        CheckpointError: a key is missing, or a kind of tokenizer is not read; names it.
    """
    model = meta.get(f"{KEY}.model")
    makers = {"gpt2": _bytes, "llama": _pieces}
    if model not in makers:
        raise CheckpointError(
            f"{file}: GGUF tokenizer {model!r} is not read; read are {', '.join(makers)}"
        )
    texts = meta.get(f"{KEY}.tokens")
    if not texts:
        raise CheckpointError(f"{file}: the GGUF file has no {KEY}.tokens")
    kinds = meta.get(f"{KEY}.token_type") or [1] * len(texts)
    named = {
        name: texts[meta[f"{KEY}.{key}_token_id"]]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        if f"{KEY}.{key}_token_id" in meta
    }
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(texts, kinds)),
        "post_processor": _bounds(meta, named, texts),
        **makers[model](file, meta, texts, kinds),
    }
    config: dict[str, Any] = dict(named)
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": spec, "tokenizer_config.json": config}


def _added(texts: Sequence[str], kinds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for token, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": token, "content": text, "special": kind != USER_DEFINED, **flags}


def _bounds(
    meta: Mapping[str, Any], named: Mapping[str, str], texts: Sequence[str]
) -> dict[str, Any] | None:
    """What is put before and behind a text whose special tokens are asked for."""
    before = [named["bos_token"]] if meta.get(f"{KEY}.add_bos_token") else []
    behind = [named["eos_token"]] if meta.get(f"{KEY}.add_eos_token") else []
    if not before and not behind:
        return None

    def template(*letters: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, letter in enumerate(letters):
            sides = [[{"SpecialToken": {"id": t, "type_id": number}} for t in side]
                     for side in (before, behind)]  # fmt: skip
            text = {"Sequence": {"id": letter, "type_id": number}}
            found += [*sides[0], text, *sides[1]]
        return found

    special = {t: {"id": t, "ids": [texts.index(t)], "tokens": [t]} for t in (*before, *behind)}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _bytes(
    file: Path,
    meta: Mapping[str, Any],
    texts: Sequence[str],
    kinds: Sequence[int],  # noqa: ARG001
) -> dict[str, Any]:
    name = meta.get(f"{KEY}.pre", "default")
    if name not in PATTERNS:
        raise CheckpointError(
            f"{file}: GGUF pre-tokenizer {name!r} ({KEY}.pre) is not read; read are "
            f"{', '.join(PATTERNS)}"
        )
    pattern = PATTERNS[name]
    to_bytes = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
        "use_regex": pattern is None,
    }  # fmt: skip
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = [to_bytes] if pattern is None else [cut, to_bytes]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                    "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": name == "llama-bpe",
            "vocab": {text: token for token, text in enumerate(texts)},
            "merges": [pair.split(" ") for pair in meta.get(f"{KEY}.merges") or []],
        },
    }  # fmt: skip


def _pieces(
    file: Path, meta: Mapping[str, Any], texts: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    scores = meta.get(f"{KEY}.scores")
    if scores is None or len(scores) != len(texts):
        raise CheckpointError(f"{file}: the GGUF file has no {KEY}.scores, one a token")
    vocab = {text: token for token, text in enumerate(texts)}
    merges: list[tuple[float, int, int, int]] = []
    for token, text in enumerate(texts):
        for at in range(1, len(text)):
            left, right = vocab.get(text[:at]), vocab.get(text[at:])
            if left is not None and right is not None and kinds[token] == 1:
                merges.append((-scores[token], token, left, right))
    unknown = next((t for t, kind in zip(texts, kinds, strict=True) if kind == UNKNOWN), None)
    prefix = meta.get(f"{KEY}.add_space_prefix", True)
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
            "merges": [[texts[left], texts[right]] for _, _, left, right in sorted(merges)],
        },
    }  # fmt: skip
