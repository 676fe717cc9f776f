"""MiMo: Qwen2 with next-token modules, which the drafter ``mtp`` reads."""

from overlap_spec.models.architectures.qwen2 import describe

ARCHITECTURE = "MiMoForCausalLM"

__all__ = ["ARCHITECTURE", "describe"]
