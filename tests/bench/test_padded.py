"""Padding a checkpoint: other sizes, same function, here and in `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import padded
from bench.padded import CONSTANT, PRESETS, Sizes, grow, like, pad
from overlap_spec.config import EMBEDDED
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.kernels import KeySpan, rotate_and_store, tree_attention
from overlap_spec.models.config import ModelConfig, read_config
from overlap_spec.models.decoder import Decoder, Heads
from overlap_spec.models.weights import load_decoder
from overlap_spec.tokenizer import Tokenizer
from tests.support.checkpoints import SHAPE, write_head, write_target
from tests.support.tiers import few

CPU = torch.device("cpu")
VOCAB = SHAPE["vocab_size"]
CASES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "vocabulary": (Sizes(vocab=1003), {}),
    "vocabulary-tied": (Sizes(vocab=1003), {"tie_word_embeddings": True}),
    "width-exact": (Sizes(hidden=128), {}),
    "width-odd": (Sizes(vocab=777, hidden=72), {}),
    "depth": (Sizes(layers=7), {}),
    "inner": (Sizes(intermediate=131), {}),
    "more-heads": (Sizes(hidden=64, heads=16, kv_heads=4), {}),
    "larger-groups": (Sizes(heads=8, kv_heads=2), {}),
    "all": (Sizes(1500, 96, 6, 100, 12, 6), {"tie_word_embeddings": True}),
}


def attention(config: ModelConfig, tokens: int) -> Any:
    """Causal attention of one fresh sequence of ``tokens``."""
    cache = torch.zeros(2, config.num_layers, 1, tokens, config.num_kv_heads, config.head_dim)
    span = KeySpan(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long),
                   torch.arange(tokens))  # fmt: skip

    def attend(layer: int, heads: Heads) -> Tensor:
        k, v = cache[:, layer]
        q = rotate_and_store(heads.qkv, heads.rotary, k, v, torch.arange(tokens), heads.norm)
        return tree_attention(q, k, v, span)

    return attend


@torch.no_grad()
def run(model: Decoder, tokens: Tensor, layers: tuple[int, ...] = ()) -> tuple[Tensor, Any]:
    positions = torch.arange(len(tokens))
    hidden, features = model(tokens, positions, attention(model.config, len(tokens)), layers)
    return model.logits(hidden), features


def prompt() -> Tensor:
    return torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(9))


@pytest.mark.ci
@pytest.mark.parametrize("case", few(CASES, "all", "larger-groups"))
@torch.no_grad()
def test_the_function_stays_the_same(case: str, tmp_path: Path) -> None:
    """Logits of real tokens equal within float32 rounding, new ones far below; features exact;
    our loader and `transformers`."""
    from transformers import AutoModelForCausalLM

    sizes, changes = CASES[case]
    write_target(tmp_path / "source", **changes)
    pad(tmp_path / "source", None, tmp_path, sizes)
    source = load_decoder(tmp_path / "source", torch.float32, CPU)
    target = load_decoder(tmp_path / "target", torch.float32, CPU)
    for name, size in zip(
        ("vocab_size", "hidden_size", "num_layers", "intermediate_size", "num_heads",
         "num_kv_heads"),
        (sizes.vocab, sizes.hidden, sizes.layers, sizes.intermediate, sizes.heads,
         sizes.kv_heads),
        strict=True,
    ):  # fmt: skip
        assert size in (None, getattr(target.config, name))
    want, features = run(source, prompt(), (0, 1, 3))
    got, wide = run(target, prompt(), (0, 1, 3))
    torch.testing.assert_close(got[:, :VOCAB], want, atol=1e-4, rtol=1e-4)
    assert bool((got[:, VOCAB:] < want.min() - 5000).all())
    assert float(got.softmax(-1)[:, VOCAB:].sum()) == 0
    wide = wide.view(len(wide), 3, -1)
    channels = source.config.hidden_size
    torch.testing.assert_close(wide[..., :channels].flatten(1), features, atol=1e-4, rtol=1e-4)
    constant = CONSTANT if sizes.vocab else 0.0
    assert bool((wide[..., channels : channels + 1] == constant).all())
    assert bool((wide[..., channels + 1 :] == 0).all())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    theirs = model(prompt()[None]).logits[0]
    torch.testing.assert_close(theirs[:, :VOCAB], want, atol=2e-4, rtol=1e-4)
    if sizes.vocab:
        assert float(theirs[:, VOCAB:].max()) < float(want.min()) - 5000


def texts(target: Path, draft: Path | None, **settings: Any) -> list[tuple[Any, ...]]:
    with Engine(
        str(target), draft=str(draft) if draft else None, algorithm="eagle3" if draft else "none",
        dtype="float32", device="cpu", adaptive="static", mask_deadline_ms=None, **settings,
    ) as engine:  # fmt: skip
        prompts = ["hello there", "a b c", '{"name":"x"}']
        outputs = engine.generate(
            prompts,
            [None, Grammar.json_object(), Grammar.regex(r'"[a-z ]{4,30}":[0-9]+')],
            {"temperature": 0, "max_tokens": 40},
            raw=True,
        )
    assert [o.error for o in outputs] == [None] * 3
    assert all(o.token_ids for o in outputs)
    return [
        (o.token_ids, o.text, o.stats.verifies, o.stats.drafted_tokens, o.stats.accepted_drafts)
        for o in outputs
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes", [Sizes(vocab=2000), Sizes(3000, 128, 5, 96, 8, 4)], ids=["vocabulary", "all"]
)
@pytest.mark.parametrize("topk", [1, 3])
def test_text_and_acceptance_stay_the_same(sizes: Sizes, topk: int, tmp_path: Path) -> None:
    write_target(tmp_path / "source", scale=1.0)
    write_head(tmp_path / "head", layers=(-1, 0, 2))
    pad(tmp_path / "source", tmp_path / "head", tmp_path, sizes)
    settings = {"num_steps": 3, "eagle_topk": topk}
    want = texts(tmp_path / "source", tmp_path / "head", **settings)
    assert texts(tmp_path / "target", tmp_path / "eagle3", **settings) == want
    plain = texts(tmp_path / "target", None)
    assert [row[0] for row in plain] == [row[0] for row in want]


def test_tokenizer_encodes_as_before(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_target(tmp_path / "source")
    pad(tmp_path / "source", None, tmp_path, Sizes(vocab=9001))
    old, new = Tokenizer(tmp_path / "source", VOCAB), Tokenizer(tmp_path / "target", 9001)
    pieces = new.vocabulary.text
    assert len(set(pieces[VOCAB:])) == 9001 - VOCAB
    assert min(map(len, pieces[VOCAB:])) >= 2
    assert {b'":', b'","', b"007", b"  "} <= set(pieces)
    assert new.vocabulary.special_ids == old.vocabulary.special_ids
    everything = b"".join(pieces[VOCAB:]).decode(errors="replace")
    for text in ('{"a": [1, 23], "b": "héllo wörld"}\n  <user>', everything):
        assert new.encode(text) == old.encode(text)
        assert max(new.encode(text)) < VOCAB
    assert new.chat([{"role": "user", "content": "hi"}]) == old.chat(
        [{"role": "user", "content": "hi"}]
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert theirs.encode(everything, add_special_tokens=False) == new.encode(everything)


def test_shards_and_repeatability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "source")
    sizes = Sizes(2000, 64, 5)
    pad(tmp_path / "source", None, tmp_path / "a", sizes)
    monkeypatch.setattr(padded, "SHARD_BYTES", 200_000)
    pad(tmp_path / "source", None, tmp_path / "b", sizes)
    whole = load_file(tmp_path / "a/target/model.safetensors")
    shards = sorted((tmp_path / "b/target").glob("*.safetensors"))
    assert len(shards) > 3
    parts = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    first, second = (load_decoder(tmp_path / x / "target", torch.float32, CPU) for x in "ab")
    assert torch.equal(run(first, prompt())[0], run(second, prompt())[0])
    texts_a, texts_b = ((tmp_path / x / "target/tokenizer.json").read_bytes() for x in "ab")
    assert texts_a == texts_b


@pytest.mark.parametrize(("hidden", "kept"), [(128, torch.bfloat16), (64, torch.float32)])
def test_bfloat16_keeps_what_it_would_round(hidden: int, kept: torch.dtype, tmp_path: Path) -> None:
    """A source rounded to bfloat16 is padded without further loss."""
    write_target(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    pad(tmp_path / "source", None, tmp_path, Sizes(700, hidden))
    weights = load_file(tmp_path / "target/model.safetensors")
    assert weights["model.norm.weight"].dtype is kept
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype is torch.bfloat16
    source = load_decoder(tmp_path / "source", torch.float32, CPU)
    target = load_decoder(tmp_path / "target", torch.float32, CPU)
    want, got = run(source, prompt())[0], run(target, prompt())[0]
    torch.testing.assert_close(got[:, :VOCAB], want, atol=1e-4, rtol=1e-4)
    half = load_decoder(tmp_path / "target", torch.bfloat16, CPU)
    positions = torch.arange(5)

    def first_value(__: int, heads: Heads) -> Tensor:
        q, _, v = heads.rotated()
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).flatten(1)

    logits = half.logits(half(prompt()[:5], positions, first_value)[0])
    assert float(logits.float().softmax(-1)[:, VOCAB:].sum()) == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_the_embedded_model_is_padded_to_the_matrices_of_each_preset(preset: str) -> None:
    source, (wanted, head_dim) = read_config(EMBEDDED / "target"), PRESETS[preset]
    shape = grow(source, like(preset, source))
    assert shape.head_dim == source.head_dim
    assert wanted.heads
    assert wanted.kv_heads
    assert shape.num_heads * shape.head_dim == wanted.heads * head_dim
    assert shape.num_kv_heads * shape.head_dim == wanted.kv_heads * head_dim
    assert (shape.hidden_size, shape.num_layers) == (wanted.hidden, wanted.layers)
    assert (shape.vocab_size, shape.intermediate_size) == (wanted.vocab, wanted.intermediate)
