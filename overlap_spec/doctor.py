"""Checks an installation by loading what it would use."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_spec import __version__
from overlap_spec.config import EngineConfig
from overlap_spec.errors import OverlapSpecError

if TYPE_CHECKING:
    from overlap_spec.models.decoder import Decoder

Finding = tuple[str, str, bool]
MEMORY = Path("/proc/meminfo")
PROCESSOR = Path("/proc/cpuinfo")
# Instructions that this project's work gains from, as Linux names them.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def check_files(config: EngineConfig, chat_template: str | None = None) -> None:
    """Read a checkpoint's small files, which takes no torch and no memory for weights.
    CheckpointError, which names the field: one is missing, broken or out of range."""
    from overlap_spec.models.config import read_config
    from overlap_spec.tokenizer import Tokenizer

    path = config.target_path
    Tokenizer(path, read_config(path).vocab_size, chat_template)


def examine(model: str | None, draft: str | None, algorithm: str | None = None) -> list[Finding]:
    """(subject, finding, whether it is fine) for libraries, device, kernels and weights;
    ``algorithm``: whose folder ``draft`` is; None: what its tensors say."""
    findings: list[Finding] = [
        ("overlap-spec", __version__, True),
        ("python", platform.python_version(), True),
    ]
    for name in libraries():
        try:
            findings.append((name, importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            findings.append((name, f"not installed: pip install {name}", False))
    if all(good for _, _, good in findings):
        findings += _device()
        findings += _weights(model, draft, algorithm)
    return findings


def libraries() -> list[str]:
    """Names of the packages that this one asks for, without those of its extras."""
    asked = importlib.metadata.requires("overlap-spec") or []
    return [re.split(r"[^\w.-]", each)[0] for each in asked if "extra ==" not in each]


def _device() -> list[Finding]:
    import torch

    from overlap_spec.kernels import cpu
    from overlap_spec.worker.cores import physical_cores

    threads = torch.get_num_threads()
    found = [
        ("cpu", f"{physical_cores()} physical cores, {threads} threads of torch", True),
        ("cpu features", cpu_features(PROCESSOR), True),
        ("memory", memory(MEMORY), True),
    ]
    if not torch.cuda.is_available():
        kernels = "native layers and products"
        if not cpu.native():
            kernels = "torch's: g++ 12 or newer (or $CXX) would compile quicker ones"
        return [*found, ("device", "cpu (no CUDA device)", True), ("kernels", kernels, True)]
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        about = f"{name}, sm_{major}{minor}, {free:.1f} of {total:.1f} GiB free"
        found.append((f"cuda:{index}", about, True))
    return [*found, ("device", f"cuda, CUDA {torch.version.cuda}", True), _triton()]


def _triton() -> Finding:
    try:
        return ("kernels", f"Triton {importlib.metadata.version('triton')}", True)
    except importlib.metadata.PackageNotFoundError:
        return ("kernels", "a CUDA device needs triton: pip install triton", False)


def cpu_features(processor: Path) -> str:
    """Which of :data:`CPU_FEATURES` the processor has, and what these give."""
    try:
        flags = set(processor.read_text().split())
    except OSError:
        return "unknown: this system does not tell"
    has = [name for name in CPU_FEATURES if name in flags]
    gives = []
    if {"amx_bf16", "avx512_bf16"} & flags:
        gives.append("bfloat16")
    if "avx2" in flags:
        gives.append("--quantization int8 and int4")
    return f"{', '.join(has) or 'none'} ({', '.join(gives) or 'float32 alone'})"


def memory(source: Path) -> str:
    """Available and total memory of the system."""
    try:
        lines = dict(line.split(":", 1) for line in source.read_text().splitlines())
        total, free = (int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown: this system does not tell"
    return f"{free / 2**20:.1f} of {total / 2**20:.1f} GiB available"


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
    about = f"{shape.architecture}, {count:.1f}M parameters, vocabulary {shape.vocab_size}, "
    about += f"context {shape.max_position}"
    return [("target weights", about, True), ("drafter", *_drafter(config, target))]


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
            return "none: plain decoding; --draft or --algorithm names one", True
        tables = RowTables(1, 1, target.config.vocab_size, cpu)
        drafter = load_drafter(name).build(config, target, tables, make_cache)
    except OverlapSpecError as error:
        return str(error), False
    shared = {id(parameter) for parameter in target.parameters()}
    own = sum(p.numel() for p in drafter.parameters() if id(p) not in shared) / 1e6
    return f"{name}, {own:.1f}M parameters of its own", True
