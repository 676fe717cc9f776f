"""Settings of an engine, checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from overlap_spec.errors import ConfigError

EMBEDDED = Path(__file__).parent / "embedded"
DRAFTERS = Path(__file__).parent / "drafters"
PLANNED_ALGORITHMS = ("eagle", "draft_model", "ngram", "mtp")
OVERLAP_MODES = ("once-sync", "double-sync", "none")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine can be told. Lengths and sizes in tokens.

    Attributes:
        model: Folder of a Hugging Face checkpoint; None is the embedded model.
        draft: Folder of a draft head; None is the embedded head for the embedded model.
        algorithm: Drafter: the name of a file of ``drafters/``, ``package.module:Class`` of one's
            own, or ``none``; None is eagle3 where there is a draft head.
        num_steps: Depth of the draft.
        eagle_topk: Branches of a draft step; 1 is a chain.
        num_draft_tokens: Verified nodes, the root included; None is all that is drafted, at most
            16 in a tree.
        adaptive: Length policy: ``guarded``, ``static`` (num_steps always), a published preset
            (``default``, ``aggressive``, ``with-off``), or the path of a JSON config file.
        overlap: How grammar work overlaps with verify.
        grammar_backend: Library that makes the masks; ``auto`` takes for each grammar the one
            that is quickest with it.
        grammar_isolated: Compile grammars in worker processes, under the two limits below; None
            does where the system can (Linux).
        grammar_compile_timeout_s: Seconds that compiling a grammar may take.
        grammar_compile_memory_bytes: Memory that compiling a grammar may take.
        grammar_cache_bytes: Memory of the cache of compiled grammars.
        dtype: ``auto`` is float32 on the CPU and the checkpoint's type on a GPU.
        device: ``auto`` is CUDA where there is one.
        context_length: Longest prompt + output; None is the checkpoint's.
        mem_fraction_static: Share of the device's memory for weights and caches.
        max_total_tokens: Tokens that the caches hold, if fewer than memory allows.
        max_running_requests: Requests that run at once; more wait.
        chunked_prefill_size: Prompt tokens that a step computes at most.
        page_size: Tokens of a cache page.
        prefix_cache: Keep computed pages for prompts that start alike.
        graphs: Record the passes of a decode step when they are first needed, and replay them: as
            CUDA graphs on a GPU (for each tier and size of batch), as TorchScript on the CPU.
        lane_threads: Threads of the grammar lane; 0 runs it in the step's own thread. None is half
            the cores, or 0 in the serial mode.
        mask_deadline_ms: Time that one request's matcher may take a step; later ones cost that
            request its draft, or its life. None waits for ever. Threads are needed for it to hold.
    """

    model: str | None = None
    draft: str | None = None
    algorithm: str | None = None
    num_steps: int = 5
    eagle_topk: int = 1
    num_draft_tokens: int | None = None
    adaptive: str = "guarded"
    overlap: str = "once-sync"
    grammar_backend: str = "auto"
    grammar_isolated: bool | None = None
    grammar_compile_timeout_s: float = 10.0
    grammar_compile_memory_bytes: int = 2 * 2**30
    grammar_cache_bytes: int = 256 * 2**20
    dtype: str = "auto"
    device: str = "auto"
    context_length: int | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int = 32
    chunked_prefill_size: int = 1024
    page_size: int = 16
    prefix_cache: bool = True
    graphs: bool = True
    lane_threads: int | None = None
    mask_deadline_ms: float | None = 50.0

    @classmethod
    def build(cls, **settings: Any) -> EngineConfig:
        """The config with ``settings``; ConfigError names an unknown or wrong one."""
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; known: {', '.join(sorted(known))}")
        config = cls(**settings)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError that names the first setting that cannot be."""
        if ":" not in self.drafter:
            built = (*drafter_names(), "none")
            _one_of("algorithm", self.drafter, built, PLANNED_ALGORITHMS)
        _one_of("overlap", self.overlap, OVERLAP_MODES)
        _one_of("dtype", self.dtype, DTYPES)
        least = {
            "num_steps": 0,
            "eagle_topk": 1,
            "num_draft_tokens": 2,
            "context_length": 1,
            "max_total_tokens": 1,
            "max_running_requests": 1,
            "chunked_prefill_size": 1,
            "page_size": 1,
            "lane_threads": 0,
            "grammar_compile_memory_bytes": 1,
            "grammar_cache_bytes": 0,
        }
        optional = ("num_draft_tokens", "context_length", "max_total_tokens", "lane_threads")
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer >= {low}: {value!r}")
        if self.chunked_prefill_size < self.page_size:
            raise ConfigError("chunked_prefill_size must hold at least one page (page_size)")
        for name in ("mask_deadline_ms", "grammar_compile_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be over 0: {value!r}")
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"mem_fraction_static must be between 0 and 1: {fraction!r}")

    @property
    def lanes(self) -> int:
        """Threads of the grammar lane."""
        if self.lane_threads is not None:
            return self.lane_threads
        return 0 if self.overlap == "none" else max(1, (os.cpu_count() or 2) // 2)

    @property
    def target_path(self) -> Path:
        return Path(self.model) if self.model is not None else EMBEDDED / "target"

    @property
    def drafter(self) -> str:
        """Name of the drafter, ``none`` where nothing is drafted."""
        if self.algorithm is None:
            return "eagle3" if self.draft_path is not None else "none"
        if ":" in self.algorithm:
            return self.algorithm
        return self.algorithm.lower().replace("-", "_")

    @property
    def draft_path(self) -> Path | None:
        """Folder of the draft head, if there is one."""
        if self.draft is not None:
            return Path(self.draft)
        return EMBEDDED / "eagle3" if self.model is None else None


def drafter_names() -> tuple[str, ...]:
    """The drafters that have a file."""
    support = {"__init__", "base", "registry"}
    return tuple(sorted(f.stem for f in DRAFTERS.glob("*.py") if f.stem not in support))


def _one_of(name: str, value: str, built: tuple[str, ...], planned: tuple[str, ...] = ()) -> None:
    if value in planned:
        raise ConfigError(f"{name} {value!r} is not built yet; built: {', '.join(built)}")
    if value not in built:
        raise ConfigError(f"{name} must be one of {', '.join(built)}: {value!r}")
