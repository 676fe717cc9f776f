"""TensorRT-LLM's names for speculative decoding: its ``*DecodingConfig`` as settings of an engine.

``Engine(model, **EagleDecodingConfig(max_draft_len=3, speculative_model=head))`` drafts as that
library would, and ``overlap-spec serve --config FILE`` takes a ``speculative_config`` of its YAML
files. A draft is a chain of ``max_draft_len`` tokens there, at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap_spec.errors import ConfigError, unknown

# ``decoding_type`` → drafter. Theirs is EAGLE-3 alone.
DRAFTERS = {
    "eagle": "eagle3", "eagle3": "eagle3", "mtp": "mtp", "ngram": "ngram",
    "drafttarget": "draft_model", "userprovided": None,
}  # fmt: skip
NAMES = {
    "max_draft_len": "num_steps",
    "speculative_model": "draft",
    "speculative_model_dir": "draft",
    "max_matching_ngram_size": "ngram_max_matching_size",
    "is_public_pool": "ngram_public_pool",
    "is_keep_all": "ngram_keep_all",
    "is_use_oldest": "ngram_use_oldest",
    "relaxed_topk": "relaxed_topk",
    "relaxed_delta": "relaxed_delta",
    "drafter": "algorithm",
}
# What says how that library runs a drafter, and asks for nothing here.
UNREAD = ("eagle3_one_model", "resource_manager")
# Ours besides.
TYPE, MODULES = "decoding_type", "num_nextn_predict_layers"
RELAXED = "use_relaxed_acceptance_for_thinking"


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an engine from a ``speculative_config``: ``decoding_type`` and the fields of that
    type's class. ConfigError names a field or value that is unknown or has no counterpart."""
    known = {*NAMES, *UNREAD, TYPE, MODULES, RELAXED}
    for name in config:
        if name not in known:
            raise ConfigError(unknown("field of speculative_config", name, known))
    kind = str(config.get(TYPE, "")).lower().replace("_", "")
    if kind not in DRAFTERS:
        raise ConfigError(
            "speculative_config: decoding_type must be one of Eagle, MTP, NGram, DraftTarget, "
            f"User_Provided: {config.get(TYPE)!r}"
        )
    settings: dict[str, Any] = {"adaptive": "static", "algorithm": DRAFTERS[kind]}
    settings |= {NAMES[name]: value for name, value in config.items() if name in NAMES}
    if settings["algorithm"] is None:
        raise ConfigError("speculative_config: User_Provided needs drafter, an object or a class")
    steps, modules = settings.get("num_steps"), config.get(MODULES)
    if modules is not None and steps is not None and modules > steps:
        raise ConfigError(f"speculative_config: {MODULES} {modules} is over max_draft_len {steps}")
    if not config.get(RELAXED, True):
        settings.pop("relaxed_topk", None)
        settings.pop("relaxed_delta", None)
    return settings


def _of_type(kind: str) -> Callable[..., dict[str, Any]]:
    def settings(**fields: Any) -> dict[str, Any]:
        """Settings of an engine from the fields of this class."""
        return settings_of({TYPE: kind, **fields})

    return settings


# EAGLE-3, and a smaller model: ``max_draft_len``, ``speculative_model``.
EagleDecodingConfig = _of_type("Eagle")
DraftTargetDecodingConfig = _of_type("DraftTarget")
# The target's own modules: ``max_draft_len``, and MODULES, RELAXED, ``relaxed_topk``,
# ``relaxed_delta``.
MTPDecodingConfig = _of_type("MTP")
# Look-up: ``max_draft_len``, ``max_matching_ngram_size``, ``is_public_pool``, ``is_keep_all``,
# ``is_use_oldest``.
NGramDecodingConfig = _of_type("NGram")
# A drafter of one's own: ``max_draft_len``, ``drafter``.
UserProvidedDecodingConfig = _of_type("User_Provided")
