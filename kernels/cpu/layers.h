// Norm, activation, rotation and attention of a decoder's layers: what kernels/elementwise.py and
// kernels/attention.py define, each in one call. Numbers are rounded where the definitions round.
//
// A row's numbers are added in an order that nothing beside it changes, and so are its keys.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "lanes.h"
#include "tensors.h"

namespace layers {

using at::Tensor;
using namespace lanes;

// Numbers that are worth a thread, and products of numbers.
constexpr int64_t GRAIN = 1 << 14, PRODUCTS = 1 << 17;
// Keys that are widened together, and heads of a group for which they are, at most.
constexpr int64_t KEYS = 32, HEADS = 8;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

int64_t grain(int64_t numbers, int64_t worth = GRAIN) {
  return std::max<int64_t>(1, worth / std::max<int64_t>(1, numbers));
}

// A norm's weight: of the rows' type, or of float32, which the product is then made in.
struct Weight {
  const void* rows;
  bool wide;
  int64_t count, size;
  float eps;

  Weight(const Tensor& weight, int64_t size, double eps)
      : rows(weight.const_data_ptr()), wide(weight.scalar_type() == at::kFloat),
        count(weight.numel() / size), size(size), eps(static_cast<float>(eps)) {
    TORCH_CHECK(weight.is_contiguous() && weight.size(-1) == size, "weight: a row's size");
    TORCH_CHECK(wide || weight.scalar_type() == at::kBFloat16, "weight: float32 or x's type");
  }
};

// A row that is normed in place, of numbers that T holds.
template <typename T>
void norm(float* row, int64_t number, const Weight& weight) {
  int64_t size = weight.size;
  Floats squares[2] = {};
  for (int64_t i = 0; i < size; i += LANES) {
    Floats x = load(row + i, size - i);
    Floats& square = squares[i / LANES % 2];
    square = lanes::fused(x, x, square);
  }
  float factor = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / size + weight.eps);
  int64_t start = number % weight.count * size;
  for (int64_t i = 0; i < size; i += LANES) {
    Floats x = load(row + i, size - i) * factor;
    if (weight.wide)
      x *= load(static_cast<const float*>(weight.rows) + start + i, size - i);
    else
      x = held<T>(x) * load(static_cast<const T*>(weight.rows) + start + i, size - i);
    store(row + i, held<T>(x), size - i);
  }
}

struct Scratch {
  std::vector<float> numbers;

  float* take(int64_t count) {
    if (static_cast<int64_t>(numbers.size()) < count) numbers.resize(count);
    return numbers.data();
  }
};

// `total` of x and residual, or x itself, and its norm.
template <typename T>
void norm_rows(const T* x, const T* residual, T* total, T* out, int64_t rows,
               const Weight& weight) {
  int64_t size = weight.size;
  ::parallel_for(0, rows, grain(size), [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* row = scratch.take(size);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < size; i += LANES) {
        Floats sum = load(x + r * size + i, size - i);
        if (residual) {
          sum = held<T>(sum + load(residual + r * size + i, size - i));
          store(total + r * size + i, sum, size - i);
        }
        store(row + i, sum, size - i);
      }
      norm<T>(row, r, weight);
      for (int64_t i = 0; i < size; i += LANES)
        store(out + r * size + i, load(row + i, size - i), size - i);
    }
  });
}

Tensor rms_norm(const Tensor& given, const Tensor& weight, double eps) {
  Tensor x = given.contiguous(), out = at::empty_like(x);
  Weight by(weight, x.size(-1), eps);
  typed(x, [&](auto kind) {
    using T = decltype(kind);
    norm_rows<T>(data<T>(x), nullptr, nullptr, into<T>(out), x.numel() / by.size, by);
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& given, const Tensor& other,
                                        const Tensor& weight, double eps) {
  Tensor x = given.contiguous(), residual = other.contiguous();
  TORCH_CHECK(x.sizes() == residual.sizes() && x.dtype() == residual.dtype(), "residual: like x");
  Tensor out = at::empty_like(x), total = at::empty_like(x);
  Weight by(weight, x.size(-1), eps);
  typed(x, [&](auto kind) {
    using T = decltype(kind);
    norm_rows<T>(data<T>(x), data<T>(residual), into<T>(total), into<T>(out),
                 x.numel() / by.size, by);
  });
  return {out, total};
}

Floats silu(Floats x) { return x / (1.0f + lanes::exp(-x)); }

// (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
Floats gelu(Floats x) {
  Floats twice = 1.5957691216f * lanes::fused(0.044715f * x * x, x, x);
  return x / (1.0f + lanes::exp(-twice));
}

template <Floats ACTIVATE(Floats)>
Tensor activate_and_mul(const Tensor& given) {
  Tensor x = given.contiguous();
  int64_t size = x.size(-1) / 2, rows = size ? x.numel() / (2 * size) : 0;
  auto sizes = x.sizes().vec();
  sizes.back() = size;
  Tensor out = at::empty(sizes, x.options());
  typed(x, [&](auto kind) {
    using T = decltype(kind);
    const T* from = data<T>(x);
    T* to = into<T>(out);
    ::parallel_for(0, rows, grain(4 * size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        for (int64_t i = 0; i < size; i += LANES) {
          Floats gate = load(from + 2 * r * size + i, size - i);
          Floats up = load(from + (2 * r + 1) * size + i, size - i);
          store(to + r * size + i, held<T>(ACTIVATE(gate)) * up, size - i);
        }
    });
  });
  return out;
}

Tensor rotate_and_store(const Tensor& given, const Tensor& turns, Tensor k_cache, Tensor v_cache,
                        const Tensor& places, const std::optional<Tensor>& norm_weight,
                        double eps) {
  Tensor qkv = given.contiguous(), rotary = turns.contiguous(), slots = places.contiguous();
  TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "caches: contiguous");
  TORCH_CHECK(slots.scalar_type() == at::kLong, "slots: int64");
  TORCH_CHECK(rotary.dtype() == qkv.dtype() && k_cache.dtype() == qkv.dtype() &&
                  v_cache.dtype() == qkv.dtype(),
              "rotary and caches: of the queries' type");
  int64_t rows = qkv.size(0), all_heads = qkv.size(1), dim = qkv.size(2), half = dim / 2;
  int64_t kv_heads = k_cache.size(2), turned = all_heads - kv_heads, heads = turned - kv_heads;
  int64_t room = k_cache.size(0) * k_cache.size(1);
  Tensor q = at::empty({rows, heads, dim}, qkv.options());
  std::optional<Weight> by;
  if (norm_weight.has_value()) by.emplace(*norm_weight, dim, eps);
  typed(qkv, [&](auto kind) {
    using T = decltype(kind);
    const T *from = data<T>(qkv), *angles = data<T>(rotary);
    const int64_t* slot = data<int64_t>(slots);
    T *queries = into<T>(q), *keys = into<T>(k_cache), *values = into<T>(v_cache);
    ::parallel_for(0, rows, grain(2 * all_heads * dim), [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      float* head = scratch.take(dim);
      for (int64_t t = begin; t < end; ++t) {
        TORCH_CHECK(slot[t] >= 0 && slot[t] < room, "slots: outside of the cache");
        const T *cos = angles + 2 * t * dim, *sin = cos + dim;
        for (int64_t h = 0; h < turned; ++h) {
          const T* x = from + (t * all_heads + h) * dim;
          for (int64_t i = 0; i < dim; i += LANES) store(head + i, load(x + i, dim - i), dim - i);
          if (by) norm<T>(head, h, *by);
          T* to = h < heads ? queries + (t * heads + h) * dim
                            : keys + (slot[t] * kv_heads + h - heads) * dim;
          for (int64_t part = 0; part < 2; ++part)
            for (int64_t i = 0; i < half; i += LANES) {
              int64_t here = part * half + i, there = (1 - part) * half + i, left = half - i;
              Floats straight = held<T>(load(head + here, left) * load(cos + here, left));
              Floats across = load(head + there, left) * load(sin + here, left);
              store(to + here, straight + across, left);
            }
        }
        std::copy_n(from + (t * all_heads + turned) * dim, kv_heads * dim,
                    values + slot[t] * kv_heads * dim);
      }
    });
  });
  return q;
}

Tensor page_slots(const Tensor& pages, const Tensor& logical, int64_t page_size) {
  TORCH_CHECK(pages.scalar_type() == at::kLong && logical.scalar_type() == at::kLong,
              "pages and logical: int64");
  int64_t rows = logical.size(0), width = logical.size(1);
  auto own = pages.strides(), theirs = logical.strides();
  Tensor out = at::empty({rows, width}, logical.options());
  int64_t* slots = into<int64_t>(out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i) {
      int64_t slot = data<int64_t>(logical)[r * theirs[0] + i * theirs[1]], page = slot / page_size;
      TORCH_CHECK(slot >= 0 && page < pages.size(1), "logical: outside of the pages");
      *slots++ = data<int64_t>(pages)[r * own[0] + page * own[1]] * page_size + slot % page_size;
    }
  return out;
}

// Which keys the queries of a request may see: see KeySpan.
struct Sight {
  const int64_t* positions;
  const bool* mask;
  int64_t width, first;
  std::optional<int64_t> window;

  // Of query t, its request's number i, with `prefix` keys before: whether it sees `key`.
  bool sees(int64_t t, int64_t i, int64_t prefix, int64_t key) const {
    int64_t column = key - prefix;
    if (key < first) return false;
    bool near = !window || key > positions[t] - *window;
    if (column < 0) return near;
    // A tree's keys lie by node, not by depth; its ancestors are always near.
    return mask ? mask[t * width + column] : near && column <= i;
  }
};

struct Rule {
  float scale;
  std::optional<float> soft_cap;
  const float* sinks;
};

// Rows of a request that read one head of keys: `some` heads of `count` queries.
template <typename T>
struct Rows {
  const T* q;
  T* out;
  int64_t heads, dim, some, first_query, count, first_head;

  int64_t size() const { return some * count; }
  int64_t query(int64_t row) const { return row / some; }
  int64_t query_head(int64_t row) const { return first_head + row % some; }
  int64_t place(int64_t row) const { return (first_query + query(row)) * heads + query_head(row); }
};

int64_t padded(int64_t numbers) { return (numbers + LANES - 1) / LANES * LANES; }

// Numbers by a factor; zeros if they are not there.
template <typename T>
void widen(const T* from, float* to, int64_t count, bool there, float factor = 1.0f) {
  for (int64_t i = 0; i < count; i += LANES)
    store(to + i, load(from + i, there ? count - i : 0) * factor);
}

// Keys and values of one head by logical position; of latents a key is its value and `k` behind it.
template <typename T>
struct Cached {
  const T *k, *v;
  const int64_t* pages;
  int64_t page_size, kv_heads, k_dim, v_dim, head, count;
  bool latent;

  int64_t place(int64_t key) const {
    int64_t page = pages[key / page_size];
    TORCH_CHECK(page >= 0 && page < count, "pages: outside of the cache");
    return (page * page_size + key % page_size) * kv_heads + head;
  }
  // Numbers of a widened value, and of a widened key before what `k` has.
  int64_t value() const { return padded(v_dim); }
  int64_t before() const { return latent ? value() : 0; }
  // Of a key, or of a query with it.
  void widen_key(const T* value, const T* key, float* to, bool there, float factor = 1.0f) const {
    if (latent) widen(value, to, v_dim, there, factor);
    widen(key, to + before(), k_dim, there, factor);
  }
};

// Scores of a row's query with the keys of a block, `wide` numbers each.
inline void score(const float* query, const float* keys, int64_t wide, float* scores) {
  for (int64_t start = 0; start < KEYS; start += LANES) {
    Floats dots[LANES];
    for (int64_t j = 0; j < LANES; ++j) {
      const float* key = keys + (start + j) * wide;
      Floats dot = load(query) * load(key);
      for (int64_t i = LANES; i < wide; i += LANES)
        dot = lanes::fused(load(query + i), load(key + i), dot);
      dots[j] = dot;
    }
    store(scores + start, lanes::sums(dots));
  }
}

// Values of `wide` numbers, one each `stride`.
inline void add_values(float* sums, const float* values, const float* weights, float kept,
                       int64_t wide, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < wide; i += LANES) {
    Floats sum = load(sums + i) * kept;
    for (int64_t j = 0; j < count; ++j)
      sum = lanes::fused(load(values + j * stride + i), weights[j], sum);
    store(sums + i, sum);
  }
}

template <typename T>
void attend(const Rows<T>& rows, const Cached<T>& cached, const Sight& sight, const Rule& rule,
            int64_t prefix, int64_t keys, float* room) {
  int64_t size = rows.size(), inner = cached.value();
  int64_t wide = cached.before() + padded(cached.k_dim), stride = cached.latent ? wide : inner;
  float *queries = room, *k = queries + size * wide;
  float *values = cached.latent ? k : k + KEYS * wide;
  // What rows have so far: sums of values by weight, the weights' sum, the largest score.
  float *sums = k + KEYS * (wide + inner), *weight = sums + size * inner, *most = weight + size;
  std::fill(sums, weight, 0.0f);
  for (int64_t row = 0; row < size; ++row) {
    most[row] = rule.sinks ? rule.sinks[rows.query_head(row)] : NEVER;
    weight[row] = rule.sinks ? 1.0f : 0.0f;
    const T* q = rows.q + rows.place(row) * rows.dim;
    cached.widen_key(q, cached.latent ? q + cached.v_dim : q, queries + row * wide, true, rule.scale);
  }
  for (int64_t start = 0; start < keys; start += KEYS) {
    int64_t count = std::min(KEYS, keys - start);
    for (int64_t j = 0; j < KEYS; ++j) {
      int64_t at = j < count ? cached.place(start + j) : 0;
      const T* value = cached.v + at * cached.v_dim;
      cached.widen_key(value, cached.k + at * cached.k_dim, k + j * wide, j < count);
      if (!cached.latent) widen(value, values + j * inner, cached.v_dim, j < count);
    }
    bool all_seen = !sight.window && start >= sight.first && start + KEYS <= prefix;
    for (int64_t row = 0; row < size; ++row) {
      float scores[KEYS];
      score(queries + row * wide, k, wide, scores);
      int64_t i = rows.query(row), t = rows.first_query + i;
      Floats best = all(most[row]);
      for (int64_t j = 0; j < KEYS; j += LANES) {
        Floats some = load(scores + j);
        if (rule.soft_cap) some = *rule.soft_cap * lanes::tanh(some / *rule.soft_cap);
        for (int64_t lane = 0; lane < LANES && !all_seen; ++lane)
          if (j + lane >= count || !sight.sees(t, i, prefix, start + j + lane)) some[lane] = NEVER;
        store(scores + j, some);
        best = largest(some, best);
      }
      float now = lanes::most(best);
      // Nothing was seen so far.
      if (now == NEVER) continue;
      Floats total = {};
      for (int64_t j = 0; j < KEYS; j += LANES) {
        Floats weights = lanes::exp(load(scores + j) - now);
        store(scores + j, weights);
        total += weights;
      }
      float kept = lanes::exp(all(most[row] - now))[0];
      most[row] = now;
      weight[row] = weight[row] * kept + sum(total);
      add_values(sums + row * inner, values, scores, kept, inner, stride, count);
    }
  }
  for (int64_t row = 0; row < size; ++row)
    for (int64_t i = 0; i < cached.v_dim; i += LANES)
      store(rows.out + rows.place(row) * cached.v_dim + i,
            load(sums + row * inner + i) / weight[row], cached.v_dim - i);
}

Tensor tree_attention(const Tensor& given, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& page_table, const Tensor& prefixes, const Tensor& places,
                      const std::optional<Tensor>& mask, const std::optional<Tensor>& bounds,
                      int64_t first, std::optional<int64_t> window, std::optional<double> scale,
                      std::optional<double> soft_cap, const std::optional<Tensor>& sinks) {
  Tensor q = given.contiguous(), pages = page_table.contiguous(), prefix = prefixes.contiguous();
  Tensor positions = places.contiguous();
  Tensor seen = mask.has_value() ? mask->contiguous() : Tensor();
  Tensor offsets = bounds.has_value() ? bounds->contiguous() : Tensor();
  Tensor sunk = sinks.has_value() ? sinks->to(at::kFloat).contiguous() : Tensor();
  TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "caches: contiguous");
  TORCH_CHECK(k_cache.dtype() == q.dtype() && v_cache.dtype() == q.dtype(),
              "caches: of the queries' type");
  for (const Tensor& each : {pages, prefix, positions})
    TORCH_CHECK(each.scalar_type() == at::kLong, "pages, prefix and positions: int64");
  int64_t batch = pages.size(0), columns = pages.size(1), total = q.size(0), heads = q.size(1);
  int64_t dim = q.size(2), page_size = k_cache.size(1), kv_heads = k_cache.size(2);
  int64_t k_dim = k_cache.size(3), v_dim = v_cache.size(3), group = heads / kv_heads;
  TORCH_CHECK(dim == k_dim ? k_dim == v_dim : dim == k_dim + v_dim, "q: of a key's size");
  const int64_t* starts = bounds.has_value() ? data<int64_t>(offsets) : nullptr;
  Sight sight{data<int64_t>(positions), mask.has_value() ? data<bool>(seen) : nullptr,
              mask.has_value() ? seen.size(1) : 0, first, window};
  Rule rule{static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(dim)))), {},
            sinks.has_value() ? data<float>(sunk) : nullptr};
  if (soft_cap) rule.soft_cap = static_cast<float>(*soft_cap);
  Tensor out = at::empty({total, heads * v_dim}, q.options());
  int64_t most = columns * page_size, parts = (group + HEADS - 1) / HEADS;
  typed(q, [&](auto kind) {
    using T = decltype(kind);
    int64_t units = batch * kv_heads * parts;
    int64_t worth = total * heads / std::max<int64_t>(1, units) * most * dim;
    ::parallel_for(0, units, grain(worth, PRODUCTS), [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      for (int64_t unit = begin; unit < end; ++unit) {
        int64_t b = unit / parts / kv_heads, head = unit / parts % kv_heads;
        int64_t before_head = unit % parts * HEADS, some = std::min(HEADS, group - before_head);
        int64_t start = starts ? starts[b] : b * (total / batch);
        int64_t count = (starts ? starts[b + 1] : (b + 1) * (total / batch)) - start;
        if (count == 0) continue;
        int64_t before = data<int64_t>(prefix)[b];
        int64_t keys = before + (sight.mask ? sight.width : count);
        TORCH_CHECK(before >= 0 && keys <= most, "prefix: more keys than pages have");
        Rows<T> rows{data<T>(q), into<T>(out), heads, dim, some, start, count,
                     head * group + before_head};
        Cached<T> cached{data<T>(k_cache), data<T>(v_cache), data<int64_t>(pages) + b * columns,
                         page_size, kv_heads, k_dim, v_dim, head, k_cache.size(0), k_dim != dim};
        int64_t wide = cached.before() + padded(k_dim) + cached.value();
        float* room = scratch.take((rows.size() + KEYS) * wide + 2 * rows.size());
        attend(rows, cached, sight, rule, before, keys, room);
      }
    });
  });
  return out;
}

}  // namespace layers
