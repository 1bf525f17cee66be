#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

inline int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

/// A tensor's values without gaps: the tensor itself where it has none.
class Dense {
 public:
  explicit Dense(const at::Tensor& tensor) : tensor_(tensor), values_(tensor.contiguous()) {}

  std::byte* data() const { return static_cast<std::byte*>(values_.data_ptr()); }
  int64_t bytes() const { return bytes_of(values_); }
  int64_t element_size() const { return static_cast<int64_t>(values_.element_size()); }
  at::Tensor flat() const { return values_.detach().view(-1); }
  const at::Tensor& tensor() const { return tensor_; }

  void write_back() const {
    if (values_.is_same(tensor_)) return;
    const at::NoGradGuard no_grad;
    tensor_.detach().copy_(values_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor values_;
};

inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
}

/// The part of a tensor that goes through a slot in one step.
struct Chunk {
  int64_t begin, bytes;
};

/// So many bytes in chunks that fit into a slot; at least one, which may be empty.
class Chunks {
 public:
  Chunks(int64_t bytes, const Layout& layout)
      : bytes_(bytes), chunk_bytes_(static_cast<int64_t>(layout.input_bytes())) {}

  int64_t count() const { return std::max<int64_t>(1, (bytes_ + chunk_bytes_ - 1) / chunk_bytes_); }
  Chunk at(int64_t index) const {
    const int64_t begin = index * chunk_bytes_;
    return {begin, std::min(chunk_bytes_, bytes_ - begin)};
  }

 private:
  int64_t bytes_;
  int64_t chunk_bytes_;
};

}  // namespace syncbn::dist::detail::shm
