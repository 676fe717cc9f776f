"""The operations of a step: each with one signature and a torch reference as its definition.

On CUDA a Triton kernel with the same signature runs instead (``kernels/dispatch.py``).
"""

from overlap_spec.kernels.acceptance import accept_by_probability
from overlap_spec.kernels.attention import (
    KeySpan,
    Scoring,
    move_kv,
    pack_mask,
    page_slots,
    rotate_and_store,
    tree_attention,
)
from overlap_spec.kernels.elementwise import (
    add_rms_norm,
    apply_rope,
    gelu_and_mul,
    rms_norm,
    silu_and_mul,
)
from overlap_spec.kernels.experts import mix_experts
from overlap_spec.kernels.recurrence import (
    Tokens,
    Writes,
    convolve,
    delta_rule,
    inputs_after,
    path_taps,
    state_after,
    unit,
)
from overlap_spec.kernels.sampling import (
    Noise,
    apply_bitmask,
    apply_penalties,
    choose,
    coins,
    filter_probs,
    log_probs_among,
    masked_choose,
    noise_keys,
    sampled_probs,
    top_candidates,
)
from overlap_spec.kernels.states import (
    GrammarStanding,
    StateTables,
    after_tokens,
    legal_candidates,
)
from overlap_spec.kernels.tree import (
    Accepted,
    Grown,
    Selected,
    Tree,
    accept_path,
    build_chain,
    build_tree,
    grow,
    rerank,
    select_nodes,
)

__all__ = [
    "Accepted",
    "GrammarStanding",
    "Grown",
    "KeySpan",
    "Noise",
    "Scoring",
    "Selected",
    "StateTables",
    "Tokens",
    "Tree",
    "Writes",
    "accept_by_probability",
    "accept_path",
    "add_rms_norm",
    "after_tokens",
    "apply_bitmask",
    "apply_penalties",
    "apply_rope",
    "build_chain",
    "build_tree",
    "choose",
    "coins",
    "convolve",
    "delta_rule",
    "filter_probs",
    "gelu_and_mul",
    "grow",
    "inputs_after",
    "legal_candidates",
    "log_probs_among",
    "masked_choose",
    "mix_experts",
    "move_kv",
    "noise_keys",
    "pack_mask",
    "page_slots",
    "path_taps",
    "rerank",
    "rms_norm",
    "rotate_and_store",
    "sampled_probs",
    "select_nodes",
    "silu_and_mul",
    "state_after",
    "top_candidates",
    "tree_attention",
    "unit",
]
