"""Small random checkpoints for tests: a byte-level tokenizer, a Llama, and an EAGLE-3 head."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from overlap_spec.models.config import ModelConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.eagle3 import Eagle3Config, Eagle3Head
from overlap_spec.models.vocabulary import token_texts
from overlap_spec.models.weights import export_state

SPECIALS = ("<bos>", "<user>", "<assistant>", "<end>")
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIALS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def write_tokenizer(path: Path) -> None:
    """One token a byte, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<end>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"do_sample": False, "eos_token_id": 256 + SPECIALS.index("<end>")}
    (path / "generation_config.json").write_text(json.dumps(generation))


def write_target(path: Path, seed: int = 0, scale: float = 1.5, **changes: Any) -> None:
    """A random Llama with its tokenizer; ``scale`` sharpens its choices."""
    path.mkdir(parents=True, exist_ok=True)
    hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **changes}
    (path / "config.json").write_text(json.dumps(hf))
    write_tokenizer(path)
    from overlap_spec.models.config import read_config

    save(Decoder(read_config(path)), path, seed, scale)


def write_head(
    path: Path, seed: int = 1, layers: tuple[int, ...] = (0, 1, 2), **changes: Any
) -> None:
    """A random EAGLE-3 head for :func:`write_target`'s model."""
    path.mkdir(parents=True, exist_ok=True)
    hf = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **SHAPE,
        "num_hidden_layers": 1,
        "draft_vocab_size": SHAPE["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **changes,
    }
    (path / "config.json").write_text(json.dumps(hf))
    shape = ModelConfig(
        architecture="",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=1,
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["hidden_size"] // hf["num_attention_heads"],
        max_position=64,
    )
    target_hidden = hf.get("target_hidden_size", hf["hidden_size"])
    head = Eagle3Head(Eagle3Config(shape, hf["draft_vocab_size"], target_hidden, None))
    save(head, path, seed, 1.5)


def rewrite(file: Path, **fields: Any) -> None:
    """Change fields of a file in JSON; what becomes None is gone."""
    data = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: x for name, x in data.items() if x is not None}))


def save(module: torch.nn.Module, path: Path, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                std = scale / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    save_file(export_state(module), path / "model.safetensors")


def renumber(source: str, folder: Path, kept: list[int], stand_in: str = "") -> None:
    """A copy of a model with the tokens ``kept`` alone, in that order.

    ``stand_in``: begins the texts of unknown tokens, which fill the vocabulary up.
    """
    shutil.copytree(source, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    texts = token_texts(folder / "tokenizer.json")
    new = {texts[number]: place for place, number in enumerate(kept)}
    if stand_in:
        new |= {f"{stand_in}{n}": n for n in range(len(kept), len(texts))}
    data["model"]["vocab"], data["added_tokens"] = new, []
    (folder / "tokenizer.json").write_text(json.dumps(data))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn(len(new), weights[name].shape[1])
        rows[: len(kept)] = weights[name][kept]
        weights[name] = rows
    save_file(weights, folder / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "vocab_size": len(new)}))
