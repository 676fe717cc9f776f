"""Token bytes from tokenizer files, against the tokenizers library's decoder."""

import pickle
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from overlap_spec.errors import CheckpointError
from overlap_spec.grammar import Grammar, Vocabulary
from overlap_spec.grammar.backends.xgrammar import XGrammarBackend
from overlap_spec.grammar.reasoning import matcher as reasoning_matcher

TEXT = ['{"name": "Zoë", "tags": ["a b", "世界"]}\n\tdef x(): pass  # naïve café', "🙂 hi 12"]


def save(tokenizer: Tokenizer, path: Path) -> Path:
    tokenizer.add_special_tokens([AddedToken("<stop>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def joined(vocabulary: Vocabulary, tokenizer: Tokenizer, text: str) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return b"".join(vocabulary.text[i] for i in ids).decode()


def test_byte_level(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    path = save(tokenizer, tmp_path)
    stop, tool = tokenizer.token_to_id("<stop>"), tokenizer.token_to_id("<tool>")
    size = tokenizer.get_vocab_size() + 5
    vocabulary = Vocabulary.from_tokenizer_json(path, size, [stop])
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary.text)
    for text in TEXT:
        assert joined(vocabulary, tokenizer, text) == text
    assert vocabulary.text[stop] == b""
    assert vocabulary.text[tool] == b"<tool>"
    assert vocabulary.text[-5:] == (b"",) * 5


def test_byte_fallback(tmp_path: Path) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁a▁b"]
    merges = [("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    path = save(tokenizer, tmp_path)
    stop = tokenizer.token_to_id("<stop>")
    vocabulary = Vocabulary.from_tokenizer_json(path, tokenizer.get_vocab_size(), [stop])
    assert vocabulary.text[0] == b""
    assert vocabulary.text[1 + 0x0A] == b"\n"
    assert vocabulary.text[1 + 0xE9] == b"\xe9"
    assert vocabulary.text[pieces.index("▁a▁b")] == b" a b"
    assert joined(vocabulary, tokenizer, "▁aé\n") == " aé\n"


def with_markers(path: Path, contents: list[str]) -> tuple[Path, Tokenizer]:
    """Single bytes and these special tokens; the first two end the output."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in contents])
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json", tokenizer


CONTENTS = ["<eos>", "<eot>", "</think>", "[TOOL_CALLS]", "<tool_call>", "<pad>", "<mine>"]


def test_special_tokens_that_are_markers_are_text(tmp_path: Path) -> None:
    path, tokenizer = with_markers(tmp_path, CONTENTS)
    eos, eot, think, calls, tool, pad, mine = map(tokenizer.token_to_id, CONTENTS)
    vocabulary = Vocabulary.from_tokenizer_json(path, 300, [eos, eot])
    assert vocabulary.text[think] == b"</think>"
    assert vocabulary.text[calls] == b"[TOOL_CALLS]"
    assert vocabulary.text[tool] == b"<tool_call>"
    assert {vocabulary.text[i] for i in (eos, eot, pad, mine)} == {b""}
    own = Vocabulary.from_tokenizer_json(path, 300, [eos, eot], markers=["<mine>", "<eos>"])
    assert own.text[mine] == b"<mine>"
    assert {own.text[i] for i in (eos, think, calls, tool)} == {b""}
    none = Vocabulary.from_tokenizer_json(path, 300, [eos, eot], markers=())
    assert len({vocabulary, own, none}) == 3


def test_a_marker_is_written_as_its_one_token(tmp_path: Path) -> None:
    path, tokenizer = with_markers(tmp_path, CONTENTS)
    eos, eot, think, calls, _, pad, _ = map(tokenizer.token_to_id, CONTENTS)
    backend = XGrammarBackend(Vocabulary.from_tokenizer_json(path, 300, [eos, eot]))
    tools = [{"type": "function", "function": {"name": "now"}}]
    grammar = Grammar.tools(tools, format="mistral_v11").after_thinking()
    assert grammar.inner is not None
    compiled = reasoning_matcher.wrap(backend.compile(grammar.inner), grammar)
    spelled = [*encode(tokenizer, "Hm."), think, *encode(tokenizer, "\nSo "), calls]
    matcher = compiled.matcher()
    assert all(map(matcher.accept, [*spelled, *encode(tokenizer, "now[ARGS]{}")]))
    assert matcher.is_complete
    assert not matcher.accept(pad)
    assert matcher.accept(eot)
    matcher = compiled.matcher()
    assert all(map(matcher.accept, spelled))
    assert not matcher.accept(think)
    assert not matcher.accept(eos)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_what_is_no_such_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointError, match="not a readable"):
        Vocabulary.from_tokenizer_json(path, 10, [1])
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(CheckpointError, match="neither byte-level nor byte-fallback"):
        Vocabulary.from_tokenizer_json(path, 10, [1])


def test_fingerprints_tell_vocabularies_apart() -> None:
    base = Vocabulary((b"a", b"b", b""), 4, (2,))
    assert base == Vocabulary((b"a", b"b", b"stop"), 4, (2,))
    others = [
        Vocabulary((b"a", b"c", b""), 4, (2,)),
        Vocabulary((b"a", b"b", b""), 5, (2,)),
        Vocabulary((b"a", b"b", b""), 4, (3,)),
        Vocabulary((b"a", b"b", b""), 4, (2,), frozenset({0})),
        Vocabulary((b"ab", b"", b""), 4, (2,)),
    ]
    assert len({base, *others}) == 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((b"a",), 2, ()), "stop token"),
        (((b"a", b"b"), 1, (0,)), "do not fit"),
        (((b"a",), 2, (2,)), "outside"),
    ],
)
def test_broken_vocabularies_are_refused(args, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(*args)


def test_pickled_without_what_is_cached() -> None:
    """Another thread may fill a cached row while the vocabulary is sent to a worker."""
    vocabulary = Vocabulary((b"a", b"", b"<s>"), 40, (1,), frozenset({2}))
    bare = pickle.dumps(vocabulary)
    _ = vocabulary.text_row, vocabulary.stop_row, vocabulary.fingerprint
    assert pickle.dumps(vocabulary) == bare
    assert pickle.loads(bare) == vocabulary
