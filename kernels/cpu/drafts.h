// What a draft step does beside its layers: the best next tokens, and grammars' states behind them.
// kernels/sampling.py and kernels/states.py define it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "lanes.h"
#include "tensors.h"

namespace drafts {

using at::Tensor;
using namespace lanes;

// Logits that are worth a thread.
constexpr int64_t GRAIN = 1 << 14;

// The `count` largest numbers of a row, descending.
struct Best {
  float* scores;
  int64_t *ids, count;

  void add(float score, int64_t id) const {
    int64_t at = count - 1;
    for (; at > 0 && scores[at - 1] < score; --at) {
      scores[at] = scores[at - 1];
      ids[at] = ids[at - 1];
    }
    scores[at] = score;
    ids[at] = id;
  }
};

template <typename T>
void find_best(const T* row, int64_t size, const Best& best) {
  // Of what is no number, or no token, the first ones stand.
  std::fill_n(best.scores, best.count, -std::numeric_limits<float>::infinity());
  std::iota(best.ids, best.ids + best.count, 0);
  for (int64_t i = 0; i < size; i += LANES) {
    Floats x = load(row + i, size - i);
    Ints larger = x > all(best.scores[best.count - 1]);
    int32_t any = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) any |= larger[lane];
    for (int64_t lane = 0; any && lane < std::min(LANES, size - i); ++lane)
      if (x[lane] > best.scores[best.count - 1]) best.add(x[lane], i + lane);
  }
  Floats sums = {};
  for (int64_t i = 0; i < size; i += LANES) {
    Floats some = lanes::exp(load(row + i, size - i) - best.scores[0]);
    if (size - i < LANES)
      for (int64_t lane = size - i; lane < LANES; ++lane) some[lane] = 0;
    sums += some;
  }
  float scale = best.scores[0] + std::log(sum(sums));
  for (int64_t i = 0; i < best.count; ++i) best.scores[i] -= scale;
}

std::tuple<Tensor, Tensor> top_candidates(const Tensor& given, int64_t count,
                                          const std::optional<Tensor>& offsets) {
  Tensor logits = given.contiguous();
  int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(count <= size, "count: more than there are tokens");
  Tensor scores = at::empty({rows, count}, logits.options().dtype(at::kFloat));
  Tensor ids = at::empty({rows, count}, logits.options().dtype(at::kLong));
  const int64_t* moved = offsets.has_value() ? data<int64_t>(*offsets) : nullptr;
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    ::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        Best best{into<float>(scores) + r * count, into<int64_t>(ids) + r * count, count};
        find_best(data<T>(logits) + r * size, size, best);
        for (int64_t i = 0; moved && i < count; ++i) best.ids[i] += moved[best.ids[i]];
      }
    });
  });
  return {scores, ids};
}

Tensor after_tokens(const Tensor& moves, const Tensor& given, const Tensor& texts,
                    const Tensor& asked) {
  Tensor states = given.contiguous(), tokens = asked.contiguous();
  for (const Tensor& each : {moves, states, texts})
    TORCH_CHECK(each.scalar_type() == at::kInt, "moves, states and texts: int32");
  TORCH_CHECK(tokens.scalar_type() == at::kLong, "tokens: int64");
  TORCH_CHECK(moves.is_contiguous() && texts.is_contiguous(), "tables: contiguous");
  Tensor out = at::empty({states.size(0)}, states.options());
  int64_t length = texts.size(1), count = moves.size(0), vocabulary = texts.size(0);
  for (int64_t n = 0; n < states.size(0); ++n) {
    int64_t token = data<int64_t>(tokens)[n], state = data<int32_t>(states)[n];
    TORCH_CHECK(token >= 0 && token < vocabulary, "tokens: outside of the vocabulary");
    const int32_t* text = data<int32_t>(texts) + token * length;
    for (int64_t i = 0; i < length; ++i) {
      int64_t at = state + text[i];
      TORCH_CHECK(at >= 0 && at < count, "states: outside of the table");
      state = data<int32_t>(moves)[at];
    }
    into<int32_t>(out)[n] = static_cast<int32_t>(state);
  }
  return out;
}

}  // namespace drafts
