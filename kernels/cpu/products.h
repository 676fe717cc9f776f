// Products of a few rows with a weight, at the speed at which memory is read: see __init__.py.
//
// A packed weight (N, K) is (ceil(N / LANES), K / P, LANES, P), of P = 1 number in float32, 2 in
// bfloat16 and 4 in int8: a word for each of the outputs that one instruction multiplies for lies
// together, and what a thread reads is one run. Each output is summed over K in one order, so a row
// has the same bits beside any others.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lanes.h"
#include "tensors.h"
#include "tiles.h"

namespace products {

using at::Tensor;
using lanes::Floats, lanes::Ints, lanes::Shorts, lanes::LANES;

#ifdef __AVX512F__
constexpr int REGISTERS = 32, SPARE = 3, MOST_ROWS = 12;
#else
constexpr int REGISTERS = 16, SPARE = 2, MOST_ROWS = 6;
#endif
// Blocks of outputs whose part of the weight stays in a core's cache while more rows come.
constexpr int64_t BLOCKS = 12;
// Vectors of a packed weight that are fetched ahead, as long as memory takes to answer, and words
// that are worth a thread.
constexpr int64_t AHEAD = 64, GRAIN = 1 << 18;

inline int64_t words(const Tensor& rows) { return rows.size(1) * rows.element_size() / 4; }

inline Ints load_words(const void* from) {
  Ints word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Of B blocks beside each other, of `depth` vectors each: fetch what comes long after vector p of the
// one at `block`; after its end come the next B.
template <int B>
void fetch_ahead(const void* block, int64_t p, int64_t depth) {
  int64_t next = p + AHEAD + (p + AHEAD < depth ? 0 : (B - 1) * depth);
  _mm_prefetch(static_cast<const char*>(block) + next * sizeof(Ints), _MM_HINT_T1);
}

// A kind of product: a packed word is PARTS vectors of numbers, each of which is multiplied by a
// word of a row.
struct Float32 {
  using Sum = Floats;
  static constexpr int PARTS = 1;
  static Ints part(Ints word, int) { return word; }
  // Not by the intrinsics, around which GCC copies the sums and spills them.
  static Sum add(Sum sum, Ints weight, Ints x) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};

// A weight in bfloat16 and rows in float32: what the same weight in float32 gives, to the bit.
struct Widened : Float32 {
  static constexpr int PARTS = 2;
  static Ints part(Ints word, int i) { return i ? word & ~0xffff : word << 16; }
};

#ifdef __AVX512BF16__
struct Bfloat16 : Float32 {
  static Sum add(Sum sum, Ints weight, Ints x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};
#endif

// Bytes, 4 a word. OFFSET is what is added to those of a row, so that they have no sign.
#ifdef __AVX512VNNI__
struct Int8 {
  using Sum = Ints;
  static constexpr int PARTS = 1, OFFSET = 128;
  static Ints part(Ints word, int) { return word; }
  static Sum add(Sum sum, Ints weight, Ints x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
  }
};

// Add the products of bytes without a sign, twice 4 of each sum, and a row's with one.
template <int B>
void add_products(Ints (&sums)[B], const Ints (&first)[B], const Ints (&next)[B], const int32_t* x) {
  Ints here = x[0] - Ints{}, there = x[1] - Ints{};
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) sums[b] = Int8::add(sums[b], here, first[b]);
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) sums[b] = Int8::add(sums[b], there, next[b]);
}
#else
// Two bytes at a time, in 16 bits: the first and the third of a word, then the others.
struct Int8 {
  using Sum = Ints;
  static constexpr int PARTS = 2, OFFSET = 0;
  static Ints part(Ints word, int i) {
    return (Ints)((i ? (Shorts)word : (Shorts)word << 8) >> 8);
  }
  static Sum add(Sum sum, Ints weight, Ints x) { return sum + lanes::add_pairs(weight, x); }
};

template <int B>
void add_products(Ints (&sums)[B], const Ints (&first)[B], const Ints (&next)[B], const int32_t* x) {
  Ints here = x[0] - Ints{}, there = x[1] - Ints{};
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) {
    Shorts pairs = (Shorts)lanes::add_byte_pairs(first[b], here) +
                   (Shorts)lanes::add_byte_pairs(next[b], there);
    sums[b] += lanes::add_pairs((Ints)pairs, (Ints)(Shorts{} + 1));
  }
}
#endif

struct Out {
  void* to;
  bool half;
  const void* bias;

  void put(int64_t at, int64_t column, int64_t count, Floats sum) const {
    half ? put(static_cast<uint16_t*>(to), at, column, count, sum)
         : put(static_cast<float*>(to), at, column, count, sum);
  }

 private:
  template <typename T>
  void put(T* out, int64_t at, int64_t column, int64_t count, Floats sum) const {
    if (bias) sum += lanes::load(static_cast<const T*>(bias) + column, count);
    lanes::store(out + at, sum, count);
  }
};

// What becomes of the sum of row m for `count` outputs from `column` on.
struct Plain {
  Out out;
  int64_t n;

  void put(int64_t m, int64_t column, int64_t count, Floats sum) const {
    out.put(m * n + column, column, count, sum);
  }
};

struct Scaled {
  Out out;
  int64_t n;
  const float *units, *scale;
  const int32_t* shift;

  void put(int64_t m, int64_t column, int64_t count, Ints sum) const {
    if (Int8::OFFSET) sum -= (Ints)lanes::load(reinterpret_cast<const float*>(shift) + column, count);
    Floats scaled = __builtin_convertvector(sum, Floats) * lanes::load(scale + column, count);
    out.put(m * n + column, column, count, scaled * units[m]);
  }
};

// M rows with B blocks of outputs: all sums stay in registers.
template <typename Kind, int M, int B, typename Put>
void tile(const int32_t* x, const int32_t* weight, int64_t depth, int64_t row, int64_t block,
          const Put& put) {
  typename Kind::Sum sums[B][M] = {};
  weight += block * depth * LANES;
  for (int64_t p = 0; p < depth; ++p) {
#pragma GCC unroll 2
    for (int part = 0; part < Kind::PARTS; ++part) {
      Ints here[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const int32_t* from = weight + b * depth * LANES;
        if (!part) fetch_ahead<B>(from, p, depth);
        here[b] = Kind::part(load_words(from + p * LANES), part);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        Ints each = x[(m * depth + p) * Kind::PARTS + part] - Ints{};
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) sums[b][m] = Kind::add(sums[b][m], here[b], each);
      }
    }
  }
  for (int b = 0; b < B; ++b) {
    int64_t column = (block + b) * LANES;
    for (int m = 0; m < M; ++m)
      put.put(row + m, column, std::min(put.n - column, LANES), sums[b][m]);
  }
}

// As many blocks beside each other as there are registers for.
template <int M>
constexpr int side_by_side() {
  for (int blocks = 4; blocks > 1; --blocks)
    if (blocks * (M + 1) + SPARE <= REGISTERS) return blocks;
  return 1;
}

template <typename Kind, typename Put>
struct Product {
  const int32_t *x, *weight;
  int64_t depth;
  Put put;

  template <int M>
  void strip(int64_t row, int64_t block, int64_t end) const {
    constexpr int B = side_by_side<M>();
    const int32_t* from = x + row * depth * Kind::PARTS;
    for (; block + B <= end; block += B)
      tile<Kind, M, B>(from, weight, depth, row, block, put);
    for (; block < end; ++block) tile<Kind, M, 1>(from, weight, depth, row, block, put);
  }
};

#ifdef HAS_TILES
// The same by tiles, of depths that fill them: of bytes where sums are integers, else of bfloat16.
template <typename Sum, typename Put>
struct TileProduct {
  const int32_t *x, *weight;
  int64_t depth;
  Put put;

  // One strip reads the weight once: up to 48 rows, three tiles of them, are worth that.
  static int64_t most(int64_t m) { return (m <= 3 * tiles::SIDE ? 3 : 2) * tiles::SIDE; }

  void strip(int64_t row, int64_t rows, int64_t block, int64_t end) const {
    if (rows <= tiles::SIDE)
      strip_of<1>({row, rows, rows}, block, end);
    else if (rows <= 2 * tiles::SIDE)
      strip_of<2>({row, rows, (rows + 1) / 2}, block, end);
    else
      strip_of<3>({row, rows, (rows + 2) / 3}, block, end);
  }

 private:
  // `count` rows from `first` on, `each` in a tile but in the last.
  struct Rows {
    int64_t first, count, each;

    int64_t in(int tile) const { return std::min(each, count - tile * each); }
  };

  // A tiles of rows with B blocks of outputs: the sums, the rows, and the weight in what is left.
  template <int A, int B>
  void use_sizes(const Rows& rows) const {
    tiles::Sizes sizes;
    for (int i = 0; i < A * B; ++i) sizes.set(i, rows.in(i / B), LANES);
    for (int i = 0; i < A; ++i) sizes.set(A * B + i, rows.in(i), tiles::SIDE);
    for (int i = A * B + A; i < 8; ++i) sizes.set(i, tiles::SIDE, LANES);
    sizes.use();
  }

  template <int A, int B>
  void multiply(const Rows& rows, int64_t block) const {
    using namespace tiles;
    constexpr int ROWS = A * B, WEIGHTS = ROWS + A;
    each<A * B>([](auto i) { zero<i>(); });
    for (int64_t p = 0; p < depth; p += SIDE) {
      each<A>([&](auto a) { load<ROWS + a>(x + (rows.first + a * rows.each) * depth + p, depth); });
      each<B>([&](auto b) {
        const int32_t* from = weight + (block + b) * depth * LANES;
        if (rows.first == 0)
          for (int64_t i = p; i < p + SIDE; ++i) fetch_ahead<B>(from, i, depth);
        constexpr int WEIGHT = WEIGHTS + b % (8 - WEIGHTS);
        load<WEIGHT>(from + p * LANES, LANES);
        each<A>([&](auto a) {
          if constexpr (std::is_same_v<Sum, Ints>)
            add_bytes<a * B + b, ROWS + a, WEIGHT>();
          else
            add_bfloat16<a * B + b, ROWS + a, WEIGHT>();
        });
      });
    }
    each<A * B>([&](auto i) {
      Sum sums[SIDE];
      store<i>(sums, LANES);
      int64_t row = rows.first + i / B * rows.each, column = (block + i % B) * LANES;
      for (int64_t m = 0; m < rows.in(i / B); ++m)
        put.put(row + m, column, std::min(put.n - column, LANES), sums[m]);
    });
  }

  template <int A>
  void strip_of(const Rows& rows, int64_t block, int64_t end) const {
    constexpr int B = A > 2 ? 1 : 4 / A;
    use_sizes<A, B>(rows);
    for (; block + B <= end; block += B) multiply<A, B>(rows, block);
    if (block < end) use_sizes<A, 1>(rows);
    for (; block < end; ++block) multiply<A, 1>(rows, block);
    tiles::release();
  }
};

inline bool fill_tiles(int64_t depth) { return depth % tiles::SIDE == 0 && tiles::are_allowed(); }
#endif

// Call `strip` with all of m rows, at most `most` at once, and of a weight's blocks, of `depth` words
// each, by the threads of the team.
template <typename Strip>
void in_strips(int64_t m, int64_t most, int64_t blocks, int64_t depth, const Strip& strip) {
  if (!m) return;
  int64_t parts = (m + most - 1) / most, rows = (m + parts - 1) / parts;
  int64_t grain = std::max<int64_t>(1, GRAIN / (depth * LANES) / 4);
  // In fours, as many as are multiplied beside each other.
  ::parallel_for(0, (blocks + 3) / 4, grain, [&](int64_t begin, int64_t end) {
    int64_t last = std::min(4 * end, blocks);
    for (int64_t block = 4 * begin; block < last; block += BLOCKS)
      for (int64_t row = 0; row < m; row += rows)
        strip(row, std::min(rows, m - row), block, std::min(block + BLOCKS, last));
  });
}

// By vectors, whose strips have code of their own for each number of rows.
template <typename Work>
void multiply(const Work& work, int64_t m, int64_t blocks, int64_t depth) {
  [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
    using Strip = void (Work::*)(int64_t, int64_t, int64_t) const;
    constexpr Strip STRIPS[] = {&Work::template strip<LESS + 1>...};
    in_strips(m, MOST_ROWS, blocks, depth, [&](int64_t row, int64_t rows, int64_t block, int64_t end) {
      (work.*STRIPS[rows - 1])(row, block, end);
    });
  }(std::make_integer_sequence<int, MOST_ROWS>());
}

#ifdef HAS_TILES
template <typename Sum, typename Put>
void multiply(const TileProduct<Sum, Put>& work, int64_t m, int64_t blocks, int64_t depth) {
  in_strips(m, work.most(m), blocks, depth, [&](int64_t row, int64_t rows, int64_t block, int64_t end) {
    work.strip(row, rows, block, end);
  });
}
#endif

// Room for a weight, in the largest pages that the system gives: a pass reads all of them, and looks
// few up.
inline Tensor room(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr uintptr_t PAGE = 2 << 20;
  Tensor made = at::empty(sizes, options);
  uintptr_t begin = (reinterpret_cast<uintptr_t>(made.data_ptr()) + PAGE - 1) / PAGE * PAGE;
  uintptr_t end = (reinterpret_cast<uintptr_t>(made.data_ptr()) + made.nbytes()) / PAGE * PAGE;
  // An advice: where it is not taken pages are small.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  return made;
}

inline Tensor kept(const Tensor& weight) { return room(weight.sizes(), weight.options()).copy_(weight); }

inline Tensor pack(const Tensor& given) {
  Tensor weight = given.contiguous();
  int64_t n = weight.size(0), depth = words(weight), blocks = (n + LANES - 1) / LANES;
  Tensor packed = room({blocks, depth, LANES, 4 / given.element_size()}, weight.options());
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

inline Out written(const Tensor& out, const std::optional<Tensor>& bias) {
  TORCH_CHECK(!bias.has_value() || bias->scalar_type() == out.scalar_type(), "bias: of x's type");
  return {out.mutable_data_ptr(), out.scalar_type() == at::kBFloat16,
          bias.has_value() ? bias->const_data_ptr() : nullptr};
}

Tensor product(const Tensor& given, const Tensor& weight, const std::optional<Tensor>& bias,
               int64_t n) {
  bool half = given.scalar_type() == at::kBFloat16, narrow = weight.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || given.scalar_type() == at::kFloat, "x: bfloat16 or float32");
  TORCH_CHECK(narrow || weight.scalar_type() == at::kFloat, "weight: bfloat16 or float32");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), n}, x.options());
  int64_t m = x.size(0), depth = weight.size(1);
  TORCH_CHECK(given.size(1) == depth * weight.size(3), "x: as many columns as the weight");
  Plain put{written(out, bias), n};
  auto by = [&](auto kind) {
    multiply(Product<decltype(kind), Plain>{data<int32_t>(x), data<int32_t>(weight), depth, put}, m,
             weight.size(0), depth);
    return out;
  };
#ifdef HAS_TILES
  if (half && narrow && fill_tiles(depth)) {
    multiply(TileProduct<Floats, Plain>{data<int32_t>(x), data<int32_t>(weight), depth, put}, m,
             weight.size(0), depth);
    return out;
  }
#endif
#ifdef __AVX512BF16__
  if (half && narrow) return by(Bfloat16{});
#endif
  if (half) x = x.to(at::kFloat);
  return narrow ? by(Widened{}) : by(Float32{});
}

// A row in 8 bits without a sign, 128 more than it stands for, and the size of its unit, which is
// not finite where some number is not.
template <typename T>
float round_row(const T* from, int64_t k, uint8_t* digits) {
  // What this is added to has its integer, to the nearest and ties to even, in its lowest bits.
  const Floats whole = lanes::all(12582912.0f);
  // As integers sizes are in the same order, and above them all is what is no number.
  Ints most{};
  for (int64_t i = 0; i < k; i += LANES) {
    Ints size = (Ints)lanes::load(from + i, k - i) & 0x7fffffff;
    most = size > most ? size : most;
  }
  float largest = std::bit_cast<float>(lanes::most(most));
  float unit = (largest < 1e-30f ? 1e-30f : largest) / 127;
  // Of what is not finite nothing is left but the unit.
  const Ints kept = Ints{} - (std::isfinite(unit) ? 1 : 0);
  for (int64_t i = 0; i < k; i += LANES) {
    Floats x = lanes::load(from + i, k - i) / unit + whole;
    lanes::store_bytes(digits + i, (((Ints)x - (Ints)whole) & kept) + 128, k - i);
  }
  return unit;
}

// What is read, each group of a row in 8 bits of its own unit.
struct Digits {
  std::vector<uint8_t> bytes;
  std::vector<float> units;

  Digits(const Tensor& x, int64_t groups)
      : bytes(x.numel()), units(x.size(0) * groups) {
    int64_t size = x.size(1) / groups;
    typed(x, [&](auto kind) {
      using T = decltype(kind);
      ::parallel_for(0, std::ssize(units), std::max<int64_t>(1, GRAIN / (8 * size)),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t at = begin; at < end; ++at)
                         units[at] =
                             round_row(data<T>(x) + at * size, size, bytes.data() + at * size);
                     });
    });
  }
};

// Digits as Int8's two parts want them.
std::vector<int16_t> in_parts(const std::vector<uint8_t>& bytes) {
  std::vector<int16_t> made(bytes.size());
  for (size_t i = 0; i < bytes.size(); i += 4)
    for (size_t j = 0; j < 4; ++j) made[i + j] = bytes[i + j % 2 * 2 + j / 2] - 128;
  return made;
}

Tensor int8_product(const Tensor& given, const Tensor& weight, const Tensor& scale,
                    const Tensor& shift, const std::optional<Tensor>& bias) {
  TORCH_CHECK(given.size(1) == 4 * weight.size(1), "x: as many columns as the weight");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), scale.size(0)}, x.options());
  Digits digits(x, 1);
  const int32_t* words = data<int32_t>(weight);
  int64_t depth = weight.size(1);
  Scaled put{written(out, bias), scale.size(0), digits.units.data(), data<float>(scale),
             data<int32_t>(shift)};
  std::vector<int16_t> parts;
  const void* bytes = digits.bytes.data();
#ifdef HAS_TILES
  if (fill_tiles(depth)) {
    TileProduct<Ints, Scaled> work{static_cast<const int32_t*>(bytes), words, depth, put};
    multiply(work, x.size(0), weight.size(0), depth);
    return out;
  }
#endif
  if (Int8::PARTS == 2) bytes = (parts = in_parts(digits.bytes)).data();
  Product<Int8, Scaled> work{static_cast<const int32_t*>(bytes), words, depth, put};
  multiply(work, x.size(0), weight.size(0), depth);
  return out;
}

// A product with a weight of 4 bits (N, K), (code - zero) * scale with a scale and a zero for each
// group of inputs: codes (N / LANES, K / 8, LANES, 4), of whose bytes the low halves are four inputs
// and the high halves the next four; scales (N / LANES, groups, LANES) in float32, zeros alike in
// bytes, MOST_ZERO at most. `span` groups of a row's digits have a unit.
struct Int4 {
  const int32_t *digits, *starts;
  const float* units;
  const uint8_t *codes, *zeros;
  const float* scales;
  int64_t groups, words, span;  // Words: of 8 inputs, in a group.
  Plain put;

  // A code is made larger by so much less its zero, so that it has no sign, and a row's group starts
  // from as much less.
  static constexpr int MOST_ZERO = 16;

  // Group g of M rows with B blocks of outputs.
  template <int M, int B>
  void add(Floats (&sums)[M][B], int64_t row, int64_t block, int64_t g) const {
    const int64_t depth = groups * words;
    Ints found[M][B], more[B];
    for (int b = 0; b < B; ++b) {
      int64_t at = ((block + b) * groups + g) * LANES;
      int64_t next = at + (2 + (g + 2 < groups ? 0 : (B - 1) * groups)) * LANES;
      _mm_prefetch(reinterpret_cast<const char*>(scales + next), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(zeros + next), _MM_HINT_T0);
      more[b] = (MOST_ZERO - lanes::load_bytes(zeros + at)) * 0x01010101;
    }
    for (int m = 0; m < M; ++m)
      for (int b = 0; b < B; ++b) found[m][b] = starts[(row + m) * groups + g] - Ints{};
    for (int64_t p = g * words; p < (g + 1) * words; ++p) {
      Ints low[B], high[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const uint8_t* from = codes + (block + b) * depth * 4 * LANES;
        fetch_ahead<B>(from, p, depth);
        Ints both = load_words(from + p * 4 * LANES);
        low[b] = lanes::add_bytes(both & 0x0f0f0f0f, more[b]);
        high[b] = lanes::add_bytes(both >> 4 & 0x0f0f0f0f, more[b]);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
        add_products<B>(found[m], low, high, digits + 2 * ((row + m) * depth + p));
    }
    for (int b = 0; b < B; ++b) {
      int64_t at = ((block + b) * groups + g) * LANES;
      Floats scale = lanes::load(scales + at);
      for (int m = 0; m < M; ++m)
        sums[m][b] = lanes::fused(__builtin_convertvector(found[m][b], Floats), scale, sums[m][b]);
    }
  }

  template <int M, int B>
  void tile(int64_t row, int64_t block) const {
    Floats totals[M][B] = {};
    for (int64_t g = 0; g < groups; g += span) {
      Floats sums[M][B] = {};
      for (int64_t i = 0; i < span; ++i) add<M, B>(sums, row, block, g + i);
      for (int m = 0; m < M; ++m)
        for (int b = 0; b < B; ++b)
          totals[m][b] = lanes::fused(sums[m][b], units[((row + m) * groups + g) / span], totals[m][b]);
    }
    for (int b = 0; b < B; ++b) {
      int64_t column = (block + b) * LANES;
      for (int m = 0; m < M; ++m)
        put.put(row + m, column, std::min(put.n - column, LANES), totals[m][b]);
    }
  }

  template <int M>
  void strip(int64_t row, int64_t block, int64_t end) const {
    // With room for what a word is made into.
    constexpr int B = 2 * M <= REGISTERS / 2 - 2 ? 2 : 1;
    for (; block + B <= end; block += B) tile<M, B>(row, block);
    for (; block < end; ++block) tile<M, 1>(row, block);
  }
};

// Inputs whose digits have a unit, at most.
constexpr int64_t SPAN = 256;

Tensor int4_product(const Tensor& given, const Tensor& codes, const Tensor& scales,
                    const Tensor& zeros, const std::optional<Tensor>& bias, int64_t n) {
  TORCH_CHECK(given.size(1) == 8 * codes.size(1), "x: as many columns as the weight");
  Tensor x = given.contiguous(), out = at::empty({x.size(0), n}, x.options());
  int64_t groups = scales.size(1), words = codes.size(1) / groups, size = 8 * words;
  int64_t span = std::clamp<int64_t>(SPAN / size, 1, groups);
  while (groups % span) --span;
  Digits digits(x, groups / span);
  std::vector<int32_t> starts(x.size(0) * groups);
  for (size_t at = 0; at < starts.size(); ++at) {
    uint8_t* bytes = digits.bytes.data() + at * size;
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      // With a sign, where those of int8 may have none.
      bytes[i] ^= 0x80;
      sum += static_cast<int8_t>(bytes[i]);
    }
    starts[at] = -Int4::MOST_ZERO * sum;
  }
  Int4 work{reinterpret_cast<const int32_t*>(digits.bytes.data()), starts.data(), digits.units.data(),
            data<uint8_t>(codes), data<uint8_t>(zeros), data<float>(scales), groups, words, span,
            {written(out, bias), n}};
  multiply(work, x.size(0), codes.size(0), groups * words);
  return out;
}

}  // namespace products
