// The kernels of one processor, as operations of torch.

#include <torch/library.h>

#include "choice.h"
#include "drafts.h"
#include "experts.h"
#include "layers.h"
#include "products.h"

// No operations of torch's, which would take longer than what they do.
extern "C" int overlap_spec_team() { return Team::members(); }
extern "C" int overlap_spec_set_team(int members) { return std::exchange(Team::members(), members); }

TORCH_LIBRARY(overlap_spec, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("gelu_and_mul(Tensor x) -> Tensor");
  m.def("rotate_and_store(Tensor qkv, Tensor rotary, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor slots, Tensor? weight, float eps) -> Tensor");
  m.def("tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor pages, Tensor prefix, "
        "Tensor positions, Tensor? mask, Tensor? offsets, int first, int? window, float? scale, "
        "float? soft_cap, Tensor? sinks) -> Tensor");
  m.def("top_candidates(Tensor logits, int count, Tensor? offsets, Tensor? temperature, "
        "Tensor? keys) -> (Tensor, Tensor)");
  m.def("masked_choose(Tensor logits, Tensor? rows, Tensor? places, Tensor? temperature, "
        "Tensor? keys, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor");
  m.def("apply_penalties(Tensor(a!) logits, Tensor output_counts, Tensor in_prompt, "
        "Tensor repetition, Tensor presence, Tensor frequency) -> ()");
  m.def("apply_bitmask(Tensor(a!) logits, Tensor rows, Tensor? places) -> ()");
  m.def("after_tokens(Tensor moves, Tensor states, Tensor texts, Tensor tokens) -> Tensor");
  m.def("legal_candidates(Tensor logits, int k, Tensor states, Tensor moves, Tensor texts, "
        "Tensor few, Tensor? offsets, Tensor? draft_ids, Tensor? temperature, Tensor? keys, "
        "Tensor? scores, Tensor? ids) -> (Tensor, Tensor)");
  m.def("page_slots(Tensor pages, Tensor logical, int page_size) -> Tensor");
  m.def("lanes() -> int", [] { return lanes::LANES; });
  m.def("kept(Tensor weight) -> Tensor");
  m.def("pack(Tensor weight) -> Tensor");
  m.def("product(Tensor x, Tensor weight, Tensor? bias, int n) -> Tensor");
  m.def("int8_product(Tensor x, Tensor weight, Tensor scale, Tensor shift, Tensor? bias) -> Tensor");
  m.def("int4_product(Tensor x, Tensor codes, Tensor scales, Tensor zeros, Tensor? bias, int n) "
        "-> Tensor");
  m.def("mix_experts(Tensor x, Tensor ids, Tensor shares, Tensor up, Tensor down, Tensor? up_bias, "
        "Tensor? down_bias, float? limit) -> Tensor");
}

TORCH_LIBRARY_IMPL(overlap_spec, CPU, m) {
  m.impl("rms_norm", &layers::rms_norm);
  m.impl("add_rms_norm", &layers::add_rms_norm);
  m.impl("silu_and_mul", &layers::activate_and_mul<layers::silu>);
  m.impl("gelu_and_mul", &layers::activate_and_mul<layers::gelu>);
  m.impl("rotate_and_store", &layers::rotate_and_store);
  m.impl("tree_attention", &layers::tree_attention);
  m.impl("top_candidates", &drafts::top_candidates);
  m.impl("masked_choose", &choice::masked_choose);
  m.impl("apply_penalties", &choice::apply_penalties);
  m.impl("apply_bitmask", &choice::apply_bitmask);
  m.impl("after_tokens", &drafts::after_tokens);
  m.impl("legal_candidates", &drafts::legal_candidates);
  m.impl("page_slots", &layers::page_slots);
  m.impl("kept", &products::kept);
  m.impl("pack", &products::pack);
  m.impl("product", &products::product);
  m.impl("int8_product", &products::int8_product);
  m.impl("int4_product", &products::int4_product);
  m.impl("mix_experts", &experts::mix);
}
