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

#include "choice.h"
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
    if (!any(larger)) continue;
    for (int64_t lane = 0; lane < std::min(LANES, size - i); ++lane)
      if (x[lane] > best.scores[best.count - 1]) best.add(x[lane], i + lane);
  }
}

// The sum of a row's odds `odds(i)`, each a vector, those of no token left out.
template <typename Odds>
float summed(int64_t size, const Odds& odds) {
  Floats sums = {};
  for (int64_t i = 0; i < size; i += LANES)
    sums += lanes::choose(choice::inside(i, size), odds(i), Floats{});
  return sum(sums);
}

template <typename T>
void find_probable(const T* row, int64_t size, const Best& best) {
  find_best(row, size, best);
  float first = best.scores[0];
  float total = summed(size, [&](int64_t i) { return lanes::exp(load(row + i, size - i) - first); });
  for (int64_t i = 0; i < best.count; ++i) best.scores[i] -= first + std::log(total);
}

// The odds over the noise that the target's choice has, at a temperature over 0; `moved` as the
// offsets are.
template <typename T>
void find_drawn(const T* row, int64_t size, float heat, int64_t key, const int64_t* moved,
                const Best& best) {
  choice::Row<T> tokens{row, size, nullptr};
  choice::Largest largest;
  for (int64_t i = 0; i < size; i += LANES)
    largest.add(load(row + i, size - i), tokens.counted(i), i);
  float first = most(largest.best), *odds = choice::scratch(size);
  for (int64_t i = 0; i < size; i += LANES) {
    Ints named = numbers() + static_cast<int32_t>(i);
    for (int64_t lane = 0; moved && lane < std::min(LANES, size - i); ++lane)
      named[lane] += static_cast<int32_t>(moved[i + lane]);
    store(odds + i, tokens.weights(i, first, heat) / choice::exponentials(key, named), size - i);
  }
  find_best(odds, size, best);
  float total = summed(size, [&](int64_t i) { return load(odds + i, size - i); });
  for (int64_t i = 0; i < best.count; ++i) best.scores[i] = std::log(best.scores[i] / total);
}

std::tuple<Tensor, Tensor> top_candidates(const Tensor& given, int64_t count,
                                          const std::optional<Tensor>& offsets,
                                          const std::optional<Tensor>& temperature,
                                          const std::optional<Tensor>& keys) {
  Tensor logits = given.contiguous(), heats, noise;
  int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(count <= size, "count: more than there are tokens");
  if (temperature && keys) heats = temperature->contiguous().to(at::kFloat), noise = keys->contiguous();
  Tensor scores = at::empty({rows, count}, logits.options().dtype(at::kFloat));
  Tensor ids = at::empty({rows, count}, logits.options().dtype(at::kLong));
  const int64_t* moved = offsets.has_value() ? data<int64_t>(*offsets) : nullptr;
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    ::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        Best best{into<float>(scores) + r * count, into<int64_t>(ids) + r * count, count};
        const T* row = data<T>(logits) + r * size;
        float heat = noise.defined() ? data<float>(heats)[r] : 0;
        if (heat > 0)
          find_drawn(row, size, heat, data<int64_t>(noise)[r], moved, best);
        else
          find_probable(row, size, best);
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
