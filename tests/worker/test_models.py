"""The shared decoder against `transformers`, on random small checkpoints of each architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.errors import CheckpointError
from overlap_spec.models.weights import load_decoder
from tests.support.models import CASES, Cache, reference


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """Prefill in two chunks, decode one token, then verify a tree: all as `transformers`."""
    model = reference(case, tmp_path)
    decoder = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(5))
    cache = Cache(decoder, 64)

    def expected(sequence: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(sequence[None]).logits[0]
        return logits

    got = torch.cat([cache.run(tokens[:17], 0), cache.run(tokens[17:29], 17)])
    torch.testing.assert_close(got, expected(tokens[:29]), atol=2e-4, rtol=1e-4)
    got = cache.run(tokens[29:30], 29)
    torch.testing.assert_close(got[0], expected(tokens[:30])[-1], atol=2e-4, rtol=1e-4)

    # 0 ─┬─ 1 ─── 3 ─── 5
    #    └─ 2 ─── 4
    parents = [-1, 0, 0, 1, 2, 3]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    mask = torch.zeros(6, 6, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    depth = torch.tensor([len(path) - 1 for path in paths])
    nodes = tokens[30:36]
    got = cache.run(nodes, 30, 30 + depth, mask)
    assert parents[0] == -1
    for node, path in enumerate(paths):
        want = expected(torch.cat([tokens[:30], nodes[path]]))[-1]
        torch.testing.assert_close(got[node], want, atol=2e-4, rtol=1e-4)


def rewrite(path: Path, change: Any) -> None:
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight"),
        (lambda s: s.update(stray=torch.zeros(2)), "stray"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(7)}),
            r"model.norm.weight has shape \[7\], expected \[48\]",
        ),
    ],
)
def test_strict_loading_names_the_culprit(change: Any, culprit: str, tmp_path: Path) -> None:
    reference("llama", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=culprit):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))


def test_unknown_architecture_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(CheckpointError, match="BertModel"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))


def test_context_length_over_the_checkpoints(tmp_path: Path) -> None:
    reference("llama", tmp_path)
    with pytest.raises(ValueError, match="context_length 999"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"), 999)
