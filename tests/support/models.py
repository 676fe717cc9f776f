"""Small random checkpoints of each architecture, and the smallest owner of their keys."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from overlap_spec.kernels import KeySpan, tree_attention
from overlap_spec.models.decoder import Decoder, Heads, Latents
from overlap_spec.models.delta import Flow
from overlap_spec.worker.state_pool import ChunkStates, StatePool, TreeStates
from tests.support.checkpoints import write_tokenizer

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
# As of a file, small enough for many requests.
HYBRID = {
    **DELTA, **SHARED, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
}  # fmt: skip
V3 = {
    **LATENT, "topk_group": 2, "n_group": 4, "q_lora_rank": 20, "num_nextn_predict_layers": 1,
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "routed_scaling_factor": 2.5,
}  # fmt: skip
# As of small targets that are trained, in our names.
TRAINED = {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "max_position": 512,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0}
# A base so low that few positions turn all channels.
SLOW = {"rope_type": "default", "rope_theta": 50.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
        "factor": 2.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
        "factor": 2.0}}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 6}),
    "gemma2-caps": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 0.7, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 6, "head_dim": 16, "pad_token_id": 0}),
    "phi4-partial": (
        "Phi3",
        {
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2, 2.0],
                "long_factor": [1.5, 3.0, 9.0],
            },
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse": ("Qwen3Moe", {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 6, "swiglu_limit": 0.9, "pad_token_id": 0,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36,
        "mlp_only_layers": [1]}),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.2}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0, "rope_parameters": SLOW}),
    "smollm3-window": ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True, "sliding_window": 6, "rope_parameters": SLOW}),
    "glm": ("Glm", {"head_dim": 12, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 12, "pad_token_id": 0}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-12b": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-plus": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "cohere2": ("Cohere2", {"sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": SLOW}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "falcon-7b": ("Falcon", {}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon2": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1}),
    "falcon-all-heads": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True,
        "ffn_hidden_size": 96}),
    "gpt2": ("GPT2", {}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED, "mlp_only_layers": [1]}),
    "qwen3-next-even": ("Qwen3Next", {**DELTA, **SHARED, "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3, "layer_types": ["full_attention", "linear_attention"] * 2,
        "norm_topk_prob": False, "attention_bias": True}),
    "qwen3.5": ("Qwen3_5", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **SHARED}),
    # As V2-Lite: queries of the stream, experts chosen freely.
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2,
        "attention_bias": True, "rope_parameters": MSCALE}),
    "deepseek-v2-groups": ("DeepseekV2", {**LATENT, "q_lora_rank": 20,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "rope_parameters": {**MSCALE, "mscale": 0.7}}),
    # As Moonlight: no latents of queries, one group.
    "deepseek-v3-halves": ("DeepseekV3", {**LATENT, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False, "norm_topk_prob": False,
        "attention_bias": True}),
}  # fmt: skip
# Files that are those of text models.
CONFIGS = {"Gemma3": "Gemma3Text", "Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}
CLASSES = {"GPT2": "GPT2LMHeadModel"}


def architecture(family: str) -> str:
    """Name of the class in `transformers`, and in ``config.json``."""
    return CLASSES.get(family, f"{family}ForCausalLM")


def reference(case: str, path: Path, shard: str = "5GB", **fields: Any) -> Any:
    """A random model of `transformers` as a case has it but for ``fields``; its file is in
    ``path``."""
    import transformers

    family, extra = CASES[case]
    config = getattr(transformers, f"{CONFIGS.get(family, family)}Config")
    config = config(**{**SMALL, **extra, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, architecture(family))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_().mul_(0.05)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def of_bytes(case: str, folder: Path, **fields: Any) -> Any:
    """As :func:`reference`, with a vocabulary of bytes and its tokenizer."""
    model = reference(case, folder, vocab_size=260, **fields)
    write_tokenizer(folder)
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The plain way: the whole text again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Cache:
    """The smallest owner of paged keys: `run` one rectangle of queries through the decoder."""

    def __init__(self, decoder: Decoder, tokens: int, page_size: int = 4) -> None:
        config = decoder.config
        pages = -(-tokens // page_size)
        shape = config.num_layers, pages, page_size, config.own_kv_heads
        self.decoder, self.k = decoder, torch.zeros(*shape, config.head_dim)
        self.v = torch.zeros(*shape, config.value_dim)
        # Pages in a shuffled order, so that logical and physical positions differ.
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.page_size, self.states = page_size, None
        if config.delta is not None:
            self.states = StatePool(config.delta, 1, 0, torch.float32, self.k.device)
            self.states.allocate()

    def run(
        self,
        tokens: torch.Tensor,
        start: int,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        count = tokens.shape[0]
        logical = torch.arange(start, start + count)
        slots = self.table[logical // self.page_size] * self.page_size + logical % self.page_size
        positions = logical if positions is None else positions
        span = KeySpan(self.table[None], torch.tensor([start]), positions, mask)
        config, states = self.decoder.config, self._states(tokens, start, mask)

        def attend(layer: int, heads: Heads | Latents | Flow) -> torch.Tensor:
            if isinstance(heads, Flow):
                assert states is not None
                return states(layer, heads)
            k, v = self.k[layer], self.v[layer]
            q = heads.store(k, v, slots)
            return tree_attention(q, k, v, span, config.window(layer), heads.scoring)

        return self.decoder.logits(self.decoder(tokens, positions, attend)[0])

    def _states(
        self, tokens: torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> ChunkStates | TreeStates | None:
        """What layers without keys call: a tree leaves their states as they are."""
        if self.states is None:
            return None
        row = torch.zeros(1, dtype=torch.int64)
        if mask is not None:
            return TreeStates(self.states, row, mask[None])
        size = torch.tensor([len(tokens)])
        chunk = SimpleNamespace(
            tokens=tokens, lengths=(len(tokens),), rows=row, starts=row + start, sizes=size,
            offsets=torch.tensor([0, len(tokens)]), states=row, kept=(),
            **dict.fromkeys(("kept_ends", "kept_chunks", "kept_slots"), row[:0]),
        )  # fmt: skip
        return ChunkStates(self.states, chunk)  # type: ignore[arg-type]
