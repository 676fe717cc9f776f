"""Settings of an engine."""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from overlap_spec.errors import ConfigError, unknown
from overlap_spec.hub import find_folder

EMBEDDED = Path(__file__).parent / "embedded"
DRAFTERS = Path(__file__).parent / "drafters"
# What drafts for a target without a head where nobody says, and the files that this takes.
HEADLESS = "slots,suffix"
HEADLESS_FILES = ("row", "slots", "suffix")
OVERLAP_MODES = ("once-sync", "double-sync", "none")
# The mode that fits the processor: see `overlap_spec.worker.site.overlap_mode`.
AUTO_MODE = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
ADDITIONAL_PROPERTIES = ("closed", "schema")
# The least that a setting may be.
LEAST = {
    "num_steps": 0, "eagle_topk": 1, "num_draft_tokens": 2, "context_length": 1,
    "max_total_tokens": 1, "max_running_requests": 1, "chunked_prefill_size": 1, "page_size": 1,
    "threads": 1, "lane_threads": 0, "ngram_max_matching_size": 1, "ngram_pool_bytes": 1,
    "relaxed_topk": 0, "tensor_parallel_size": 1, "grammar_compile_memory_bytes": 1,
    "grammar_cache_bytes": 0, "memory_limit_bytes": 1,
}  # fmt: skip
# Names that other engines have → ours; those of :attr:`Help.flags` besides.
ELSEWHERE = {
    "num_speculative_tokens": "num_steps",
    "max_draft_len": "num_steps",
    "speculative_model": "draft",
    "decoding_type": "algorithm",
    "max_matching_ngram_size": "ngram_max_matching_size",
    "is_public_pool": "ngram_public_pool",
    "is_keep_all": "ngram_keep_all",
    "is_use_oldest": "ngram_use_oldest",
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "guided_decoding_backend": "grammar_backend",
}


@dataclass(frozen=True)
class Help:
    """Metadata of a setting: its help text, and its flags if they are not named as the field."""

    text: str
    flags: tuple[str, ...] = ()


def setting(text: str, default: Any = None, flags: tuple[str, ...] = ()) -> Any:
    """A field of a settings class with its :class:`Help`."""
    return field(default=default, metadata={"help": Help(text, flags)})


def helps(settings: type) -> dict[str, Help]:
    """The help of each field of a settings class that has one."""
    return {f.name: f.metadata["help"] for f in fields(settings) if "help" in f.metadata}


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine. Lengths and sizes in tokens."""

    model: str | None = setting(
        "Folder of a Hugging Face checkpoint, or its name on the hub (org/name); by default the "
        "embedded model.",
        flags=("--model", "--model-path"),
    )
    draft: str | None = setting(
        "Folder or hub name of a draft head or draft model; by default the embedded head for the "
        "embedded model.",
        flags=("--draft", "--speculative-draft-model-path"),
    )
    algorithm: str | None = setting(
        "Drafter: eagle, eagle3, parallel, dflash, draft_model, mtp, ngram, suffix, slots, "
        "grammar, none, or package.module:Class of your own; or several in a row (suffix,eagle3), "
        "of which each step has the one that is worth most; by default eagle3 if there is a draft "
        "head, else slots,suffix.",
        flags=("--algorithm", "--speculative-algorithm"),
    )
    num_steps: int = setting("Depth of the draft.", 5, ("--num-steps", "--speculative-num-steps"))
    eagle_topk: int = setting(
        "Branches of a draft step; 1 is a chain.",
        1,
        ("--eagle-topk", "--speculative-eagle-topk"),
    )
    num_draft_tokens: int | None = setting(
        "Nodes that are verified, root included; by default all drafted ones, at most 16 in a "
        "tree.",
        flags=("--num-draft-tokens", "--speculative-num-draft-tokens"),
    )
    adaptive: str = setting(
        "Length policy: auto (depth and width by survival and measured cost), adaspec, "
        "adaspec-minus (verifies all it drafts), static (always num_steps), off, a published "
        "preset (default, aggressive, with-off), a JSON config file, or package.module:Class of "
        "your own.",
        "auto",
        ("--adaptive", "--speculative-adaptive-config"),
    )
    tpot_slo_ms: float | None = setting(
        "Target of the time per output token, in ms, of requests that name none: adaspec and auto "
        "plan no step that takes longer, where they can."
    )
    threshold_single: float = setting(
        "Accept every draft of a sampled request whose probability is at least this; below 1 "
        "lossy.",
        1.0,
        ("--threshold-single", "--speculative-accept-threshold-single"),
    )
    threshold_acc: float = setting(
        "Accept a sampled request's drafts with their probability over this; below 1 lossy.",
        1.0,
        ("--threshold-acc", "--speculative-accept-threshold-acc"),
    )
    relaxed_topk: int = setting(
        "While a model thinks before its answer, accept drafts among this many most probable "
        "tokens (lossy); 0 is off.",
        0,
        ("--relaxed-topk", "--speculative-relaxed-topk"),
    )
    relaxed_delta: float = setting(
        "relaxed_topk: how far below the best token's log-probability such a draft's may be; 0 is "
        "not below it at all.",
        0.0,
        ("--relaxed-delta", "--speculative-relaxed-delta"),
    )
    ngram_max_matching_size: int = setting(
        "ngram: most tokens at the end of a request's text that are looked up; what followed the "
        "longest match is drafted.",
        4,
    )
    ngram_public_pool: bool = setting(
        "ngram, suffix: also look up the text of requests that have ended, whoever sent them; by "
        "default only the request's own.",
        False,
    )
    ngram_keep_all: bool = setting(
        "ngram: keep all continuations of a match, or the longest alone.",
        True,
    )
    ngram_use_oldest: bool = setting(
        "ngram: prefer a match's oldest continuation to its newest.",
        False,
    )
    ngram_pool_bytes: int = setting(
        "ngram, suffix: memory for what is looked up, in bytes; each of the requests that run at "
        "once has an equal share, after half of it for the public pool.",
        256 * 2**20,
    )
    slots_earlier: bool = setting(
        "slots: also draft values that earlier answers of the same grammar and cache salt had in "
        "the same place; by default only what the request itself has.",
        False,
    )
    overlap: str = setting(
        "How grammar work overlaps with verify: once-sync, double-sync, none (serial), or auto: "
        "once-sync on a GPU, and on a CPU where a pass leaves a core free; else none.",
        AUTO_MODE,
    )
    grammar_backend: str = setting(
        "Library that makes the masks; auto picks the fastest backend for each grammar.",
        "auto",
    )
    additional_properties: str = setting(
        "Members that a schema does not name, unless a request says: closed (an object that names "
        "some has no others, unless its schema says so), or schema (as JSON Schema has it, any).",
        "closed",
    )
    complete: bool = setting(
        "Outputs under a grammar come to their end within max_tokens and the context, unless a "
        "request says otherwise; one whose shortest output does not fit is refused.",
        True,
    )
    grammar_isolated: bool | None = setting(
        "Compile grammars in worker processes, under the two limits below; by default if the "
        "system can (Linux)."
    )
    grammar_compile_timeout_s: float = setting(
        "Time limit for compiling a grammar, in seconds.",
        10.0,
    )
    grammar_compile_memory_bytes: int = setting(
        "Memory limit for compiling a grammar, in bytes.",
        2 * 2**30,
    )
    grammar_cache_bytes: int = setting(
        "Size of the cache of compiled grammars, in bytes.",
        128 * 2**20,
    )
    memory_limit_bytes: int | None = setting(
        "Resident memory of the engine's process above which cached grammars are dropped, and then "
        "new ones are refused, in bytes; by default what it takes at rest, and a quarter of what "
        "is left of the machine's or the control group's."
    )
    dtype: str = setting(
        "float32, bfloat16, float16, or auto: the checkpoint's type on a GPU; on the CPU float32, "
        "or bfloat16 for a checkpoint in it of at least 32 MiB where the processor has AMX or "
        "AVX512-BF16.",
        "auto",
    )
    quantization: str | None = setting(
        "int8 or int4: target and draft are computed with weights of so many bits, on a CPU with "
        "AVX2 (from 2013 on) and a C++ compiler; by default as the checkpoint has them."
    )
    lora_modules: tuple[str, ...] = setting(
        "A LoRA adapter, as name=path to PEFT's folder; a request asks for it by its name as the "
        "model.",
        (),
        ("--lora-modules",),
    )
    device: str = setting("cpu, cuda, or auto: CUDA if there is a device.", "auto")
    context_length: int | None = setting(
        "Longest prompt + output, in tokens; by default the checkpoint's.",
    )
    mem_fraction_static: float | None = setting(
        "Share of the device's memory for weights and caches.",
        flags=("--mem-fraction", "--mem-fraction-static"),
    )
    max_total_tokens: int | None = setting(
        "Tokens that the KV cache holds, if fewer than fit into memory.",
    )
    max_running_requests: int = setting("Requests that run at once; more wait.", 32)
    chunked_prefill_size: int | None = setting(
        "Most prompt tokens that one step computes; by default 1,024, on a CPU 256.",
    )
    page_size: int = setting("Tokens of a cache page.", 16)
    prefix_cache: bool = setting("Keep computed pages for prompts that start alike.", True)
    graphs: bool = setting(
        "Record the passes of a decode step when they are first needed, and replay them: as CUDA "
        "graphs on a GPU (for each tier and batch size), as TorchScript on the CPU.",
        True,
    )
    tensor_parallel_size: int = setting(
        "Processes that hold a part of the target each, and compute its passes together: one a "
        "GPU, or several on a CPU.",
        1,
        ("--tp", "--tp-size", "--tensor-parallel-size"),
    )
    tries: bool | None = setting(
        "Draft all texts of an output that is one of few as one tree, and forced text deeper than "
        "other drafts. By default on a GPU alone, where a verified row costs little."
    )
    threads: int | None = setting(
        "Threads of torch that a pass is computed with on the CPU; by default one for each 32 MiB "
        "of weights, at most the physical cores, less one where there are more than two, and never "
        "more than torch has been told."
    )
    lane_threads: int | None = setting(
        "Threads for grammar work; 0 runs it in the step's own thread. By default half the cores, "
        "or 0 in the serial mode."
    )
    mask_deadline_ms: float | None = setting(
        "Time for the masks of one request's drafts in a step, in ms; past it the step goes on "
        "without them. None, or 0 as a flag, is no limit. Needs lane_threads.",
        50.0,
    )
    mask_timeout_s: float = setting(
        "A request whose grammar has not returned from a call within so many seconds ends with an "
        "error; the others wait for it until then. Needs lane_threads.",
        10.0,
    )

    @classmethod
    def build(cls, **settings: Any) -> EngineConfig:
        """The config with ``settings``; ConfigError names an unknown or invalid one."""
        known = {f.name for f in fields(cls)}
        unread = [name for name in settings if name not in known]
        if unread:
            flags = [(flag, own) for own, told in helps(cls).items() for flag in told.flags]
            elsewhere = {flag.strip("-").replace("-", "_"): own for flag, own in flags}
            raise ConfigError(unknown("setting", unread[0], known, elsewhere | ELSEWHERE))
        config = cls(**settings)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError that names the first invalid setting."""
        if self.own_drafter is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                "algorithm: a drafter that is an object cannot be in several ranks' processes; "
                "give package.module:Class"
            )
        row = self.drafters
        for name in row:
            if ":" not in name:
                alone = ("none",) if len(row) == 1 else ()
                _one_of("algorithm", name, (*drafter_names(), *alone, "package.module:Class"))
            if row.count(name) > 1:
                raise ConfigError(f"algorithm: {name!r} is named twice; leave one out")
        _one_of("additional_properties", self.additional_properties, ADDITIONAL_PROPERTIES)
        _one_of("overlap", self.overlap, (AUTO_MODE, *OVERLAP_MODES))
        _one_of("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        self._check_acceptance()
        self._check_adapters()
        for name, low in LEAST.items():
            value = getattr(self, name)
            # What is None by default may be.
            if value is None and getattr(type(self), name) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer >= {low}: {value!r}")
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ConfigError("chunked_prefill_size must hold at least one page (page_size)")
        for name in (
            "mask_deadline_ms", "mask_timeout_s", "grammar_compile_timeout_s", "tpot_slo_ms"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be over 0: {value!r}")
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"mem_fraction_static must be between 0 and 1: {fraction!r}")

    def _check_adapters(self) -> None:
        names = [module.partition("=")[0] for module in self.lora_modules]
        for module, name in zip(self.lora_modules, names, strict=True):
            if not all(module.partition("=")) or not name.isprintable() or name != name.strip():
                raise ConfigError(f"lora_modules must be name=path: {module!r}")
            if names.count(name) > 1:
                raise ConfigError(f"lora_modules: {name!r} is named twice")
        if names and not (Path(__file__).parent / "models" / "lora.py").exists():
            raise ConfigError(
                "lora_modules needs overlap_spec/models/lora.py, which is not there: leave it out, "
                "or install overlap-spec again"
            )
        if names and self.tensor_parallel_size > 1:
            raise ConfigError("lora_modules: adapters are not cut: set tensor_parallel_size to 1")

    def _check_acceptance(self) -> None:
        for name in ("threshold_single", "threshold_acc"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number from 0 to 1: {value!r}")
        if not isinstance(self.relaxed_delta, int | float) or not 0 <= self.relaxed_delta < 1e9:
            raise ConfigError(f"relaxed_delta must be a number >= 0: {self.relaxed_delta!r}")
        if self.threshold_acc == 0:
            raise ConfigError("threshold_acc must be over 0")
        if self.relaxed_delta and not self.relaxed_topk:
            raise ConfigError("relaxed_delta needs relaxed_topk, which is 0")

    @property
    def by_threshold(self) -> bool:
        """Whether sampled requests accept drafts by their probability, and so not those alone that
        plain decoding would choose."""
        return min(self.threshold_single, self.threshold_acc) < 1

    @property
    def lanes(self) -> int:
        """Threads of the grammar lane."""
        if self.lane_threads is not None:
            return self.lane_threads
        return 0 if self.overlap == "none" else max(1, (os.cpu_count() or 2) // 2)

    @property
    def target_path(self) -> Path:
        """Folder of the target; CheckpointError as :func:`overlap_spec.hub.find_folder` has it."""
        return find_folder(self.model) if self.model is not None else EMBEDDED / "target"

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters by their names."""
        pairs = (module.partition("=") for module in self.lora_modules)
        return {name: Path(path) for name, _, path in pairs}

    @property
    def drafter(self) -> str:
        """Name of the drafter, ``none`` where nothing is drafted; of an object its class's."""
        if self.algorithm is None:
            if self.draft is not None or self.model is None:
                return "eagle3"
            there = all((DRAFTERS / f"{name}.py").exists() for name in HEADLESS_FILES)
            return HEADLESS if there else "none"
        if self.own_drafter is not None:
            given = self.own_drafter
            kind = given if isinstance(given, type) else type(given)
            return f"{kind.__module__}:{kind.__qualname__}"
        row = [name.strip() for name in self.algorithm.split(",")]
        return ",".join(n if ":" in n else n.lower().replace("-", "_") for n in row)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters in a row, or of the only one."""
        return tuple(self.drafter.split(","))

    @property
    def own_drafter(self) -> Any:
        """The drafter that is given as an object or a class in place of a name; else None."""
        given: Any = self.algorithm
        return None if given is None or isinstance(given, str) else given

    @property
    def draft_path(self) -> Path | None:
        """Folder of the draft head, if there is one; errors as for :attr:`target_path`."""
        if self.draft is not None:
            return find_folder(self.draft)
        kind = "draft_model" if "draft_model" in self.drafters else "eagle3"
        return EMBEDDED / kind if self.model is None else None


def drafter_names() -> tuple[str, ...]:
    """The drafters that have a file."""
    support = {"__init__", "base", "grafts", "head_drafter", "marginals", "registry", "row"}
    support |= {"sound", "states", "text_pool", "tree_drafter"}
    return tuple(sorted(f.stem for f in DRAFTERS.glob("*.py") if f.stem not in support))


def _one_of(name: str, value: str, built: tuple[str, ...]) -> None:
    if value not in built:
        raise ConfigError(f"{name} must be one of {', '.join(built)}: {value!r}")


def own_class(name: str, kind: Any, setting: str) -> Any:
    """The class ``package.module:Class``, which is a ``kind``; of ``package.module`` the only one
    that it has. ConfigError, which names the setting: it is none, or not there."""
    module, _, wanted = name.partition(":")
    try:
        file = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{setting} {name!r}: {error}") from error
    if not wanted:
        types = (x for x in vars(file).values() if isinstance(x, type) and issubclass(x, kind))
        (only,) = (x for x in types if x.__module__ == module and not inspect.isabstract(x))
        return only
    found = getattr(file, wanted, None)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{setting} {name!r}: {wanted} is no {kind.__name__} of {module}")
    return found
