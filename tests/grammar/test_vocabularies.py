"""Vocabularies of other libraries' tokenizers: each token's bytes, and what is no text."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import overlap_spec
from overlap_spec.errors import CheckpointError
from overlap_spec.grammar import Vocabulary
from tests.support.llama_cpp import CONTROL, Llama

FILE = Path(overlap_spec.__file__).parent / "embedded" / "target" / "tokenizer.json"
TEXT = 'caffè {"n": 12}\n'


def test_of_tokenizers_as_of_its_file() -> None:
    tokenizer = Tokenizer.from_file(str(FILE))
    known = Vocabulary.from_tokenizer_json(FILE, 2048, [1])
    assert Vocabulary.of(tokenizer, stop_ids=1) == known
    assert Vocabulary.of(tokenizer, size=2100, stop_ids=[1]).text == (*known.text, *[b""] * 52)
    with pytest.raises(ValueError, match="pass stop_ids"):
        Vocabulary.of(tokenizer)


def test_of_transformers_as_of_its_file() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FILE.parent)
    assert Vocabulary.of(tokenizer) == Vocabulary.from_tokenizer_json(FILE, 2048, [1])
    small = Vocabulary.of(tokenizer, size=300, stop_ids=[2], markers=())
    assert small == Vocabulary.from_tokenizer_json(FILE, 300, [2], markers=())


def test_of_a_processor_as_of_its_tokenizer() -> None:
    class Processor:
        __module__ = "transformers.processing_utils"
        tokenizer = AutoTokenizer.from_pretrained(FILE.parent)

    assert Vocabulary.of(Processor()) == Vocabulary.of(Processor.tokenizer)


def test_of_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        __module__ = "transformers.tokenization_python"

    with pytest.raises(CheckpointError, match="load a fast tokenizer"):
        Vocabulary.of(Slow())


def test_of_llama_cpp() -> None:
    vocabulary = Vocabulary.of(Llama())
    shown = b"", b"", CONTROL[2].encode()
    assert vocabulary.text == (*shown, *(bytes([byte]) for byte in range(256)))
    assert vocabulary.stop_ids == (1,)
    assert Vocabulary.of(Llama(), markers=()).text[2] == b""


def test_another_librarys_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a pathlib\.\w+ is no tokenizer of .*tiktoken"):
        Vocabulary.of(FILE)


def test_of_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ca": 256, b"12": 257}
    special = {"<|endoftext|>": 260, "<|fim|>": 261, "<tool_call>": 262}
    settings = {"mergeable_ranks": ranks, "special_tokens": special}
    encoding = tiktoken.Encoding("own", pat_str="(?s).+", **settings)
    vocabulary = Vocabulary.of(encoding)
    assert vocabulary.text[256:] == (b"ca", b"12", b"", b"", b"", b"", b"<tool_call>")
    assert vocabulary.stop_ids == (260,)
    assert read_back(vocabulary, encoding.encode(TEXT)) == TEXT.encode()


def test_of_mistral_common_with_tekken(tmp_path: Path) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"]
    special = [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(names)]
    texts = [*(bytes([byte]) for byte in range(256)), b"ca", b"12"]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(text).decode(), "token_str": None}
        for i, text in enumerate(texts)
    ]
    config = {
        "pattern": "(?s).+",
        "num_vocab_tokens": len(texts),
        "default_vocab_size": len(texts) + 20,
        "default_num_special_tokens": 20,
        "version": "v3",
    }
    spec = {"config": config, "vocab": vocab, "special_tokens": special, "version": 1, "type": "x"}
    (tmp_path / "tekken.json").write_text(json.dumps(spec))
    tokenizer = tekken.Tekkenizer.from_file(tmp_path / "tekken.json")
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.text[20:] == tuple(texts)
    assert vocabulary.text[5] == b"[TOOL_CALLS]"
    assert not any(vocabulary.text[i] for i in range(20) if i != 5)
    assert vocabulary.stop_ids == (2,)
    assert read_back(vocabulary, tokenizer.encode(TEXT, False, False)) == TEXT.encode()

    class Whole:
        __module__ = "mistral_common.tokens.tokenizers.mistral"

        class instruct_tokenizer:  # noqa: N801, as the library has it
            pass

    Whole.instruct_tokenizer.tokenizer = tokenizer  # type: ignore[attr-defined]
    assert Vocabulary.of(Whole()) == vocabulary


def test_of_sentencepiece() -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a cat has 12 hats", "the hat"] * 20),
        model_writer=file,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<sep>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    vocabulary = Vocabulary.of(processor)
    assert vocabulary.stop_ids == (processor.eos_id(),)
    assert vocabulary.text[processor.bos_id()] == b""
    assert vocabulary.text[processor.unk_id()] == b""
    assert b"<sep>" in vocabulary.text
    text = "a cat hats é 12"
    assert read_back(vocabulary, processor.encode(text)) == b" " + text.encode()


def read_back(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.text[token] for token in tokens)
