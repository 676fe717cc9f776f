// A mixture of experts, whose matrices are packed as for the native products.
#pragma once

#include <numeric>

#include "layers.h"
#include "products.h"

namespace experts {

using at::Tensor;

// What GPT-OSS's experts make of gates and ups, all clamped: SiLU with a steeper slope.
Tensor bent(const Tensor& both, double most) {
  using lanes::all, lanes::choose, lanes::Floats;
  int64_t rows = both.size(0), size = both.size(1) / 2;
  Tensor out = at::empty({rows, size}, both.options());
  const Floats limit = all(most);
  typed(both, [&](auto kind) {
    using T = decltype(kind);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < size; i += lanes::LANES) {
        Floats gate = lanes::load(data<T>(both) + 2 * r * size + i, size - i);
        Floats up = lanes::load(data<T>(both) + (2 * r + 1) * size + i, size - i);
        gate = choose(gate > limit, limit, gate);
        up = choose(up > limit, limit, choose(up < -limit, -limit, up));
        Floats bend = gate / (1.0f + lanes::exp(-1.702f * gate));
        lanes::store(into<T>(out) + r * size + i, (up + 1.0f) * bend, size - i);
      }
  });
  return out;
}

std::optional<Tensor> of(const std::optional<Tensor>& biases, int64_t expert) {
  if (!biases.has_value()) return std::nullopt;
  return biases->select(0, expert);
}

// As the reference, but that gates come first with a limit too; up (E, 2 I / L, H / P, L, P),
// down (E, H / L, I / P, L, P) of L lanes. A token's experts are added in their own order, so a row
// has the same bits beside any others.
Tensor mix(const Tensor& x, const Tensor& given, const Tensor& shares, const Tensor& up,
           const Tensor& down, const std::optional<Tensor>& up_bias,
           const std::optional<Tensor>& down_bias, std::optional<double> limit) {
  Tensor ids = given.contiguous(), share = shares.flatten(), out = x.new_zeros(x.sizes());
  int64_t count = up.size(0), each = ids.size(1), picks = ids.numel();
  int64_t hidden = x.size(1), inner = down.size(2) * down.size(4);
  const int64_t* id = data<int64_t>(ids);
  std::vector<int64_t> ends(count + 1, 0);
  for (int64_t pick = 0; pick < picks; ++pick) {
    TORCH_CHECK(id[pick] >= 0 && id[pick] < count, "ids: an expert's number");
    ++ends[id[pick] + 1];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  Tensor order = at::empty({picks}, ids.options());
  std::vector<int64_t> next = ends;
  for (int64_t pick = 0; pick < picks; ++pick) into<int64_t>(order)[next[id[pick]]++] = pick;
  Tensor tokens = order.floor_divide(each);
  for (int64_t expert = 0; expert < count; ++expert) {
    int64_t begin = ends[expert], end = ends[expert + 1];
    if (begin == end) continue;
    Tensor rows = tokens.slice(0, begin, end);
    Tensor both = products::product(x.index_select(0, rows), up.select(0, expert),
                                    of(up_bias, expert), 2 * inner);
    Tensor one = products::product(
        limit.has_value() ? bent(both, *limit) : layers::activate_and_mul<layers::silu>(both),
        down.select(0, expert), of(down_bias, expert), hidden);
    out.index_add_(0, rows, one.mul_(share.index_select(0, order.slice(0, begin, end)).unsqueeze(1)));
  }
  return out;
}

}  // namespace experts
