// Tensors as runs of memory, and work on them by a thread's team.
#pragma once

#include <ATen/core/Tensor.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "team.h"

// Parts of [begin, end), worth `grain` or more together, by this thread's team.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  if (begin >= end) return;
  int members = Team::members() ? Team::members() : omp_get_max_threads();
  if (end - begin <= grain || members == 1 || Team::is_at_work()) return work(begin, end);
  int64_t size = std::max<int64_t>(1, grain / 4), count = (end - begin + size - 1) / size;
  Team::mine().run(count, members, [&](int64_t first, int64_t last) {
    work(begin + first * size, std::min(end, begin + last * size));
  });
}

template <typename T>
const T* data(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* into(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// `work` for the type of `x`; a bfloat16 is its bits.
template <typename Work>
auto typed(const at::Tensor& x, const Work& work) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "float32 or bfloat16 is expected");
  return x.scalar_type() == at::kFloat ? work(float()) : work(uint16_t());
}
