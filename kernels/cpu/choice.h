// The target's choice under mask rows: kernels/sampling.py defines it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lanes.h"
#include "tensors.h"

namespace choice {

using at::Tensor;
using namespace lanes;

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The mask row of each row of logits, null where it has none.
struct Masks {
  const int32_t* bits;
  int64_t words;
  const int64_t* places;

  Masks(const std::optional<Tensor>& rows, const std::optional<Tensor>& places)
      : bits(rows ? data<int32_t>(*rows) : nullptr), words(rows ? rows->size(1) : 0),
        places(rows && places ? data<int64_t>(*places) : nullptr) {
    TORCH_CHECK(!rows || rows->is_contiguous(), "rows: contiguous");
    TORCH_CHECK(!places || places->is_contiguous(), "places: contiguous");
  }

  const int32_t* of(int64_t row) const {
    int64_t place = places ? places[row] : row;
    return bits && place >= 0 ? bits + place * words : nullptr;
  }
};

// Of the tokens from `token` on, all bits where one is allowed.
inline Ints allowed(const int32_t* bits, int64_t token) {
  Ints lane = numbers() + static_cast<int32_t>(token % 32);
  return ((bits[token / 32] - Ints{}) >> lane & 1) != 0;
}

inline Ints inside(int64_t token, int64_t size) {
  return numbers() < static_cast<int32_t>(std::min(LANES, size - token));
}

// The standard exponentials of tokens under a key of the noise.
inline Floats exponentials(int64_t key, Ints tokens) {
  typedef uint32_t Words __attribute__((vector_size(sizeof(Ints))));
  Words bits = (Words)tokens ^ static_cast<uint32_t>(key);
  bits = (bits ^ bits >> 16) * 0x7feb352du;
  bits = (bits ^ bits >> 15 ^ static_cast<uint32_t>(key >> 32)) * 0x846ca68bu;
  // The sign goes along.
  Ints drawn = ((Ints)bits ^ (Ints)bits >> 16) & 0x7fffffff;
  Floats x = __builtin_convertvector(drawn, Floats) * 0x1p-31f + 0x1p-32f;
  x = lanes::choose(x < 1 - 0x1p-24f, x, all(1 - 0x1p-24f));
  // -log(1 - x): near 0 a logarithm of what is near 1 would lose x's bits.
  Floats ratio = x / (2.0f - x), square = ratio * ratio;
  Floats small = 2.0f * ratio * (1.0f + square * (1 / 3.f + square * (1 / 5.f + square * (1 / 7.f))));
  return lanes::choose(x < 0.25f, small, -log(1.0f - x));
}

// The largest of a row's numbers, the first of equal ones.
struct Largest {
  Floats best = all(NEVER);
  Ints found = {};

  void add(Floats x, Ints counted, int64_t token) {
    Ints larger = (x > best) & counted;
    best = lanes::choose(larger, x, best);
    found = (larger & static_cast<int32_t>(token)) | (~larger & found);
  }

  // Its place; -1 where none is over `least`.
  int64_t token(float least) const {
    float largest = most(best);
    int64_t first = -1;
    for (int64_t lane = 0; lane < LANES && largest > least; ++lane) {
      int64_t token = found[lane] + lane;
      if (best[lane] == largest && (first < 0 || token < first)) first = token;
    }
    return first;
  }
};

// A token by its rank: the likeliest first, the lower one of equals.
struct Ranked {
  float weight;
  int64_t token;

  bool operator<(const Ranked& other) const {
    return weight > other.weight || (weight == other.weight && token < other.token);
  }
};

// The calling thread's room for a row of numbers, until it asks again.
inline float* scratch(int64_t size) {
  static thread_local std::vector<float> numbers;
  numbers.resize(size);
  return numbers.data();
}

// A row's weights by size: as integers floats over 0 are in the same order.
class Ranking {
 public:
  // `weights (size,)`: 0 for what cannot be chosen, and none below.
  Ranking(const float* weights, int64_t size) : weights_(weights), size_(size) {
    for (int64_t token = 0; token < size; ++token) {
      ++counts_[bucket(weights[token])];
      sums_[bucket(weights[token])] += weights[token];
    }
    // Where the zeros are, and nothing else: exp makes no smaller numbers than the normal ones.
    counts_[0] = 0;
  }

  // The last token that top-k, and then top-p of the rest, keep.
  Ranked last_kept(int64_t top_k, float top_p) const {
    Ranked last{0, size_};
    double total = 0;
    int64_t rank = 0;
    for (int at = BUCKETS - 1; at >= 0 && rank < top_k; rank += counts_[at--])
      if (rank + counts_[at] >= top_k) {
        std::vector<Ranked> tokens = sorted(at);
        tokens.resize(top_k - rank);
        for (const Ranked& each : tokens) total += each.weight;
        last = tokens.back();
      } else {
        total += sums_[at];
      }
    double before = 0, limit = top_p * total;
    for (int at = BUCKETS - 1; at >= 0 && top_p < 1; before += sums_[at--])
      if (counts_[at] && before + sums_[at] >= limit) {
        std::vector<Ranked> tokens = sorted(at);
        size_t kept = 1;
        for (before += tokens[0].weight; kept < tokens.size() && before < limit; ++kept)
          before += tokens[kept].weight;
        return std::min(last, tokens[kept - 1]);
      }
    return last;
  }

 private:
  static constexpr int BUCKETS = 4096;

  static int bucket(float weight) { return std::bit_cast<int32_t>(weight) >> 19; }

  std::vector<Ranked> sorted(int at) const {
    std::vector<Ranked> tokens;
    tokens.reserve(counts_[at]);
    for (int64_t token = 0; token < size_; ++token)
      if (bucket(weights_[token]) == at)
        tokens.push_back({weights_[token], token});
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }

  const float* weights_;
  int64_t size_;
  std::array<int64_t, BUCKETS> counts_{};
  std::array<double, BUCKETS> sums_{};
};

// The token of the largest weight over its noise, `weigh(token)` giving a vector of weights; -1
// where all are 0.
template <typename Weigh>
int64_t draw(int64_t size, int64_t key, const Weigh& weigh) {
  Largest largest;
  for (int64_t token = 0; token < size; token += LANES) {
    Floats weights = weigh(token);
    Ints counted = weights > 0;
    if (any(counted))
      largest.add(weights / exponentials(key, numbers() + static_cast<int32_t>(token)), counted, token);
  }
  return largest.token(0);
}

// One row of logits, and what may be chosen in it.
template <typename T>
struct Row {
  const T* logits;
  int64_t size;
  const int32_t* bits;

  Ints counted(int64_t token) const {
    Ints within = inside(token, size);
    return bits ? within & allowed(bits, token) : within;
  }

  // The best token and its logit: -1 for a row without any, and -2 for one that holds NaN.
  Ranked best() const {
    Largest largest;
    Ints broken = {};
    for (int64_t token = 0; token < size; token += LANES) {
      Floats x = load(logits + token, size - token);
      broken |= x != x;
      largest.add(x, counted(token), token);
    }
    if (any(broken)) return {NEVER, -2};
    return {most(largest.best), largest.token(NEVER)};
  }

  // Odds of the tokens from `token` on, at a temperature over 0: 1 of one with the logit `best`.
  Floats weights(int64_t token, float best, float heat) const {
    Ints here = counted(token);
    if (!any(here)) return Floats{};
    return lanes::choose(here, lanes::exp((load(logits + token, size - token) - best) / heat), Floats{});
  }

  // A draw at a temperature over 0; `best` is the best token's logit.
  int64_t drawn(float best, float heat, int64_t key) const {
    return draw(size, key, [&](int64_t token) { return weights(token, best, heat); });
  }

  int64_t drawn(float best, float heat, int64_t key, int64_t top_k, float top_p, float min_p) const {
    if (top_k >= size && top_p >= 1 && min_p <= 0) return drawn(best, heat, key);
    float* found = scratch(size);
    for (int64_t token = 0; token < size; token += LANES) {
      Floats odds = weights(token, best, heat);
      // What is no number, beside an infinite logit, is not chosen.
      store(found + token, lanes::choose(odds > 0, odds, Floats{}), size - token);
    }
    Ranked last = Ranking(found, size).last_kept(top_k, top_p);
    // The best one's weight is 1.
    float least = std::min(min_p, 1.0f);
    return draw(size, key, [&](int64_t token) {
      Floats x = load(found + token, size - token);
      Ints tied = numbers() <= static_cast<int32_t>(last.token - token);
      Ints kept = ((x > last.weight) | ((x == last.weight) & tied)) & (x >= least);
      return lanes::choose(kept, x, Floats{});
    });
  }
};

Tensor masked_choose(const Tensor& given, const std::optional<Tensor>& rows,
                     const std::optional<Tensor>& places, const std::optional<Tensor>& temperature,
                     const std::optional<Tensor>& keys, const std::optional<Tensor>& top_k,
                     const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p) {
  Tensor logits = given.contiguous(), heats, noise, k, p, least;
  int64_t count = logits.size(0), size = logits.size(1);
  Tensor chosen = at::empty({count}, logits.options().dtype(at::kLong));
  Masks masks(rows, places);
  if (temperature && keys) {
    heats = temperature->contiguous().to(at::kFloat);
    noise = keys->contiguous();
    TORCH_CHECK(noise.scalar_type() == at::kLong, "keys: int64");
  }
  if (top_k && top_p && min_p) {
    k = top_k->contiguous(), p = top_p->contiguous().to(at::kFloat);
    least = min_p->contiguous().to(at::kFloat);
    TORCH_CHECK(k.scalar_type() == at::kLong, "top_k: int64");
  }
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    ::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Row<T> row{data<T>(logits) + i * size, size, masks.of(i)};
        Ranked best = row.best();
        float heat = noise.defined() ? data<float>(heats)[i] : 0;
        if (best.token >= 0 && heat > 0) {
          int64_t key = data<int64_t>(noise)[i];
          int64_t token = k.defined() ? row.drawn(best.weight, heat, key, data<int64_t>(k)[i],
                                                  data<float>(p)[i], data<float>(least)[i])
                                      : row.drawn(best.weight, heat, key);
          // Nothing has odds beside an infinite logit.
          if (token >= 0) best.token = token;
        }
        into<int64_t>(chosen)[i] = best.token;
      }
    });
  });
  return chosen;
}

void apply_bitmask(const Tensor& logits, const Tensor& rows, const std::optional<Tensor>& places) {
  TORCH_CHECK(logits.stride(1) == 1, "logits: rows without gaps");
  int64_t size = logits.size(1);
  Masks masks(rows, places);
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    ::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int32_t* bits = masks.of(row);
        T* to = into<T>(logits) + row * logits.stride(0);
        for (int64_t token = 0; bits && token < size; token += LANES) {
          Floats x = load(to + token, size - token);
          // What is no number stays none.
          store(to + token, lanes::choose(allowed(bits, token), x, x + NEVER), size - token);
        }
      }
    });
  });
}

void apply_penalties(const Tensor& logits, const Tensor& counts, const Tensor& in_prompt,
                     const Tensor& repetition, const Tensor& presence, const Tensor& frequency) {
  int64_t size = logits.size(1);
  for (const Tensor& each : {logits, counts, in_prompt, repetition, presence, frequency})
    TORCH_CHECK(each.is_contiguous(), "penalties: rows without gaps");
  TORCH_CHECK(counts.scalar_type() == at::kInt && in_prompt.scalar_type() == at::kBool,
              "output_counts: int32, in_prompt: bool");
  for (const Tensor& each : {logits, repetition, presence, frequency})
    TORCH_CHECK(each.scalar_type() == at::kFloat, "logits and penalties: float32");
  ::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = into<float>(logits) + row * size;
      const float* outputs = data<float>(counts) + row * size;
      const uint8_t* prompts = data<uint8_t>(in_prompt) + row * size;
      float factor = data<float>(repetition)[row], once = data<float>(presence)[row],
            each = data<float>(frequency)[row];
      for (int64_t token = 0; token < size; token += LANES) {
        int64_t count = size - token;
        Ints output = (Ints)load(outputs + token, count), is_output = output > 0;
        Ints seen = is_output | (load_bytes(prompts + token, count) > 0);
        if (!any(seen)) continue;
        Floats x = load(to + token, count);
        x = lanes::choose(seen, lanes::choose(x > 0, x / factor, x * factor), x);
        x -= lanes::choose(is_output, all(once), Floats{});
        store(to + token, x - each * __builtin_convertvector(output, Floats), count);
      }
    }
  });
}

}  // namespace choice
