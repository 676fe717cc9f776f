"""GGUF files against the package's own dequantiser, the same weights from safetensors, and the
tokenizers that they were made of."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, trainers

from overlap_spec.config import EMBEDDED
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.gguf.file import LINK, describe, grids, stored, unpack
from overlap_spec.gguf.tokenizer import tokenizer_files
from overlap_spec.models.config import RopeConfig, read_rope
from overlap_spec.models.dequantize import Grid
from overlap_spec.models.rope import inverse_frequencies
from overlap_spec.models.tensors import grid_names, read_tensors
from overlap_spec.models.weights import load_decoder
from overlap_spec.tokenizer import Tokenizer
from tests.support.models import Cache, reference

gguf = pytest.importorskip("gguf")

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
TEXTS = (
    "Hello, world!", " two  spaces", "line\n\nend\t", "3.14159 and 12345678", "it's we'LL don't",
    "Grüße, naïve café", "日本語のテキスト", "🙂🙃", "", "a", "{\"key\": [1, -2.5e3, null]}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(
    path: Path,
    architecture: str = "llama",
    tensors: Sequence[tuple[str, np.ndarray, str]] = (),
    more: Callable[[Any], None] = lambda _: None,
) -> Path:
    """A small file: a shape, a tokenizer of eight tokens, and these tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(48)
    writer.add_block_count(3)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "c", "ab", "abc", "Ġ", "<|end|>", "!"])
    writer.add_token_types([1, 1, 1, 1, 1, 1, 3, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(6)
    more(writer)
    for name, values, kind in tensors:
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def blocks(kind: str, rows: int, width: int) -> np.ndarray:
    """Random bytes of a type that the package cannot write, with scales that are finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(3).integers(0, 256, (rows, width // block, size), np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (size - 2,)}[kind]
    for at in scales:
        raw[..., at : at + 2] = np.full((rows, width // block), 0.03, np.float16)[..., None].view(
            np.uint8
        )
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_what_the_package_says(kind: str, tmp_path: Path) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    width = 512
    if kind in ("Q4_K", "Q6_K"):
        raw = blocks(kind, 4, width)
    else:
        raw = gguf.quants.quantize(random(4, width), quantised)

    def add(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=quantised)

    words = [("token_embd.weight", random(8, width), "F32")]
    path = unpack(write(tmp_path / "one.gguf", tensors=words, more=add)) / LINK
    found = {name: (read, list(shape)) for name, read, shape in stored(path)}
    name = "model.layers.0.mlp.up_proj.weight"
    assert found.keys() == {"model.embed_tokens.weight", name}
    read, shape = found[name]
    assert shape == [4, width]
    want = torch.from_numpy(gguf.quants.dequantize(raw, quantised)).reshape(4, width)
    assert torch.isfinite(want).all()
    assert torch.equal(read().float(), want)
    if kind == "Q4_0":
        ((groups, grid),) = grids(path).values()
        assert groups == width // 32
        assert torch.equal(Grid(*grid()).weight(), want)
    else:
        assert not grids(path)


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def convert(folder: Path, path: Path, architecture: str) -> Path:
    """A small checkpoint of ``transformers`` in GGUF's names; Llama's in its order of rows."""
    hf = json.loads((folder / "config.json").read_text())

    def add(writer: Any) -> None:
        if "head_dim" in hf:
            writer.add_key_length(hf["head_dim"])
        if hf["rope_parameters"]["rope_type"] == "llama3":
            slowed = inverse_frequencies(read_rope(hf), 8, None)[0]
            factors = inverse_frequencies(RopeConfig(1e4), 8, None)[0] / slowed
            writer.add_tensor("rope_freqs.weight", factors.numpy())
        for name, tensor in read_tensors(folder):
            stem, _, kind = name.rpartition(".")
            if stem.startswith("model.layers."):
                _, _, layer, part = stem.split(".", 3)
                own = f"blk.{layer}.{NAMES[part]}.{kind}"
            else:
                own = f"{NAMES[stem]}.{kind}"
            heads = {"attn_q": 6, "attn_k": 2}.get(own.split(".")[-2])
            if architecture == "llama" and heads:
                halves = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2)
                tensor = halves.reshape(tensor.shape)
            writer.add_tensor(own, tensor.float().numpy())

    return write(path, architecture, more=add)


@pytest.mark.parametrize(
    ("case", "architecture"),
    [("llama", "llama"), ("llama-3.1", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
@torch.no_grad()
def test_logits_are_those_of_the_same_weights(case: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    reference(case, tmp_path / "plain")
    folder = unpack(convert(tmp_path / "plain", tmp_path / "one.gguf", architecture))
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(5))
    both = []
    for path in (tmp_path / "plain", folder):
        decoder = load_decoder(path, torch.float32, torch.device("cpu"))
        both.append(Cache(decoder, 64).run(tokens, 0))
    torch.testing.assert_close(*both, atol=1e-4 if case == "llama-3.1" else 0.0, rtol=0.0)


def test_a_files_folder_is_made_once_and_again_for_another_file(tmp_path: Path) -> None:
    one = [("token_embd.weight", random(8, 48), "F32")]
    path = write(tmp_path / "one.gguf", tensors=one)
    folder = unpack(path)
    assert unpack(path) == folder
    assert (folder / LINK).resolve() == path
    path.unlink()
    write(path, tensors=[*one, ("output.weight", random(8, 48, seed=1), "F32")])
    assert unpack(path) != folder


def test_the_package_reads_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds where the vocabulary is large."""
    path = write(tmp_path / "one.gguf", tensors=[("token_embd.weight", random(8, 48), "F32")])
    folder = unpack(path)
    monkeypatch.setattr(gguf, "GGUFReader", lambda _: pytest.fail("the file is read again"))
    assert unpack(path) == folder
    assert grid_names(folder) == {}
    ((name, tensor),) = read_tensors(folder)
    assert name == "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensor.numpy(), random(8, 48))


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", tensors=[("token_embd.weight", random(8, 48), "F32")])
    folder = unpack(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"one\.gguf ends within model\.embed_tokens"):
        dict(read_tensors(folder))


def test_q4_0_keeps_its_codes(tmp_path: Path) -> None:
    """With the rows of queries in the published order, as weights have them."""
    matrix = random(96, 96)
    path = write(
        tmp_path / "one.gguf",
        tensors=[
            ("token_embd.weight", random(8, 96), "F32"),
            ("blk.0.attn_q.weight", matrix, "Q4_0"),
        ],
    )
    folder = unpack(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert grid_names(folder) == {name: 3}
    whole = dict(read_tensors(folder))[name]
    parts = dict(read_tensors(folder, [name]))
    grid = Grid(*(parts[name.removesuffix("weight") + part] for part in Grid._fields))
    assert torch.equal(grid.weight(), whole)
    kind = gguf.GGMLQuantizationType.Q4_0
    as_written = gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind)
    # Six heads of 16 channels: channel 2 i + j of the file is channel j 8 + i.
    assert torch.equal(whole[8], torch.from_numpy(as_written[1]))


# Tokenizers


def encodings(spec: dict[str, Any], special: bool = True) -> list[list[int]]:
    fast = Fast.from_str(json.dumps(spec))
    return [fast.encode(text, add_special_tokens=special).ids for text in TEXTS]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary and its merges."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    fast.train_from_iterator([*TEXTS, "it's what we'LL do in 1234 naïve days\n\n"] * 20, trainer)
    spec = json.loads(fast.to_str())["model"]
    return spec["vocab"], [tuple(pair) for pair in spec["merges"]]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_a_byte_level_tokenizer_comes_from_the_file(pre: str, tmp_path: Path) -> None:
    """Against those of ``transformers``; Llama 3's has its cuts in words of its own file."""
    vocab, merges = trained()
    end = "<|endoftext|>"
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*sorted(vocab, key=vocab.__getitem__), end],
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": len(vocab),
    }
    spec = tokenizer_files(tmp_path, meta)["tokenizer.json"]
    own = Fast.from_str(json.dumps(spec))
    for text in TEXTS:
        assert own.decode(own.encode(text).ids) == text
    assert own.encode(f"a{end}").ids[-1] == len(vocab)
    if pre == "llama-bpe":
        cuts = [piece for piece, _ in own.pre_tokenizer.pre_tokenize_str("12345 don't\n\n")]
        assert cuts == ["123", "45", "Ġdon", "'t", "ĊĊ"]
        return
    transformers = pytest.importorskip("transformers")
    kind = {"gpt-2": "GPT2TokenizerFast", "qwen2": "Qwen2TokenizerFast"}[pre]
    wanted = getattr(transformers, kind)(vocab={**vocab, end: len(vocab)}, merges=merges)
    for text in TEXTS:
        assert own.encode(text).ids == wanted(text).input_ids, text


def test_an_engine_reads_the_file(tmp_path: Path) -> None:
    """The same tokens from the same prompt's ids, and the template and stop tokens of the file."""
    from bench.backends.gguf_file import write_gguf

    source, path = EMBEDDED / "target", tmp_path / "embedded.gguf"
    write_gguf(source, path, torch.float32)
    size = describe(path, gguf.GGUFReader(path))["vocab_size"]
    own, wanted = Tokenizer(unpack(path), size), Tokenizer(source, size)
    assert own.eos_ids == wanted.eos_ids
    assert own.vocabulary.text == wanted.vocabulary.text
    prompt = wanted.encode("Repeat: one two three")
    said = []
    for model in (path, source):
        with Engine(model=str(model), dtype="float32", device="cpu") as engine:
            said.append(engine.generate(prompt, max_tokens=12, temperature=0.0).token_ids)
    assert said[0] == said[1]


def test_scores_make_sentencepieces_merges(tmp_path: Path) -> None:
    """Against the same pieces in SentencePiece's own program."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["the cat sat on the mat", "a cat and a hat that sat"] * 40))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=300, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    kinds = [
        2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1
        for n in range(len(model))
    ]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in range(len(model))],
        "tokenizer.ggml.scores": [model.get_score(n) for n in range(len(model))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    files = tokenizer_files(tmp_path, meta)
    assert files["tokenizer_config.json"]["chat_template"] == "{{ messages[0]['content'] }}"
    wanted = [[1, *model.encode(each)] for each in TEXTS]
    assert encodings(files["tokenizer.json"]) == wanted
    fast = Fast.from_str(json.dumps(files["tokenizer.json"]))
    assert fast.decode(model.encode("the cat 🙂")) == "the cat 🙂"


# What is refused


def test_a_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", tensors=[("token_embd.weight", random(8, 48), "F32")])
    for size in (10, 300, path.stat().st_size - 100):
        cut = tmp_path / f"cut-{size}.gguf"
        cut.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=rf"cut-{size}\.gguf is no whole GGUF file"):
            unpack(cut)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    embedding = ("token_embd.weight", random(8, 64), "F32")
    one = write(tmp_path / "a.gguf", "mamba", [embedding])
    with pytest.raises(CheckpointError, match=r"a\.gguf: GGUF architecture 'mamba'.*llama, qwen2"):
        unpack(one)
    other = write(
        tmp_path / "b.gguf", tensors=[embedding, ("blk.0.ffn_up.weight", random(4, 64), "Q5_0")]
    )
    with pytest.raises(
        CheckpointError, match=r"b\.gguf: blk\.0\.ffn_up\.weight has GGUF type Q5_0"
    ):
        unpack(other)
    third = write(
        tmp_path / "c.gguf", tensors=[embedding, ("blk.0.odd.weight", random(4, 64), "F32")]
    )
    with pytest.raises(
        CheckpointError, match=r"no layer takes the GGUF tensor blk\.0\.odd\.weight"
    ):
        unpack(third)
    part = write(
        tmp_path / "d.gguf", tensors=[embedding], more=lambda w: w.add_uint16("split.count", 3)
    )
    with pytest.raises(CheckpointError, match=r"d\.gguf is one of 3 GGUF files of a model"):
        unpack(part)
    with pytest.raises(CheckpointError, match=r"GGUF pre-tokenizer 'deepseek-coder'"):
        tokenizer_files(
            one,
            {
                "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "deepseek-coder",
                "tokenizer.ggml.tokens": ["a"],
            },
        )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"GGUF tokenizer 'bert' is not read"):
        tokenizer_files(one, {"tokenizer.ggml.model": "bert"})
