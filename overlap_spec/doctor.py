"""Checks an installation by loading what it would use."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING

from overlap_spec.config import EngineConfig
from overlap_spec.errors import OverlapSpecError

if TYPE_CHECKING:
    from overlap_spec.models.decoder import Decoder

Finding = tuple[str, str, bool]
LIBRARIES = ("torch", "xgrammar", "tokenizers", "safetensors", "jinja2", "pydantic", "numpy")


def check_files(config: EngineConfig, chat_template: str | None = None) -> None:
    """Read a checkpoint's small files, which takes no torch and no memory for weights.

    Raises:
        CheckpointError: one is missing, broken or out of range; names the field.
    """
    from overlap_spec.models.config import read_config
    from overlap_spec.tokenizer import Tokenizer

    path = config.target_path
    Tokenizer(path, read_config(path).vocab_size, chat_template)


def examine(model: str | None, draft: str | None, algorithm: str | None = None) -> list[Finding]:
    """(subject, finding, whether it is fine) for libraries, device, kernels and weights.

    Args:
        algorithm: Whose folder ``draft`` is; None: what its tensors say.
    """
    findings: list[Finding] = [("python", platform.python_version(), True)]
    for name in LIBRARIES:
        try:
            findings.append((name, importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            findings.append((name, "not installed", False))
    if all(good for _, _, good in findings):
        findings += _device()
        findings += _weights(model, draft, algorithm)
    return findings


def _device() -> list[Finding]:
    import torch

    kernels = "torch reference"
    if torch.cuda.is_available():
        kernels = "Triton"
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        device = f"cuda: {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    else:
        device = f"cpu, {torch.get_num_threads()} threads (no CUDA device)"
    return [("device", device, True), ("kernels", kernels, True)]


def _weights(model: str | None, draft: str | None, algorithm: str | None) -> list[Finding]:
    import torch

    from overlap_spec.models.weights import load_decoder

    config = EngineConfig.build(model=model, draft=draft, algorithm=algorithm)
    try:
        target = load_decoder(config.target_path, torch.float32, torch.device("cpu"))
    except OverlapSpecError as error:
        return [("target weights", str(error), False)]
    shape = target.config
    count = sum(p.numel() for p in target.parameters()) / 1e6
    found = [
        (
            "target weights",
            f"{shape.architecture}, {count:.1f}M parameters, vocabulary {shape.vocab_size}, "
            f"context {shape.max_position}",
            True,
        )
    ]
    return [*found, ("drafter", *_drafter(config, target))]


def _drafter(config: EngineConfig, target: Decoder) -> tuple[str, bool]:
    """What would draft for ``target``, built as an engine would build it."""
    import torch

    from overlap_spec.drafters.registry import drafter_of_folder, load_drafter
    from overlap_spec.models.config import ModelConfig
    from overlap_spec.worker.kv_pool import KVPool
    from overlap_spec.worker.tables import RowTables

    cpu = torch.device("cpu")

    def make_cache(layers: ModelConfig, first: int = 0) -> KVPool:
        return KVPool(layers, config.page_size, torch.float32, cpu, first)

    try:
        name = config.drafter
        if config.algorithm is None and config.draft_path is not None:
            name = drafter_of_folder(config.draft_path)
        if name == "none":
            return "none: plain decoding", True
        tables = RowTables(1, 1, target.config.vocab_size, cpu)
        drafter = load_drafter(name).build(config, target, tables, make_cache)
    except OverlapSpecError as error:
        return str(error), False
    shared = {id(parameter) for parameter in target.parameters()}
    own = sum(p.numel() for p in drafter.parameters() if id(p) not in shared) / 1e6
    return f"{name}, {own:.1f}M parameters of its own", True
