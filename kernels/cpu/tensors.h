// Tensors as runs of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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
