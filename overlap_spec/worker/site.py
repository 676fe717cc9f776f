"""Where a worker of some settings runs: its mode, device, types of numbers, and threads."""

from __future__ import annotations

import platform
from typing import Any

import torch

from overlap_spec.config import AUTO_MODE, EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.kernels import cpu
from overlap_spec.models.config import read_json
from overlap_spec.models.quantization import has_int4, has_int8
from overlap_spec.models.tensors import parameter_count
from overlap_spec.worker.cores import physical_cores, pick_float, pick_threads


def overlap_mode(config: EngineConfig) -> str:
    """The mode of a config, ``auto`` resolved: serial where a CPU's passes take all cores, which
    leaves the host and the lane none to run on beside them."""
    if config.overlap != AUTO_MODE:
        return config.overlap
    device = pick_device(config.device)
    if device.type == "cpu" and count_threads(config, device) >= physical_cores():
        return "none"
    return "once-sync"


def count_threads(config: EngineConfig, device: torch.device) -> int:
    """Threads of torch for each stream of the CPU."""
    stored = torch.int8 if config.quantization else pick_dtype(config, device)
    size, ranks = parameter_count(config.target_path) * stored.itemsize, config.tensor_parallel_size
    if config.quantization == "int4":
        size //= 2
    return pick_threads(config.threads, size // ranks, ranks)


def machine_key(config: EngineConfig) -> dict[str, Any]:
    """What the time of a pass depends on, as plain data: model, drafter, device, dtype, threads."""
    device, draft = pick_device(config.device), config.draft_path
    if device.type == "cuda":
        threads, name = 0, torch.cuda.get_device_name(device)
    else:
        threads = count_threads(config, device)
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        name += f", {physical_cores()} cores"
    return {
        "model": read_json(config.target_path / "config.json"),
        "draft": read_json(draft / "config.json") if draft is not None else None,
        "drafter": config.drafter,
        "device": name,
        "dtype": config.quantization or str(pick_dtype(config, device)),
        "threads": threads,
        "graphs": config.graphs,
        **({"kernels": "native"} if device.type == "cpu" and cpu.native() else {}),
        **({"ranks": config.tensor_parallel_size} if config.tensor_parallel_size > 1 else {}),
    }


def check_quantization(name: str, device: torch.device) -> None:
    """Raise ConfigError where weights cannot be quantised."""
    if device.type != "cpu":
        raise ConfigError(f"quantization {name!r} is for the CPU alone: set device to cpu")
    if name == "int4" and not has_int4():
        raise ConfigError(
            f"quantization {name!r} needs a processor with AVX2 and a C++ compiler (g++, or $CXX)"
        )
    if not has_int8():
        raise ConfigError(
            f"quantization {name!r} needs a processor with AVX512-VNNI, or with AVX2 and a C++ "
            "compiler (g++, or $CXX)"
        )


def pick_device(name: str) -> torch.device:
    """The device of a setting; ConfigError where it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device")
    return device


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The type of weights, caches and activations."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    hf = read_json(config.target_path / "config.json")
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    stored = {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)
    if device.type == "cpu":
        return pick_float(stored, parameter_count(config.target_path))
    return stored
