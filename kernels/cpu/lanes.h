// Floats side by side in the compiler's own vectors, as wide as the processor's.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace lanes {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline Floats all(float x) { return x - Floats{}; }

inline Floats choose(Ints mask, Floats yes, Floats no) {
  return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no));
}

inline bool any(Ints mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
}

// 0, 1, 2 …
inline Ints numbers() {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  return lane;
}

inline Floats largest(Floats a, Floats b) { return choose(a > b, a, b); }

inline Floats widened(Halves bits) {
  return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

// To the nearest bfloat16, ties to even; what is no number stays none.
inline Halves narrowed(Floats x) {
  Ints bits = (Ints)x, is_number = x == x;
  Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((is_number & rounded) | (~is_number & 0x7fc0), Halves);
}

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const uint16_t* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  return widened(x);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(uint16_t* to, Floats x) {
  Halves bits = narrowed(x);
  std::memcpy(to, &bits, sizeof bits);
}

// The first `count` numbers, and zeros.
template <typename T>
inline Floats load(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
  T some[LANES] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

template <typename T>
inline void store(T* to, Floats x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T some[LANES];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

// Not by the compiler's vectors, of which GCC takes each byte by itself.
inline Ints load_bytes(const uint8_t* from) {
#ifdef __AVX512F__
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
}

inline Ints load_bytes(const uint8_t* from, int64_t count) {
  if (count >= LANES) return load_bytes(from);
  uint8_t some[LANES] = {};
  std::memcpy(some, from, count);
  return load_bytes(some);
}

inline Ints add_bytes(Ints a, Ints b) {
#ifdef __AVX512F__
  return (Ints)_mm512_add_epi8((__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_add_epi8((__m256i)a, (__m256i)b);
#endif
}

// a * b + c, rounded once: FLAGS let the compiler make none by itself, as GCC's would go by how a loop
// was unrolled, and a row's bits with that by the number of rows.
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}
inline Floats fused(Floats a, Floats b, float c) { return fused(a, b, all(c)); }
inline Floats fused(Floats a, float b, Floats c) { return fused(a, all(b), c); }

// The lowest bytes of the first `count` integers.
inline void store_bytes(uint8_t* to, Ints x, int64_t count) {
  Bytes bytes = __builtin_convertvector(x, Bytes);
  std::memcpy(to, &bytes, count < LANES ? count : LANES);
}

// Lane i: the sum of the products of two neighbours in 16 bits; and of two bytes of `a` without a
// sign and of `b` with one, in 16 bits, which must hold them.
#ifdef __AVX512F__
inline Ints add_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
inline Ints add_byte_pairs(Ints a, Ints b) {
  return (Ints)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}
#else
inline Ints add_pairs(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline Ints add_byte_pairs(Ints a, Ints b) {
  return (Ints)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
#endif

// As a number of type T holds it.
template <typename T>
inline Floats held(Floats x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else
    return widened(narrowed(x));
}

// Lane i: a's lanes i and i ^ STRIDE if i has not that bit, else b's.
template <int STRIDE>
inline Floats folded(Floats a, Floats b) {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  Ints is_second = (lane & STRIDE) != 0;
  Ints other = (lane ^ STRIDE) + (is_second & static_cast<int32_t>(LANES));
  return choose(is_second, b, a) + __builtin_shuffle(a, b, other);
}

// Lane i: the sum of the lanes of x[i].
template <int STRIDE = 1>
inline Floats sums(const Floats* x) {
  constexpr int COUNT = LANES / 2 / STRIDE;
  if constexpr (COUNT == 1) {
    return folded<STRIDE>(x[0], x[1]);
  } else {
    Floats some[COUNT];
    for (int i = 0; i < COUNT; ++i) some[i] = folded<STRIDE>(x[2 * i], x[2 * i + 1]);
    return sums<2 * STRIDE>(some);
  }
}

inline float sum(Floats x) {
  Floats same[LANES];
  for (Floats& each : same) each = x;
  return sums(same)[0];
}

// The largest lane.
template <int STRIDE = LANES / 2, typename Vector>
inline auto most(Vector x) {
  if constexpr (STRIDE == 0) {
    return x[0];
  } else {
    Ints lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    Vector other = __builtin_shuffle(x, lane ^ STRIDE);
    return most<STRIDE / 2>((Vector)choose(x > other, (Floats)x, (Floats)other));
  }
}

// To 2 units of the last place; 0 where float32 has nothing smaller than its normal numbers.
inline Floats exp(Floats x) {
  Ints tiny = x < -87.3f;
  Floats y = choose(x > 88.3f, all(88.3f), choose(tiny, all(-87.3f), x));
  Floats n = fused(y, all(1.44269504f), 12582912.0f);
  Ints power = (Ints)n << 23;
  n -= 12582912.0f;
  Floats r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, y));
  Floats p = fused(all(1.9875691500e-4f), r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p * r, r, r) + 1.0f;
  return choose(tiny, all(0), (Floats)((Ints)p + power));
}

// To 2 units of the last place, of normal numbers over 0 (Cephes' logf).
inline Floats log(Floats x) {
  // As an exponent and a number between the roots of 1/2 and of 2.
  Ints power = ((Ints)x - 0x3f3504f3) >> 23;
  Floats r = (Floats)((Ints)x - (power << 23)) - 1.0f, n = __builtin_convertvector(power, Floats);
  Floats p = fused(all(7.0376836292e-2f), r, -1.1514610310e-1f);
  p = fused(p, r, 1.1676998740e-1f);
  p = fused(p, r, -1.2420140846e-1f);
  p = fused(p, r, 1.4249322787e-1f);
  p = fused(p, r, -1.6668057665e-1f);
  p = fused(p, r, 2.0000714765e-1f);
  p = fused(p, r, -2.4999993993e-1f);
  p = fused(p, r, 3.3333331174e-1f);
  Floats square = r * r, low = fused(square, -0.5f, fused(n, -2.12194440e-4f, p * r * square));
  return fused(n, 0.693359375f, low + r);
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace lanes
