"""Quantised checkpoints in their published names and shapes, against weights in plain torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.errors import CheckpointError
from overlap_spec.models.tensors import parameter_count, tensor_names
from overlap_spec.models.weights import export_state, load_decoder
from tests.support.checkpoints import rewrite
from tests.support.models import reference
from tests.support.quantised import (
    AWQ,
    CPU,
    FP8,
    GPTQ,
    LAYOUTS,
    awq,
    draw,
    gptq,
    packed,
    whole,
    write,
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quantised_checkpoint_is_read_exactly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, make = LAYOUTS[name]
    stored, plain = draw(make)
    folder = write(tmp_path, quantised, stored)
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert got.keys() == plain.keys()
    for weight, tensor in plain.items():
        assert torch.equal(got[weight], tensor.float()), weight
    # Counted as what it stands for.
    assert parameter_count(folder) == sum(tensor.numel() for tensor in plain.values())
    assert tensor_names(folder) == set(plain)
    mib = sum(tensor.numel() for tensor in plain.values()) * 4 / 2**20
    disk = (folder / "model.safetensors").stat().st_size / 2**20
    cost = f"weights are computed with in float32: {mib:.1f} MiB in memory, {disk:.1f} MiB on disk"
    assert cost in caplog.text
    assert disk < mib / 2


def test_parts_may_lie_in_several_shards_and_in_pickled_ones(tmp_path: Path) -> None:
    stored, plain = draw(awq)
    folder = write(tmp_path, AWQ, stored)
    (folder / "model.safetensors").unlink()
    names = sorted(stored, key=lambda name: name.rpartition(".")[2])
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, half in enumerate(halves):
        shard = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save({name: stored[name] for name in half}, folder / shard)
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor.float()) for name, tensor in plain.items())


def test_the_first_quantisers_file_of_settings_is_read(tmp_path: Path) -> None:
    stored, plain = draw(gptq(4, 1, False))
    folder = write(tmp_path, None, stored)
    settings = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    got = export_state(load_decoder(folder, torch.float32, CPU))
    assert all(torch.equal(got[name], tensor.float()) for name, tensor in plain.items())


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """GPT-OSS as published: 4-bit floats in blocks of 32, whose scales are powers of 2."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 131}
    model = reference("gpt-oss", tmp_path, num_attention_heads=4, **sizes)
    state, plain = load_file(tmp_path / "model.safetensors"), {}
    torch.manual_seed(0)
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj")) and "experts" in n]:
        count, inputs, outputs = state.pop(name).shape
        codes = whole(0, 16, count, outputs, inputs // 32, 32)
        exponents = whole(118, 126, count, outputs, inputs // 32).to(torch.uint8)
        low, high = codes[..., ::2], codes[..., 1::2]
        state[f"{name}_blocks"] = (low + 16 * high).to(torch.uint8)
        state[f"{name}_scales"] = exponents
        wide = values[codes] * (2.0 ** (exponents.float() - 127))[..., None]
        plain[name] = wide.flatten(2).transpose(1, 2)
    save_file(state, tmp_path / "model.safetensors")
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    rewrite(tmp_path / "config.json", quantization_config=quantised)
    got = export_state(load_decoder(tmp_path, torch.float32, CPU))
    assert len(plain) == 2 * model.config.num_hidden_layers
    for name, tensor in plain.items():
        assert torch.equal(got[name], tensor), name
    assert parameter_count(tmp_path) == sum(tensor.numel() for tensor in got.values())


W4 = packed(4, "group", 32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method must be one of awq, comp"),
    "no method": ({"bits": 4}, "quant_method must be one of .*None"),
    "awq bits": ({**AWQ, "bits": 8}, "quantization_config: bits must be one of 4: 8"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version must be one of gemm"),
    "awq zeros": ({**AWQ, "zero_point": False}, "zero_point must be one of True: False"),
    "gptq bits": ({**GPTQ, "bits": 3}, "bits must be one of 2, 4, 8: 3"),
    "gptq form": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be .* marlin"),
    "gptq group": ({**GPTQ, "group_size": 0}, "group_size must be a whole number above 0: 0"),
    "fp8 block": ({**FP8, "weight_block_size": 128}, "weight_block_size must be two whole"),
    "form": ({**W4, "format": "marlin-24"}, "format must be one of .* marlin-24"),
    "no groups": ({**W4, "config_groups": {}}, "config_groups must be an object"),
    "strategy": (packed(4, "token", None), "strategy must be one of .* token"),
    "packed bits": (packed(3, "group", 32), "num_bits must be one of 4, 8: 3"),
    "group": (packed(4, "group", None), "group_size must be a whole number above 0: None"),
    "groups differ": (
        {**W4, "config_groups": {**W4["config_groups"], "group_1": {"weights": {"num_bits": 8}}}},
        "all groups must have the same weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_names_its_field(name: str, tmp_path: Path) -> None:
    quantised, words = REFUSED[name]
    folder = write(tmp_path, quantised, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=words) as caught:
        load_decoder(folder, torch.float32, CPU)
    assert "quantization_config" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("layout", "part", "change", "words"),
    [
        ("AWQ", "scales", lambda x: x[:, :-8], "q_proj.weight: these are no awq weights"),
        ("AWQ", "qzeros", None, "q_proj.weight: these are no awq weights .*'qzeros'"),
        ("GPTQ int4", "g_idx", lambda x: x + 9, "q_proj.weight: these are no gptq weights"),
        ("FP8, blocks of 128", "weight_scale_inv", None, "q_proj.weight has type torch.float8"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    layout: str, part: str, change: Any, words: str, tmp_path: Path
) -> None:
    quantised, make = LAYOUTS[layout]
    stored, _ = draw(make)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor).contiguous()
    folder = write(tmp_path, quantised, stored)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_decoder(folder, torch.float32, CPU)
    assert len(str(caught.value).splitlines()) == 1
