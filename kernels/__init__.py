"""The operations of a step: each with one signature and a torch reference as its definition."""

from overlap_spec.kernels.attention import KeySpan, store_kv, tree_attention
from overlap_spec.kernels.elementwise import apply_rope, rms_norm, silu_and_mul
from overlap_spec.kernels.sampling import (
    apply_bitmask,
    apply_penalties,
    choose,
    coins,
    filter_probs,
    inverse_cdf,
)
from overlap_spec.kernels.tree import Accepted, Tree, accept_path, build_chain, build_tree, rerank

__all__ = [
    "Accepted",
    "KeySpan",
    "Tree",
    "accept_path",
    "apply_bitmask",
    "apply_penalties",
    "apply_rope",
    "build_chain",
    "build_tree",
    "choose",
    "coins",
    "filter_probs",
    "inverse_cdf",
    "rerank",
    "rms_norm",
    "silu_and_mul",
    "store_kv",
    "tree_attention",
]
