"""Checks an installation by loading what it would use."""

from __future__ import annotations

import importlib.metadata
import platform

from overlap_spec.config import EngineConfig
from overlap_spec.errors import OverlapSpecError

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


def examine(model: str | None, draft: str | None) -> list[Finding]:
    """(subject, finding, whether it is fine) for libraries, device, kernels and weights."""
    findings: list[Finding] = [("python", platform.python_version(), True)]
    for name in LIBRARIES:
        try:
            findings.append((name, importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            findings.append((name, "not installed", False))
    if all(good for _, _, good in findings):
        findings += _device()
        findings += _weights(model, draft)
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


def _weights(model: str | None, draft: str | None) -> list[Finding]:
    import torch

    from overlap_spec.models.weights import load_decoder, load_eagle3

    config = EngineConfig.build(model=model, draft=draft)
    cpu = torch.device("cpu")
    try:
        target = load_decoder(config.target_path, torch.float32, cpu)
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
    if config.draft_path is None:
        return [*found, ("draft head", "none: plain decoding", True)]
    try:
        head = load_eagle3(config.draft_path, target, torch.float32)
    except OverlapSpecError as error:
        return [*found, ("draft head", str(error), False)]
    count = sum(p.numel() for p in head.parameters()) / 1e6
    return [*found, ("draft head", f"EAGLE-3, {count:.1f}M parameters", True)]
