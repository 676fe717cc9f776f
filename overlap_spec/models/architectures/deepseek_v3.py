"""DeepSeek-V3 and R1: V2 with experts chosen by sigmoids and a bias, and next-token modules, which
the drafter ``mtp`` reads."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.architectures.deepseek_v2 import expect, latent_family, routed
from overlap_spec.models.config import ModelConfig

ARCHITECTURE = "DeepseekV3ForCausalLM"


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    expect(hf, "topk_method", "noaux_tc")
    expect(hf, "scoring_func", "sigmoid")
    experts = routed({"norm_topk_prob": True, **hf}, grouped=True, sigmoid=True, best=2)
    interleaved = bool(hf.get("rope_interleave", True))
    return latent_family(hf, experts, interleaved)
