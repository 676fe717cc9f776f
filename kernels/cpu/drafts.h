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

// What makes a row's candidates: the offsets and the noise, where there are any.
struct Drafting {
  const int64_t *moved, *keys = nullptr;
  const float* heats = nullptr;
  Tensor warm, noise;

  Drafting(const std::optional<Tensor>& offsets, const std::optional<Tensor>& temperature,
           const std::optional<Tensor>& given)
      : moved(offsets ? data<int64_t>(*offsets) : nullptr) {
    if (!temperature || !given) return;
    warm = temperature->contiguous().to(at::kFloat), noise = given->contiguous();
    heats = data<float>(warm), keys = data<int64_t>(noise);
  }

  float heat(int64_t row) const { return heats ? heats[row] : 0; }

  // The best of a row's logits, as target ids.
  template <typename T>
  void find(const T* logits, int64_t size, int64_t row, const Best& best) const {
    if (heat(row) > 0)
      find_drawn(logits, size, heat(row), keys[row], moved, best);
    else
      find_probable(logits, size, best);
    for (int64_t i = 0; moved && i < best.count; ++i) best.ids[i] += moved[best.ids[i]];
  }
};

// `work(row)` for rows of logits, by this thread's team.
template <typename Work>
void for_rows(const Tensor& logits, const Work& work) {
  int64_t grain = std::max<int64_t>(1, GRAIN / logits.size(1));
  ::parallel_for(0, logits.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

std::tuple<Tensor, Tensor> top_candidates(const Tensor& given, int64_t count,
                                          const std::optional<Tensor>& offsets,
                                          const std::optional<Tensor>& temperature,
                                          const std::optional<Tensor>& keys) {
  Tensor logits = given.contiguous();
  int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(count <= size, "count: more than there are tokens");
  Drafting drafting(offsets, temperature, keys);
  Tensor scores = at::empty({rows, count}, logits.options().dtype(at::kFloat));
  Tensor ids = at::empty({rows, count}, logits.options().dtype(at::kLong));
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    for_rows(logits, [&](int64_t r) {
      Best best{into<float>(scores) + r * count, into<int64_t>(ids) + r * count, count};
      drafting.find(data<T>(logits) + r * size, size, r, best);
    });
  });
  return {scores, ids};
}

// Grammars' states by bytes, as kernels/states.py has them.
struct States {
  const int32_t *moves, *texts, *few;
  int64_t count, length, vocabulary, listed = 0, width = 0;

  States(const Tensor& moves, const Tensor& texts, const Tensor* few = nullptr)
      : moves(data<int32_t>(moves)), texts(data<int32_t>(texts)), few(nullptr),
        count(moves.size(0)), length(texts.size(1)), vocabulary(texts.size(0)) {
    for (const Tensor* each : {&moves, &texts, few})
      TORCH_CHECK(!each || (each->scalar_type() == at::kInt && each->is_contiguous()),
                  "moves, texts and few: int32, contiguous");
    if (!few) return;
    this->few = data<int32_t>(*few), listed = few->size(1) - 1, width = count / few->size(0);
  }

  int32_t after(int64_t state, int64_t token) const {
    TORCH_CHECK(token >= 0 && token < vocabulary, "tokens: outside of the vocabulary");
    const int32_t* text = texts + token * length;
    for (int64_t i = 0; i < length; ++i) {
      int64_t at = state + text[i];
      TORCH_CHECK(at >= 0 && at < count, "states: outside of the table");
      state = moves[at];
    }
    return static_cast<int32_t>(state);
  }

  bool forbids(int64_t state, int64_t token) const { return after(state, token) == width; }
};

// The log-probabilities of `count` tokens that alone may come, of a row of `logits`; -inf for those
// whose draft id `own` is below 0.
template <typename T>
void among(const T* logits, int64_t size, const int64_t* own, const int64_t* ids, int64_t count,
           float heat, int64_t key, float* scores) {
  float first = choice::NEVER, total = 0;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = own[i] < 0 ? choice::NEVER : load(logits + std::min(own[i], size - 1), 1)[0];
    first = std::max(first, scores[i]);
  }
  for (int64_t i = 0; i < count && heat > 0; i += LANES) {
    Ints named = {};
    for (int64_t lane = 0; lane < std::min(LANES, count - i); ++lane) named[lane] = ids[i + lane];
    Floats drawn = choice::exponentials(key, named);
    for (int64_t lane = 0; lane < std::min(LANES, count - i); ++lane)
      scores[i + lane] = std::log(std::exp((scores[i + lane] - first) / heat) / drawn[lane]);
  }
  if (heat > 0) first = *std::max_element(scores, scores + count);
  for (int64_t i = 0; i < count; ++i) total += std::exp(scores[i] - first);
  for (int64_t i = 0; i < count; ++i) scores[i] -= first + std::log(total);
}

// See kernels/states.py; `known_scores` and `known_ids`: what top_candidates gives.
std::tuple<Tensor, Tensor> legal_candidates(
    const Tensor& given, int64_t k, const Tensor& asked, const Tensor& moves, const Tensor& texts,
    const Tensor& few, const std::optional<Tensor>& offsets, const std::optional<Tensor>& draft_ids,
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& keys,
    const std::optional<Tensor>& known_scores, const std::optional<Tensor>& known_ids) {
  Tensor logits = given.contiguous(), standing = asked.contiguous(), best_scores, best_ids;
  TORCH_CHECK(standing.scalar_type() == at::kInt, "states: int32");
  States table(moves, texts, &few);
  Drafting drafting(offsets, temperature, keys);
  int64_t rows = logits.size(0), size = logits.size(1), listed = table.listed, columns = 0;
  int64_t count = std::min(std::max(k, listed), size);
  TORCH_CHECK(k <= count, "k: more than there are tokens");
  if (known_scores && known_ids) {
    best_scores = known_scores->contiguous(), best_ids = known_ids->contiguous();
    columns = best_scores.size(1);
    TORCH_CHECK(columns >= count, "best: fewer than are wanted");
  }
  const int64_t* drafts = draft_ids ? data<int64_t>(*draft_ids) : nullptr;
  int64_t named = draft_ids ? draft_ids->size(0) : size;
  Tensor scores = at::empty({rows, k}, logits.options().dtype(at::kFloat));
  Tensor ids = at::empty({rows, k}, logits.options().dtype(at::kLong));
  typed(logits, [&](auto kind) {
    using T = decltype(kind);
    for_rows(logits, [&](int64_t r) {
      static thread_local std::vector<float> odds;
      static thread_local std::vector<int64_t> tokens;
      odds.resize(count + listed), tokens.resize(count + 2 * listed);
      const T* row = data<T>(logits) + r * size;
      int64_t state = data<int32_t>(standing)[r], left = 0;
      Best best{odds.data(), tokens.data(), count};
      if (columns) {
        std::copy_n(data<float>(best_scores) + r * columns, count, best.scores);
        std::copy_n(data<int64_t>(best_ids) + r * columns, count, best.ids);
      } else {
        drafting.find(row, size, r, best);
      }
      float forbidden = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (!table.forbids(state, best.ids[i])) {
          ++left;
          continue;
        }
        forbidden += std::exp(best.scores[i]);
        best.scores[i] = choice::NEVER;
      }
      float share = std::log1p(-std::min(forbidden, 1 - 1e-6f));
      for (int64_t i = 0; i < count; ++i) best.scores[i] = std::min(best.scores[i] - share, 0.0f);
      // Those that may come, where no other can or none of the best may.
      const int32_t* some = table.few + state / table.width * (listed + 1);
      if (some[listed] > 0 || !left) {
        int64_t *theirs = best.ids + count, *own = theirs + listed;
        for (int64_t i = 0; i < listed; ++i) {
          bool known = some[i] >= 0 && (!drafts || some[i] < named);
          theirs[i] = std::max(some[i], 0);
          own[i] = !known ? -1 : drafts ? drafts[some[i]] : some[i];
        }
        float* fewer = best.scores + count;
        among(row, size, own, theirs, listed, drafting.heat(r),
              drafting.keys ? drafting.keys[r] : 0, fewer);
        // Of no token at all there are no numbers.
        if (listed && fewer[0] == fewer[0]) {
          std::fill_n(best.scores, count, choice::NEVER);
          std::fill_n(best.ids, count, 0);
          std::copy_n(fewer, std::min(listed, count), best.scores);
          std::copy_n(theirs, std::min(listed, count), best.ids);
        }
      }
      for (int64_t i = 0; i < k; ++i) {
        int64_t at = std::max_element(best.scores + i, best.scores + count) - best.scores;
        std::rotate(best.scores + i, best.scores + at, best.scores + at + 1);
        std::rotate(best.ids + i, best.ids + at, best.ids + at + 1);
      }
      std::copy_n(best.scores, k, into<float>(scores) + r * k);
      std::copy_n(best.ids, k, into<int64_t>(ids) + r * k);
    });
  });
  return {scores, ids};
}

Tensor after_tokens(const Tensor& moves, const Tensor& given, const Tensor& texts,
                    const Tensor& asked) {
  Tensor states = given.contiguous(), tokens = asked.contiguous();
  TORCH_CHECK(states.scalar_type() == at::kInt, "states: int32");
  TORCH_CHECK(tokens.scalar_type() == at::kLong, "tokens: int64");
  States table(moves, texts);
  Tensor out = at::empty({states.size(0)}, states.options());
  for (int64_t n = 0; n < states.size(0); ++n)
    into<int32_t>(out)[n] = table.after(data<int32_t>(states)[n], data<int64_t>(tokens)[n]);
  return out;
}

}  // namespace drafts
