// The tiles of AMX: eight registers of 16 rows of 64 bytes, and an instruction that multiplies two.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace tiles {

// Rows of a tile, and words of each.
constexpr int64_t SIDE = 16;

// Whether the system lets this process use tiles.
inline bool are_allowed() {
  constexpr int ASK = 0x1023, TILES = 18;  // Linux: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, ASK, TILES) == 0;
  return is_allowed;
}

// How large each tile is.
class Sizes {
 public:
  void set(int tile, int64_t rows, int64_t words) {
    rows_[tile] = static_cast<uint8_t>(rows), bytes_[tile] = static_cast<uint16_t>(4 * words);
  }
  // By this thread, until it uses others or releases its tiles.
  void use() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }

 private:
  alignas(64) uint8_t palette_[16] = {1};
  uint16_t bytes_[16] = {};
  uint8_t rows_[16] = {};
};

inline void release() { asm volatile("tilerelease"); }

template <int TILE>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows that are `words` apart.
template <int TILE>
void load(const int32_t* from, int64_t words) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(4 * words), "i"(TILE) : "memory");
}

template <int TILE>
void store(void* to, int64_t words) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * words), "i"(TILE) : "memory");
}

// Add to the tile SUM, for each word of rows and of a weight, the products of its numbers: two in
// bfloat16; four bytes, those of the rows without a sign.
template <int SUM, int ROWS, int WEIGHT>
void add_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHT));
}

template <int SUM, int ROWS, int WEIGHT>
void add_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROWS), "i"(WEIGHT));
}

// `work` with 0 … COUNT - 1, constants in it.
template <int COUNT, typename Work>
void each(const Work& work) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

}  // namespace tiles
#endif
