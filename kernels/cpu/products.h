// Products of a few rows with a weight, at the speed at which memory is read: see __init__.py.
//
// A packed weight (N, K) is (ceil(N / 16), K / P, 16, P), of P = 1 number in float32, 2 in
// bfloat16 and 4 in int8: what one instruction multiplies for 16 outputs lies together, and what a thread reads is one run.
// Each output is summed over K in one order, so a row has the same bits beside any others.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "tensors.h"

#ifdef __AVX512BF16__

namespace products {

using at::Tensor;

constexpr int64_t LANES = 16;
// Blocks of outputs whose part of the weight stays in a core's cache while more rows come.
constexpr int64_t BLOCKS = 12;
// Words of a packed weight that are fetched ahead, and that are worth a thread.
constexpr int64_t AHEAD = 8, GRAIN = 1 << 18;

int64_t words(const Tensor& rows) { return rows.size(1) * rows.element_size() / 4; }

// Not by the intrinsics, around which GCC copies the sums and spills them.
struct Floats {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
};

struct Bfloat16 : Floats {
  static Sum add(Sum sum, __m512i weight, __m512i x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};

struct Float32 : Floats {
  static Sum add(Sum sum, __m512i weight, __m512i x) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};

struct Int8 {
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, __m512i weight, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};

__m512 wide(__mmask16 mask, const uint16_t* from) {
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

struct Out {
  void* to;
  bool half;
  const void* bias;

  void put(int64_t at, int64_t column, __mmask16 mask, __m512 sum) const {
    if (half) {
      if (bias) sum += wide(mask, static_cast<const uint16_t*>(bias) + column);
      __m256i bits = (__m256i)_mm512_cvtneps_pbh(sum);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + at, mask, bits);
    } else {
      if (bias) sum += _mm512_maskz_loadu_ps(mask, static_cast<const float*>(bias) + column);
      _mm512_mask_storeu_ps(static_cast<float*>(to) + at, mask, sum);
    }
  }
};

// What becomes of the sum of row m for the outputs from `column` on.
struct Plain {
  Out out;
  int64_t n;

  void put(int64_t m, int64_t column, __mmask16 mask, __m512 sum) const {
    out.put(m * n + column, column, mask, sum);
  }
};

struct Scaled {
  Out out;
  int64_t n;
  const float *units, *scale;
  const int32_t* shift;

  void put(int64_t m, int64_t column, __mmask16 mask, __m512i sum) const {
    sum = _mm512_sub_epi32(sum, _mm512_maskz_loadu_epi32(mask, shift + column));
    __m512 scaled = _mm512_cvtepi32_ps(sum) * _mm512_maskz_loadu_ps(mask, scale + column);
    out.put(m * n + column, column, mask, scaled * _mm512_set1_ps(units[m]));
  }
};

// M rows with B blocks of 16 outputs: all sums stay in registers.
template <typename Kind, int M, int B, typename Put>
void tile(const int32_t* x, const int32_t* weight, int64_t depth, int64_t row, int64_t block,
          const Put& put) {
  typename Kind::Sum sums[B][M];
  for (auto& each : sums) std::fill(each, each + M, Kind::zero());
  weight += block * depth * LANES;
  for (int64_t p = 0; p < depth; ++p) {
    __m512i here[B];
    for (int b = 0; b < B; ++b) {
      const int32_t* at = weight + (b * depth + p) * LANES;
      _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD * LANES), _MM_HINT_T0);
      here[b] = _mm512_loadu_si512(at);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      __m512i each = _mm512_set1_epi32(x[m * depth + p]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sums[b][m] = Kind::add(sums[b][m], here[b], each);
    }
  }
  for (int b = 0; b < B; ++b) {
    int64_t column = (block + b) * LANES, left = std::min(put.n - column, LANES);
    for (int m = 0; m < M; ++m) put.put(row + m, column, (1u << left) - 1, sums[b][m]);
  }
}

template <typename Kind, int M, typename Put>
void strip(const int32_t* x, const int32_t* weight, int64_t depth, int64_t row, int64_t block,
           int64_t end, const Put& put) {
  constexpr int B = M <= 6 ? 4 : M <= 8 ? 3 : 2;
  for (; block + B <= end; block += B) tile<Kind, M, B>(x, weight, depth, row, block, put);
  for (; block < end; ++block) tile<Kind, M, 1>(x, weight, depth, row, block, put);
}

template <typename Kind, typename Put>
void multiply(const int32_t* x, const int32_t* weight, int64_t m, int64_t depth, const Put& put) {
  using Strip = void (*)(const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                         const Put&);
  constexpr Strip STRIPS[] = {strip<Kind, 1, Put>, strip<Kind, 2, Put>,  strip<Kind, 3, Put>,
                              strip<Kind, 4, Put>, strip<Kind, 5, Put>,  strip<Kind, 6, Put>,
                              strip<Kind, 7, Put>, strip<Kind, 8, Put>,  strip<Kind, 9, Put>,
                              strip<Kind, 10, Put>, strip<Kind, 11, Put>, strip<Kind, 12, Put>};
  if (m == 0) return;
  constexpr int64_t MOST = std::size(STRIPS);
  int64_t parts = (m + MOST - 1) / MOST, rows = (m + parts - 1) / parts;
  int64_t grain = std::max<int64_t>(1, GRAIN / (depth * LANES));
  ::parallel_for(0, (put.n + LANES - 1) / LANES, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block += BLOCKS)
      for (int64_t row = 0; row < m; row += rows) {
        int64_t count = std::min(rows, m - row);
        STRIPS[count - 1](x + row * depth, weight, depth, row, block,
                          std::min(block + BLOCKS, end), put);
      }
  });
}

Tensor pack(const Tensor& given) {
  Tensor weight = given.contiguous();
  int64_t n = weight.size(0), depth = words(weight), blocks = (n + LANES - 1) / LANES;
  Tensor packed = at::empty({blocks, depth, LANES, 4 / given.element_size()}, weight.options());
  const int32_t* from = data<int32_t>(weight);
  int32_t* to = into<int32_t>(packed);
  ::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t p = 0; p < depth; ++p)
        for (int64_t lane = 0; lane < LANES; ++lane) {
          int64_t row = block * LANES + lane;
          to[(block * depth + p) * LANES + lane] = row < n ? from[row * depth + p] : 0;
        }
  });
  return packed;
}

Out written(const Tensor& out, const std::optional<Tensor>& bias) {
  TORCH_CHECK(!bias.has_value() || bias->scalar_type() == out.scalar_type(), "bias: of x's type");
  return {out.mutable_data_ptr(), out.scalar_type() == at::kBFloat16,
          bias.has_value() ? bias->const_data_ptr() : nullptr};
}

Tensor product(const Tensor& given, const Tensor& weight, const std::optional<Tensor>& bias,
               int64_t n) {
  bool half = given.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || given.scalar_type() == at::kFloat, "x: bfloat16 or float32");
  TORCH_CHECK(given.scalar_type() == weight.scalar_type(), "x: of the weight's type");
  TORCH_CHECK(words(given) == weight.size(1), "x: as many columns as the weight");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), n}, x.options());
  auto work = half ? &multiply<Bfloat16, Plain> : &multiply<Float32, Plain>;
  work(data<int32_t>(x), data<int32_t>(weight), x.size(0), words(x), Plain{written(out, bias), n});
  return out;
}

__m512 read(const void* from, bool half, int64_t at, __mmask16 mask) {
  if (half) return wide(mask, static_cast<const uint16_t*>(from) + at);
  return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + at);
}

// A row in 8 bits, and the size of its unit, which is not finite where some number is not.
float round_row(const void* from, bool half, int64_t start, int64_t k, uint8_t* digits) {
  auto mask = [k](int64_t i) { return static_cast<__mmask16>((1u << std::min(k - i, LANES)) - 1); };
  __m512 most = _mm512_setzero_ps();
  __mmask16 unknown = 0;
  for (int64_t i = 0; i < k; i += LANES) {
    __m512 x = read(from, half, start + i, mask(i));
    unknown |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, _mm512_abs_ps(x));
  }
  float unit = std::max(_mm512_reduce_max_ps(most), 1e-30f) / 127;
  if (unknown) unit = std::numeric_limits<float>::quiet_NaN();
  // Of what is not finite nothing is left but the unit.
  __mmask16 kept = std::isfinite(unit) ? 0xffff : 0;
  for (int64_t i = 0; i < k; i += LANES) {
    __m512 x = _mm512_div_ps(read(from, half, start + i, mask(i)), _mm512_set1_ps(unit));
    __m512i near = _mm512_maskz_cvtps_epi32(kept, x);
    near = _mm512_add_epi32(near, _mm512_set1_epi32(128));
    _mm_mask_storeu_epi8(digits + i, mask(i), _mm512_cvtepi32_epi8(near));
  }
  return unit;
}

Tensor int8_product(const Tensor& given, const Tensor& weight, const Tensor& scale,
                    const Tensor& shift, const std::optional<Tensor>& bias) {
  bool half = given.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || given.scalar_type() == at::kFloat, "x: bfloat16 or float32");
  TORCH_CHECK(given.size(1) == 4 * weight.size(1), "x: as many columns as the weight");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), scale.size(0)}, x.options());
  int64_t m = x.size(0), k = x.size(1);
  std::vector<int32_t> digits(m * k / 4);
  std::vector<float> units(m);
  ::parallel_for(0, m, std::max<int64_t>(1, GRAIN / (8 * k)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* to = reinterpret_cast<uint8_t*>(digits.data()) + row * k;
      units[row] = round_row(x.const_data_ptr(), half, row * k, k, to);
    }
  });
  multiply<Int8>(digits.data(), data<int32_t>(weight), m, k / 4,
                 Scaled{written(out, bias), scale.size(0), units.data(), data<float>(scale),
                        data<int32_t>(shift)});
  return out;
}

// A weight of 4 bits (N, K), (code - zero) * scale with a scale and a zero for each group of
// inputs: codes (N / 16, K / 8, 16, 4), of whose bytes the low halves are four inputs and the high
// halves the next four; scales (N / 16, groups, 16) in float32, zeros alike in bytes.
struct Int4 {
  const uint8_t *codes, *zeros;
  const float* scales;
  int64_t groups, words;  // Words: of 64 bytes, in a group.
};

// What is read, each group of a row in 8 bits of its own unit, and the sum of these.
struct Digits {
  std::vector<int32_t> digits;
  std::vector<float> units, sums;
};

Digits in_groups(const Tensor& x, int64_t groups) {
  bool half = x.scalar_type() == at::kBFloat16;
  int64_t m = x.size(0), k = x.size(1), size = k / groups;
  Digits made{std::vector<int32_t>(m * k / 4), std::vector<float>(m * groups),
              std::vector<float>(m * groups)};
  ::parallel_for(0, m, std::max<int64_t>(1, GRAIN / (8 * k)), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * groups; at < end * groups; ++at) {
      uint8_t* to = reinterpret_cast<uint8_t*>(made.digits.data()) + at * size;
      made.units[at] = round_row(x.const_data_ptr(), half, at * size, size, to);
      int32_t sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        // With a sign, where those of int8 have none.
        to[i] ^= 0x80;
        sum += static_cast<int8_t>(to[i]);
      }
      made.sums[at] = static_cast<float>(sum);
    }
  });
  return made;
}

template <int M, int B>
void int4_tile(const Digits& x, const Int4& weight, int64_t row, int64_t block, const Plain& put) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  const int64_t groups = weight.groups, words = weight.words, depth = 2 * groups * words;
  __m512 totals[B][M];
  for (auto& each : totals) std::fill(each, each + M, _mm512_setzero_ps());
  for (int64_t g = 0; g < groups; ++g) {
    __m512i sums[B][M];
    for (auto& each : sums) std::fill(each, each + M, _mm512_setzero_si512());
    for (int64_t p = g * words; p < (g + 1) * words; ++p) {
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const uint8_t* at = weight.codes + ((block + b) * groups * words + p) * 64;
        _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD * 64), _MM_HINT_T0);
        __m512i both = _mm512_loadu_si512(at);
        __m512i first = _mm512_and_si512(both, low);
        __m512i next = _mm512_and_si512(_mm512_srli_epi32(both, 4), low);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const int32_t* digits = x.digits.data() + (row + m) * depth + 2 * p;
          sums[b][m] = Int8::add(sums[b][m], _mm512_set1_epi32(digits[0]), first);
          sums[b][m] = Int8::add(sums[b][m], _mm512_set1_epi32(digits[1]), next);
        }
      }
    }
    for (int b = 0; b < B; ++b) {
      int64_t at = ((block + b) * groups + g) * LANES;
      __m512 scale = _mm512_loadu_ps(weight.scales + at);
      __m512 zero = _mm512_cvtepi32_ps(
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.zeros + at))));
      for (int m = 0; m < M; ++m) {
        int64_t of = (row + m) * groups + g;
        __m512 sum = _mm512_cvtepi32_ps(sums[b][m]);
        sum = _mm512_fnmadd_ps(zero, _mm512_set1_ps(x.sums[of]), sum);
        __m512 unit = _mm512_mul_ps(scale, _mm512_set1_ps(x.units[of]));
        totals[b][m] = _mm512_fmadd_ps(sum, unit, totals[b][m]);
      }
    }
  }
  for (int b = 0; b < B; ++b) {
    int64_t column = (block + b) * LANES, left = std::min(put.n - column, LANES);
    for (int m = 0; m < M; ++m) put.put(row + m, column, (1u << left) - 1, totals[b][m]);
  }
}

template <int M>
void int4_strip(const Digits& x, const Int4& weight, int64_t row, int64_t block, int64_t end,
                const Plain& put) {
  constexpr int B = M <= 3 ? 4 : M <= 6 ? 2 : 1;
  for (; block + B <= end; block += B) int4_tile<M, B>(x, weight, row, block, put);
  for (; block < end; ++block) int4_tile<M, 1>(x, weight, row, block, put);
}

Tensor int4_product(const Tensor& given, const Tensor& codes, const Tensor& scales,
                    const Tensor& zeros, const std::optional<Tensor>& bias, int64_t n) {
  using Strip = void (*)(const Digits&, const Int4&, int64_t, int64_t, int64_t, const Plain&);
  constexpr Strip STRIPS[] = {int4_strip<1>, int4_strip<2>,  int4_strip<3>,  int4_strip<4>,
                              int4_strip<5>, int4_strip<6>,  int4_strip<7>,  int4_strip<8>,
                              int4_strip<9>, int4_strip<10>, int4_strip<11>, int4_strip<12>};
  constexpr int64_t MOST = std::size(STRIPS);
  TORCH_CHECK(given.size(1) == 8 * codes.size(1), "x: as many columns as the weight");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), n}, x.options());
  int64_t m = x.size(0), blocks = codes.size(0), groups = scales.size(1);
  Int4 weight{data<uint8_t>(codes), data<uint8_t>(zeros), data<float>(scales), groups,
              codes.size(1) / groups};
  Digits digits = in_groups(x, groups);
  Plain put{written(out, bias), n};
  if (m == 0) return out;
  int64_t parts = (m + MOST - 1) / MOST, rows = (m + parts - 1) / parts;
  int64_t grain = std::max<int64_t>(1, GRAIN / (x.size(1) * LANES / 4));
  ::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block += BLOCKS)
      for (int64_t row = 0; row < m; row += rows)
        STRIPS[std::min(rows, m - row) - 1](digits, weight, row, block,
                                            std::min(block + BLOCKS, end), put);
  });
  return out;
}

}  // namespace products

#endif
