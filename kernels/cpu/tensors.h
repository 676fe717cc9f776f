// Tensors as runs of memory, and work on them by a thread's team.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <omp.h>

#include <cstdint>

// As at::parallel_for, which a library of its own takes for new in each thread: it would set the
// number of threads that this one was given back to the process's.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  if (begin >= end) return;
  if (end - begin > grain && omp_get_max_threads() > 1 && !omp_in_parallel())
    at::internal::invoke_parallel(begin, end, grain, work);
  else
    work(begin, end);
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
